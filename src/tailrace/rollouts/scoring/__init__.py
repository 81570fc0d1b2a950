"""Rewards: of one rollout, of a whole group, by functions in TRL's form or by a judge."""

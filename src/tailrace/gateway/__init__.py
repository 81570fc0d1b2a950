"""HTTP for agents outside: the policy of a rollout, in the dialects that agents speak already.

    key ─► session (one rollout) ─► dialect.read ─► ChatRequest ─► policy.chat ─► Reply ─► dialect.whole | events

The gateway is one more driver of a rollout's branches: what is recorded is what was sampled.
"""

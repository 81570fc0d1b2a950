"""HTTP for agents outside: the policy of a rollout, in the dialects that agents speak already.

    key ─► session (one rollout) ─► dialect.read ─► ChatRequest ─► policy.chat ─► Reply ─► dialect.whole | events

The gateway is one more driver of a rollout's branches: what is recorded is what was sampled. It runs on the event loop
of whoever plays the rollouts, and knows neither engines nor schedules. What can be asked of it: `docs/gateway.md`.
"""

from tailrace.gateway.gateway import Gateway, require_free_ports

__all__ = ["Gateway", "require_free_ports"]

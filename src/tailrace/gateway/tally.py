"""What the gateway counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tailrace.gateway.dialects.protocol import Answer
from tailrace.gateway.turns import Turn


@dataclass(slots=True)
class Tally:
    """Sums since the gateway was started."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By route and status; 0: the client had gone."""
    turns: int = 0
    running_turns: int = 0
    retries: int = 0
    """Requests that joined a turn that was there already."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sessions: int = 0

    def answered(self, route: str, status: int) -> None:
        """A request has got its answer."""
        self.requests[route, status] += 1

    def began(self, turn: Turn) -> None:
        """A request is sampled."""
        self.turns += 1
        self.running_turns += 1
        turn.on_end(self._ended)

    def joined(self) -> None:
        """A request waits for what another one asked for."""
        self.retries += 1

    def prometheus(self, *, open_rollouts: int) -> str:
        """In Prometheus' text format."""
        lines = [
            "# HELP tailrace_gateway_requests_total Requests by route and status; status 0: the client had gone.",
            "# TYPE tailrace_gateway_requests_total counter",
        ]
        for (route, status), count in sorted(self.requests.items()):
            lines.append(f'tailrace_gateway_requests_total{{route="{route}",status="{status}"}} {count}')
        figures = (
            ("rollouts_total", "counter", "Rollouts that were given an endpoint.", self.sessions),
            ("rollouts_open", "gauge", "Rollouts that have an endpoint now.", open_rollouts),
            ("turns_total", "counter", "Requests that were sampled.", self.turns),
            ("turns_running", "gauge", "Requests that are being sampled.", self.running_turns),
            ("retries_total", "counter", "Requests that joined a turn that was there already.", self.retries),
            ("prompt_tokens_total", "counter", "Tokens of the prompts that were answered.", self.prompt_tokens),
            ("completion_tokens_total", "counter", "Tokens that were sampled for answers.", self.completion_tokens),
        )
        for name, kind, what, value in figures:
            full = f"tailrace_gateway_{name}"
            lines += [f"# HELP {full} {what}", f"# TYPE {full} {kind}", f"{full} {value}"]
        return "\n".join(lines) + "\n"

    def _ended(self, turn: Turn) -> None:
        self.running_turns -= 1
        if isinstance(turn.outcome, Answer):
            self.prompt_tokens += turn.outcome.prompt_tokens
            self.completion_tokens += turn.outcome.reply.completion.num_tokens

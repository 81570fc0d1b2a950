"""Which path speaks which dialect. Every path is also there under `/rollouts/{key}`."""

from __future__ import annotations

from tailrace.gateway.dialects.chat_completions import ChatCompletions
from tailrace.gateway.dialects.protocol import CountsTokens, Dialect

TURNS: tuple[tuple[str, Dialect], ...] = (("/v1/chat/completions", ChatCompletions()),)
"""One turn of the policy each."""
TOKEN_COUNTS: tuple[tuple[str, CountsTokens], ...] = ()
"""Nothing is sampled: how many tokens a prompt has."""

"""Which path speaks which dialect. Every path is also there under `/rollouts/{key}`."""

from __future__ import annotations

from tailrace.gateway.dialects.chat_completions import ChatCompletions
from tailrace.gateway.dialects.messages import Messages
from tailrace.gateway.dialects.protocol import ChatDialect, CountsTokens
from tailrace.gateway.dialects.responses import Responses

_MESSAGES = Messages()

TURNS: tuple[tuple[str, ChatDialect], ...] = (
    ("/v1/chat/completions", ChatCompletions()),
    ("/v1/responses", Responses()),
    ("/v1/messages", _MESSAGES),
)
"""One turn of the policy each."""
TOKEN_COUNTS: tuple[tuple[str, CountsTokens], ...] = (("/v1/messages/count_tokens", _MESSAGES),)
"""Nothing is sampled: how many tokens a prompt has."""

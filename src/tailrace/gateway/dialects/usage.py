"""How many tokens an answer took, as OpenAI's chat completions and vLLM tell it."""

from __future__ import annotations

from tailrace.gateway.dialects.protocol import Answer
from tailrace.records import Json


def usage(answer: Answer) -> dict[str, Json]:
    """Tokens of an answer and of its prompt."""
    completion = answer.reply.completion.num_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": answer.prompt_tokens + completion,
    }

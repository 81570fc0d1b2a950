"""An answer that fails when its stream has begun: each client raises, or says, its own error."""

from __future__ import annotations

import anthropic
import httpx2
import openai
import pytest

from tailrace.gateway.dialects.messages import Messages
from tailrace.gateway.dialects.protocol import Failure
from tailrace.gateway.dialects.responses import Responses
from tests.support.answering_dialect import Answering

LOST = Failure(status=503, message="no engine is left")


def test_responses_end_as_failed() -> None:
    http = httpx2.Client(transport=Answering(Responses(), [LOST]).transport())
    client = openai.OpenAI(api_key="key", base_url="http://gateway/v1", http_client=http)
    events = list(client.responses.create(model="any", input="who?", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == LOST.message


def test_messages_raise() -> None:
    http = httpx2.Client(transport=Answering(Messages(), [LOST]).transport())
    client = anthropic.Anthropic(api_key="key", base_url="http://gateway", http_client=http)
    with (
        pytest.raises(anthropic.APIStatusError, match=LOST.message),
        client.messages.stream(model="any", max_tokens=9, messages=[{"role": "user", "content": "who?"}]) as stream,
    ):
        stream.until_done()

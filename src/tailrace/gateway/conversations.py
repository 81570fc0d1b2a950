"""What clients were answered, for those that name an answer in place of repeating its conversation."""

from __future__ import annotations

from tailrace.gateway.dialects.protocol import ChatRequest, RequestInvalid
from tailrace.records import Message

MOST = 1024
"""Answers that are kept of one session: more than a rollout has turns, and a bound where a session has no end."""


class Conversations:
    """The conversations of one session by their last answer. Messages are shared between them, never copied."""

    def __init__(self) -> None:
        self._by_answer: dict[str, list[Message]] = {}

    def whole(self, request: ChatRequest) -> list[Message]:
        """The whole conversation of a request. Raises `RequestInvalid` where it follows an answer that is not there."""
        if request.follows is None:
            return request.messages
        earlier = self._by_answer.get(request.follows)
        if earlier is None:
            raise RequestInvalid(
                f"no answer {request.follows!r} is stored for this key; send the whole conversation", status=404
            )
        own = request.num_instructions
        return [*request.messages[:own], *earlier, *request.messages[own:]]

    def keep(self, answer_id: str, request: ChatRequest, messages: list[Message], reply: Message) -> None:
        """Remember what `messages`, the whole conversation of a request, were answered with."""
        if request.is_followed:
            self._by_answer[answer_id] = [*messages[request.num_instructions :], reply]
            if len(self._by_answer) > MOST:
                del self._by_answer[next(iter(self._by_answer))]

"""Chat rendering: messages to tokens, tokens to messages, and never a sampled token to text and back.

first turn        render(messages)                      the whole conversation
following turns   bridge(branch, history, new)          only what the new messages add
every reply       parse(completion)                     text, reasoning, tool calls
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from tailrace.errors import EnvironmentFailed
from tailrace.records import Completion, Int32Array, Json, Message, ToolSpec, as_token_ids
from tailrace.rollouts.family_rendering import family_rendering
from tailrace.rollouts.replies import ParsedReply
from tailrace.rollouts.template_rendering import TemplateRendering
from tailrace.rollouts.tokenizer import ChatTokenizer


class Renderer(Protocol):
    """All that a policy asks of the rendering of a model's chats: `ChatRenderer`, or a model of one."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None) -> Int32Array:
        """See `ChatRenderer.render`."""
        ...

    def bridge(
        self,
        token_ids: Int32Array,
        reply_start: int,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
    ) -> Int32Array | None:
        """See `ChatRenderer.bridge`."""
        ...

    def parse(
        self, completion: Completion, *, prompt_token_ids: Int32Array, tools: Sequence[ToolSpec] | None = None
    ) -> ParsedReply:
        """See `ChatRenderer.parse`."""
        ...

    def drifts(self, completion: Completion) -> bool:
        """See `ChatRenderer.drifts`."""
        ...


class ChatRenderer:
    """Renders conversations for one model: by its family's hand-written renderer where there is one, else its template.

    `model` is the folder of its tokenizer; `name` the model's public name (`Qwen/Qwen3-0.6B`), by which its family is
    known, where the folder's `config.json` does not tell it.

    `thinking_retention`: `all` keeps the reasoning of earlier turns (the tokens as they were sampled), so that a
    conversation that only grows stays one branch; `template` leaves that to the family's template.
    """

    def __init__(
        self,
        model: str | Path | ChatTokenizer,
        *,
        name: str | None = None,
        thinking_retention: Literal["all", "template"] = "all",
    ) -> None:
        self.tokenizer = model if isinstance(model, ChatTokenizer) else ChatTokenizer.from_folder(model, name=name)
        self._family = family_rendering(self.tokenizer, thinking_retention)
        self._template = TemplateRendering(self.tokenizer)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply: hand them to the engine."""
        return (self._family or self._template).stop_token_ids

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None) -> Int32Array:
        """The whole conversation up to where the next reply begins: [num_tokens].

        Raises `EnvironmentFailed` where the model's template refuses the conversation (two user turns in a row, ...).
        """
        from jinja2 import TemplateError

        if not messages:
            raise EnvironmentFailed("the conversation is empty; chat() needs at least one message")
        try:
            return as_token_ids((self._family or self._template).render(messages, _envelopes(tools)))
        except (TemplateError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentFailed(
                f"the chat template of {self.tokenizer.name_or_path} refuses this conversation: {error}"
            ) from error

    def bridge(
        self,
        token_ids: Int32Array,
        reply_start: int,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
    ) -> Int32Array | None:
        """What `new_messages` add after a reply: the tokens to append to `token_ids`.

        `token_ids` [num_tokens] end with the sampled reply, which starts at `reply_start` and is the last message of
        `history`. None where the extension cannot be proved; then render the whole conversation as a new branch.
        """
        if self._family is not None:
            before = token_ids.tolist()
            added = self._family.bridge(before[:reply_start], before[reply_start:], new_messages, _envelopes(tools))
        else:
            is_closed = len(token_ids) > reply_start and int(token_ids[-1]) in self.stop_token_ids
            added = self._template.bridge(history, new_messages, _envelopes(tools), reply_is_closed=is_closed)
        return None if added is None else as_token_ids(added)

    def parse(
        self, completion: Completion, *, prompt_token_ids: Int32Array, tools: Sequence[ToolSpec] | None = None
    ) -> ParsedReply:
        """What the policy said in a turn whose prompt was `prompt_token_ids`."""
        token_ids: list[int] = completion.token_ids.tolist()
        if self._family is not None:
            return self._family.parse(token_ids, prompt_ids=prompt_token_ids.tolist(), tools=_envelopes(tools))
        return self._template.parse(
            self._without_stop(token_ids), prompt_opens_reasoning=self._opens_reasoning(prompt_token_ids)
        )

    def drifts(self, completion: Completion) -> bool:
        """Whether the reply's text would be tokenized otherwise than it was sampled."""
        token_ids = self._without_stop(completion.token_ids.tolist())
        return self.tokenizer.encode(self.tokenizer.decode(token_ids)) != token_ids

    def _without_stop(self, token_ids: list[int]) -> list[int]:
        return token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids

    def _opens_reasoning(self, prompt_token_ids: Int32Array) -> bool:
        """Whether the generation prompt ends inside `<think>`: a handful of tokens decide it."""
        return self.tokenizer.decode(prompt_token_ids[-8:].tolist()).rstrip("\n").endswith("<think>")


def _envelopes(tools: Sequence[ToolSpec] | None) -> list[dict[str, Json]] | None:
    """Tools as chat templates expect them; those that come in that form already are left alone."""
    if not tools:
        return None
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]

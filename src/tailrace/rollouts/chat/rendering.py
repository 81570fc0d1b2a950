"""Chat rendering: messages to tokens, tokens to messages, and never a sampled token to text and back.

first turn        render(messages)                      the whole conversation
following turns   bridge(branch, history, new)          only what the new messages add
every reply       parse(completion)                     text, reasoning, tool calls
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Literal, Protocol, cast

import msgspec
from typing_extensions import override

from tailrace.environments import ChatFormat
from tailrace.errors import EnvironmentFailed, ModelError
from tailrace.records import Completion, Int32Array, Json, Message, ToolSpec, as_token_ids
from tailrace.records.arrays import readonly
from tailrace.rollouts.chat.family_rendering import family_rendering
from tailrace.rollouts.chat.replies import ParsedReply, read_reply
from tailrace.rollouts.chat.template_rendering import TemplateRendering
from tailrace.rollouts.chat.tokenizer import ChatTokenizer

_log = logging.getLogger(__name__)

_REMEMBERED_PROMPTS = 256
_REMEMBERED_CHARACTERS = 8192
"""Of one prompt; together they bound what is remembered to some megabytes."""


class Renderer(Protocol):
    """All that a policy needs of the rendering of a model's chats: `ChatRenderer`, or a model of one."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None) -> Int32Array:
        """The whole conversation up to where the next reply begins: [num_tokens].

        Raises `EnvironmentFailed` where the model's template refuses the conversation (two user turns in a row, ...).
        """

    def bridge(
        self,
        token_ids: Int32Array,
        reply_start: int,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
    ) -> Int32Array | None:
        """What `new_messages` add after a reply: the tokens to append to `token_ids`. Without any, for a further reply.

        `token_ids` [num_tokens] end with the sampled reply, which starts at `reply_start` and is the last message of
        `history`. None where the extension cannot be proved; then render the whole conversation as a new branch.
        """

    def demonstrate(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None
    ) -> tuple[Int32Array, Int32Array]:
        """A conversation that ends with a reply, as if that had been sampled: the tokens of the prompt, and of the
        reply, up to and with the one that ends it.

        Raises `EnvironmentFailed` where the last message is no reply, or the model's template shows it otherwise than
        it asks for one.
        """

    def parse(
        self,
        completion: Completion,
        *,
        prompt_token_ids: Int32Array,
        tools: Sequence[ToolSpec] | None = None,
        reads_calls: bool = True,
    ) -> ParsedReply:
        """What the policy said in a turn whose prompt was `prompt_token_ids`; calls that are not read are its text."""

    def drifts(self, completion: Completion) -> bool:
        """Whether the reply's text would be tokenized otherwise than it was sampled."""

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of sampled tokens."""

    def reply_text(self, completion: Completion) -> str:
        """All that the policy wrote in a turn, without the token that ended it."""

    def replies_in_plain_text(self, prompt_token_ids: Int32Array) -> bool:
        """Whether what a reply to this prompt says begins with the text of its tokens, up to the first of `MARKERS`."""


class RendererSource(msgspec.Struct, frozen=True):
    """What a `ChatRenderer` is made of, here or in another process."""

    folder: str
    name: str
    thinking_retention: Literal["all", "template"]


class ChatRenderer(Renderer):
    """Renders conversations for one model: by its family's hand-written renderer where there is one, else its template.

    `model` is the folder of its tokenizer. The family is known by the model's public name (`Qwen/Qwen3-0.6B`), which is
    `name` where that is one, or stands in the folder's files; of any other model, by its template.

    Raises `ModelError` for a tokenizer that cannot be read, and one without any token that ends a reply.

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
        self.tokenizer = model if isinstance(model, ChatTokenizer) else ChatTokenizer(model, name=name)
        self.source = RendererSource(str(self.tokenizer.folder), self.tokenizer.name_or_path, thinking_retention)
        self._family = family_rendering(self.tokenizer, thinking_retention)
        self._template = TemplateRendering(self.tokenizer)
        self._told_dialect = False
        self._remembered = lru_cache(_REMEMBERED_PROMPTS)(self._render_plain)
        self._last_read: tuple[Completion | None, list[int], str] = None, [], ""
        self._ends_in_reasoning = lru_cache(_REMEMBERED_PROMPTS)(self._tail_opens_reasoning)
        if not self.stop_token_ids:
            raise ModelError(
                f"{self.tokenizer.name_or_path}: neither the chat template nor the tokenizer names a token that ends "
                "a reply; set eos_token in tokenizer_config.json"
            )

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply: hand them to the engine."""
        return (self._family or self._template).stop_token_ids

    @property
    def chat_format(self) -> ChatFormat:
        """How others render the same chats to the same tokens."""
        family = None if self._family is None else self._family.family
        return ChatFormat(self.source.folder, family, self.source.thinking_retention == "all")

    @override
    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None) -> Int32Array:
        if tools and self._family is None:
            self._tell_dialect()
        plain = _plain(messages) if self._family is None and not tools else None
        return self._render(messages, tools) if plain is None else self._remembered(plain)

    @override
    def demonstrate(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None
    ) -> tuple[Int32Array, Int32Array]:
        from jinja2 import TemplateError

        if not messages or messages[-1]["role"] != "assistant":
            raise EnvironmentFailed("a demonstration ends with the assistant's message, which is what is demonstrated")
        prompt = self.render(messages[:-1], tools)
        try:
            following = (self._family or self._template).reply(messages, _envelopes(tools), prompt.tolist())
        except (TemplateError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentFailed(
                f"the chat template of {self.tokenizer.name_or_path} refuses this demonstration: {error}"
            ) from error
        ends = [place for place, token in enumerate(following or ()) if token in self.stop_token_ids]
        if following is None or not ends:
            raise EnvironmentFailed(
                f"the chat template of {self.tokenizer.name_or_path} shows this reply otherwise than as what follows "
                "its prompt and ends with a stop token: it cannot be demonstrated"
            )
        return prompt, as_token_ids(following[: ends[-1] + 1])

    def _tell_dialect(self) -> None:
        """Warn, once, where the model's own tool calls will hardly be read."""
        if not self._told_dialect and not self._template.shows_hermes_calls:
            _log.warning(
                "%s: tools are offered to it, but its chat template does not show calls as "
                '<tool_call>{"name": ..., "arguments": {...}}</tool_call>, and only those are read: no renderer of '
                "its family is known, and any other call is text. If it comes from a public model that has one "
                "(docs/environments.md, Tools), write that model's name as name_or_path into its tokenizer_config.json",
                self.tokenizer.name_or_path,
            )
        self._told_dialect = True

    def _render_plain(self, messages: tuple[tuple[str, str], ...]) -> Int32Array:
        """The rollouts of a group begin alike: what one of them rendered, the others need not."""
        rendered = self._render([cast(Message, {"role": role, "content": content}) for role, content in messages], None)
        readonly(rendered)
        return rendered

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> Int32Array:
        from jinja2 import TemplateError

        if not messages:
            raise EnvironmentFailed("the conversation is empty; chat() needs at least one message").as_mistake()
        try:
            return as_token_ids((self._family or self._template).render(messages, _envelopes(tools)))
        except (TemplateError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentFailed(
                f"the chat template of {self.tokenizer.name_or_path} refuses this conversation: {error}"
            ).as_mistake() from error

    @override
    def bridge(
        self,
        token_ids: Int32Array,
        reply_start: int,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
    ) -> Int32Array | None:
        if self._family is None:
            is_closed = len(token_ids) > reply_start and int(token_ids[-1]) in self.stop_token_ids
            added = self._template.bridge(history, new_messages, _envelopes(tools), reply_is_closed=is_closed)
        elif new_messages:
            before = token_ids.tolist()
            prompt, completion = before[:reply_start], before[reply_start:]
            added = self._family.bridge(prompt, completion, history, new_messages, _envelopes(tools))
        else:
            added = self._between_replies(token_ids[reply_start:].tolist(), history, tools)
        return None if added is None else as_token_ids(added)

    def _between_replies(
        self, completion: list[int], history: Sequence[Message], tools: Sequence[ToolSpec] | None
    ) -> list[int] | None:
        """What a family puts between a reply and a further one, which its renderer bridges to new messages only.

        It is what two conversations have in common at their end that differ in this reply alone. None for a reply of
        reasoning alone, which may not have been closed, and one with another stop token than it is closed with.
        """
        if self.source.thinking_retention != "all" or not history[-1].get("content"):
            return None
        one, other = (
            reversed(self._render([*history[:-1], {"role": "assistant", "content": said}], tools).tolist())
            for said in "01"
        )
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        added = [token for token, _ in alike][::-1]
        if not added or added[0] not in self.stop_token_ids:
            return None
        if completion[-1] not in self.stop_token_ids:
            return added
        return added[1:] if completion[-1] == added[0] else None

    @override
    def parse(
        self,
        completion: Completion,
        *,
        prompt_token_ids: Int32Array,
        tools: Sequence[ToolSpec] | None = None,
        reads_calls: bool = True,
    ) -> ParsedReply:
        if self._family is not None:
            token_ids: list[int] = completion.token_ids.tolist()
            prompt_ids: list[int] = prompt_token_ids.tolist()
            try:
                return self._family.parse(
                    token_ids, prompt_ids=prompt_ids, tools=_envelopes(tools), reads_calls=reads_calls
                )
            except (ValueError, RecursionError):  # a number of thousands of digits, lists without end
                return ParsedReply(self.reply_text(completion), malformed_tool_calls=int(reads_calls))
        opens_reasoning = self._opens_reasoning(prompt_token_ids)
        text = self.reply_text(completion)
        return read_reply(text, prompt_opens_reasoning=opens_reasoning, reads_calls=reads_calls)

    @override
    def drifts(self, completion: Completion) -> bool:
        token_ids, text = self._read(completion)
        return self.tokenizer.encode(text) != token_ids

    @override
    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    @override
    def reply_text(self, completion: Completion) -> str:
        return self._read(completion)[1]

    @override
    def replies_in_plain_text(self, prompt_token_ids: Int32Array) -> bool:
        return self._family is None and not self._opens_reasoning(prompt_token_ids)

    def _read(self, completion: Completion) -> tuple[list[int], str]:
        """Its tokens without the one that ended it, and their text. Read twice in a row, decoded once."""
        read, token_ids, text = self._last_read
        if read is not completion:
            token_ids = completion.token_ids.tolist()
            if token_ids and token_ids[-1] in self.stop_token_ids:
                token_ids.pop()
            text = self.tokenizer.decode(token_ids)
            self._last_read = completion, token_ids, text
        return token_ids, text

    def _opens_reasoning(self, prompt_token_ids: Int32Array) -> bool:
        """Whether the generation prompt ends inside `<think>`: a handful of tokens decide it."""
        return self._ends_in_reasoning(tuple(prompt_token_ids[-8:].tolist()))

    def _tail_opens_reasoning(self, token_ids: tuple[int, ...]) -> bool:
        return self.tokenizer.decode(token_ids).rstrip("\n").endswith("<think>")


def _plain(messages: Sequence[Message]) -> tuple[tuple[str, str], ...] | None:
    """A short conversation of nothing but roles and text, as a key; None for any other."""
    plain, characters = [], 0
    for message in messages:
        content = message.get("content")
        if len(message) != 2 or not isinstance(content, str):
            return None
        characters += len(content)
        plain.append((message["role"], content))
    return tuple(plain) if characters <= _REMEMBERED_CHARACTERS else None


def _envelopes(tools: Sequence[ToolSpec] | None) -> list[dict[str, Json]] | None:
    """Tools as chat templates expect them; those that come in that form already are left alone."""
    if not tools:
        return None
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]

"""Rollouts as conversations, for the report and the terminal. All their text is hostile: a model or a task wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tailrace.records import Json, Outcome, Rollout
from tailrace.reporting.formats import NOTHING, seconds
from tailrace.reporting.run_folder import ChosenRollout
from tailrace.visible_text import visible

_MESSAGE_CHARACTERS = 6_000
_MESSAGES = 40
_LINE_CHARACTERS = 60
_TERMINAL_CHARACTERS = 600
_LINE_BREAK = " ⏎ "


@dataclass(frozen=True, slots=True)
class Bubble:
    """One message as the page shows it."""

    role: str
    text: str
    reasoning: str = ""
    tool_calls: Sequence[tuple[str, str]] = ()
    """Names and arguments."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chosen rollout as the page shows it."""

    chosen: ChosenRollout
    bubbles: Sequence[Bubble]
    left_out: int
    facts: Sequence[tuple[str, str]]


def conversation(chosen: ChosenRollout) -> Conversation:
    """A rollout, cut to what a page can hold."""
    messages = chosen.record.messages
    return Conversation(
        chosen,
        [_bubble(message) for message in messages[:_MESSAGES]],
        max(0, len(messages) - _MESSAGES),
        _facts(chosen),
    )


def conversation_lines(rollout: Rollout) -> Iterator[str]:
    """A rollout for the terminal: its task and reward, then every message on a line of its own.

    Each is made when it is asked for: a screen has room for few of them.
    """
    reward = NOTHING if rollout.reward is None else f"{rollout.reward.value:.3f}"
    yield f"{_one_line(readable(rollout.task.task_id))}: reward {reward}"
    for message in rollout.messages:
        bubble = _bubble(dict(message), _TERMINAL_CHARACTERS)
        calls = [f"{name}({arguments})" for name, arguments in bubble.tool_calls]
        said = _one_line("\n".join(filter(None, [bubble.reasoning, bubble.text, *calls])))
        yield f"  {_one_line(bubble.role):9}  {said[:_TERMINAL_CHARACTERS]}{'…' * (len(said) > _TERMINAL_CHARACTERS)}"


def _one_line(text: str) -> str:
    return text.replace("\n", _LINE_BREAK)


def message_text(message: dict[str, Json]) -> str:
    """A message for a table's cell: its role, then what it says and calls."""
    bubble = _bubble(message)
    calls = [f"{name}({arguments})" for name, arguments in bubble.tool_calls]
    return "\n".join([f"{bubble.role}:", *filter(None, [bubble.reasoning, bubble.text, *calls])])


def outcome_text(outcome: Outcome) -> str:
    """
    >>> outcome_text(Outcome.failed("timeout")), outcome_text(Outcome.trained(3))
    ('failed: timeout', 'trained')
    """
    return ": ".join(filter(None, (outcome.state, outcome.reason)))


def _facts(chosen: ChosenRollout) -> list[tuple[str, str]]:
    record, versions = chosen.record, chosen.record.versions
    facts = [("step", f"{record.step:,}"), ("turns", f"{record.turns:,}"), ("tokens", f"{record.completion_tokens:,}")]
    if versions is not None:
        span = f"{versions.min}" if versions.min == versions.max else f"{versions.min} to {versions.max}"
        facts.append(("policy version", span))
    if record.advantage is not None:
        facts.append(("advantage", f"{record.advantage:+.3f}"))
    facts.append(("took", seconds(record.duration_s)))
    facts.append(("outcome", outcome_text(record.outcome)))
    return facts + [
        (name, NOTHING if value is None else f"{value:.3f}") for name, value in record.reward_components.items()
    ]


def _bubble(message: dict[str, Json], most: int = _MESSAGE_CHARACTERS) -> Bubble:
    """Of each of its parts `most` characters."""
    calls = message.get("tool_calls")
    return Bubble(
        role=readable(message.get("role"), most),
        text=readable(message.get("content"), most),
        reasoning=readable(message.get("reasoning_content"), most),
        tool_calls=[_tool_call(call, most) for call in calls] if isinstance(calls, list) else [],
    )


def _tool_call(call: Json, most: int) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "tool call", pretty(call, most)
    name, arguments = readable(function.get("name"), most), function.get("arguments", "")
    return name, readable(arguments, most) if isinstance(arguments, str) else _short_json(arguments, most)


def readable(value: Json, most: int = _MESSAGE_CHARACTERS) -> str:
    """Text for the page: control characters made visible, very long texts cut, saying how much was left out."""
    text = "" if value is None else str(value)
    rest = len(text) - most
    return visible(text[:most]) + (f"\n… and {rest:,} more characters" if rest > 0 else "")


def _short_json(value: Json, most: int) -> str:
    compact = readable(msgspec.json.encode(value).decode("utf-8", "replace"), most)
    return compact if len(compact) <= _LINE_CHARACTERS else pretty(value, most)


def pretty(value: Json, most: int = _MESSAGE_CHARACTERS) -> str:
    """A value as indented JSON."""
    return readable(msgspec.json.format(msgspec.json.encode(value), indent=2).decode("utf-8", "replace"), most)

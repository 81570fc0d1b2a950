"""The judge's usual form: all rollouts of a group in one prompt, one score by id for each in one JSON object.

What the rollouts share at their beginning is written once, and rollouts that are word for word the same are one
candidate, so that they get one score. Relative scores need no scale that holds across tasks, since advantages compare
the rollouts of a group; after RULER (OpenPipe's ART, https://art.openpipe.ai/fundamentals/ruler).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile

from typing_extensions import override

from tailrace.environments import JudgeFormat
from tailrace.errors import JudgeFailed
from tailrace.records import Group, Json, Message

_INSTRUCTIONS = """\
You compare several attempts at one task and score every one of them from 0 to 1, relative to the others.

What counts:
{rubric}

Answer with one JSON object and nothing else, one entry for every attempt:
{{"scores": [{{"id": "1", "why": "in a few words", "score": 0.5}}]}}"""


class ScoresById(JudgeFormat):
    """Numbered candidates in, `{"scores": [{"id": "1", "score": 0.5}, ...]}` out, in any order."""

    @override
    def prompt(self, group: Group, rubric: str) -> list[Message]:
        conversations = [rollout.messages for rollout in group.rollouts]
        shared = shared_messages(conversations)
        parts = []
        if shared:
            parts.append(f"<shared>\n{_as_text(conversations[0][:shared])}\n</shared>")
        for text, candidate in _candidates(group).items():
            parts.append(f'<attempt id="{candidate}">\n{text}\n</attempt>')
        return [
            {"role": "system", "content": _INSTRUCTIONS.format(rubric=rubric)},
            {"role": "user", "content": "\n\n".join(parts)},
        ]

    @override
    def scores(self, answer: str, group: Group) -> Sequence[float]:
        candidates = _candidates(group)
        found = read_scores(answer, list(candidates.values()))
        shared = shared_messages([rollout.messages for rollout in group.rollouts])
        return [found[candidates[_as_text(rollout.messages[shared:])]] for rollout in group.rollouts]


def shared_messages(conversations: Sequence[Sequence[Message]]) -> int:
    """How many messages all conversations begin with; the last message of each is never among them.

    >>> question, yes, no = [{"role": "user", "content": text} for text in ("Is it?", "yes", "no")]
    >>> shared_messages([[question, yes], [question, no]]), shared_messages([[question], [question]])
    (1, 0)
    """
    most = min((len(messages) for messages in conversations), default=0) - 1
    positions = takewhile(lambda at: all(one[at] == conversations[0][at] for one in conversations), range(most))
    return sum(1 for _ in positions)


def read_scores(answer: str, ids: Sequence[str]) -> dict[str, float]:
    """The score of every id, from the last JSON object with `scores` in the answer.

    Raises `JudgeFailed` where there is none, an id is missing, unknown or there twice, or a score is not in [0, 1].

    >>> read_scores('Sure! {"scores": [{"id": "2", "score": 1}, {"id": "1", "score": 0.25}]}', ["1", "2"])
    {'2': 1.0, '1': 0.25}
    """
    listed = [value["scores"] for value in _json_objects(answer) if isinstance(value.get("scores"), list)]
    if not listed:
        raise JudgeFailed(f"no JSON object with a list of `scores` in the answer {answer!r:.200}")
    found: dict[str, float] = {}
    for entry in listed[-1]:
        candidate = str(entry.get("id")) if isinstance(entry, dict) else ""
        if candidate not in ids or candidate in found:
            what = "twice" if candidate in found else "which is no attempt"
            raise JudgeFailed(f"it scored {entry!r:.100}, {what}; the ids are {', '.join(ids)}")
        found[candidate] = valid_score(entry.get("score"), candidate)
    if missing := [candidate for candidate in ids if candidate not in found]:
        raise JudgeFailed(f"it gave no score for {', '.join(missing)}")
    return found


def valid_score(value: object, candidate: str) -> float:
    """The score as a number. Raises `JudgeFailed` unless it is one in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise JudgeFailed(f"its score of {candidate} is {value!r:.100}; it must be a number from 0 to 1")
    return float(value)


def _candidates(group: Group) -> dict[str, str]:
    """The distinct rests of the conversations as text, with their ids, in order."""
    conversations = [rollout.messages for rollout in group.rollouts]
    shared = shared_messages(conversations)
    texts = dict.fromkeys(_as_text(messages[shared:]) for messages in conversations)
    return {text: str(number) for number, text in enumerate(texts, start=1)}


def _as_text(messages: Sequence[Message]) -> str:
    """Messages as JSON, one a line: tool calls and odd characters survive, and no attempt can close its tag."""
    return "\n".join(json.dumps(message, ensure_ascii=False).replace("</", "<\\/") for message in messages)


def _json_objects(text: str) -> Iterator[dict[str, Json]]:
    """Every JSON object in a text that may hold anything else around them."""
    decoder, position = json.JSONDecoder(), text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            yield value
        position = text.find("{", end)

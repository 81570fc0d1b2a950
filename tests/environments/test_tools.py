"""A reply's tool calls are answered; what is wrong with one is told to the policy."""

from __future__ import annotations

import pytest

from tailrace.environments import Message, ToolSpec, answer_tool_calls
from tests.support.scripted_policy import ScriptedPolicy, calls

REPEAT = ToolSpec(
    name="repeat",
    description="Say a word several times.",
    parameters={
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "times": {"type": ["integer", "number"]},
            "loud": {"type": "boolean", "nullable": True},
            "style": {"anyOf": [{"type": "string"}, {"type": "array"}]},
            "when": {"type": "date"},
        },
        "required": ["word", "times"],
    },
)


def repeat(word: str, times: float = 1, loud: bool | None = None, style: object = "", when: object = "") -> str:
    said = word * int(times)
    return said.upper() if loud else said


async def answered(arguments: dict[str, object] | str, specs: tuple[ToolSpec, ...] = (REPEAT,)) -> str:
    ask: Message = {"role": "user", "content": "Say it."}
    reply = await ScriptedPolicy([calls("repeat", arguments)]).chat([ask])
    (answer,) = await answer_tool_calls(reply, {"repeat": repeat}, specs)
    return answer["content"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"word": "no", "times": 2}, "nono"),
        ({"word": "no", "times": 2.0, "loud": True}, "NONO"),
        ({"word": "no", "times": 1, "loud": None, "style": 5, "when": 5}, "no"),
        ('{"word": "no", "times": 1}', "no"),
        ({"word": 5, "times": 1}, "error: repeat: argument 'word' must be of type string"),
        ({"word": None, "times": 1}, "error: repeat: argument 'word' must be of type string"),
        ({"word": "no", "times": True}, "error: repeat: argument 'times' must be of type integer or number"),
        ({"word": "no", "times": "2"}, "error: repeat: argument 'times' must be of type integer or number"),
        ({"word": "no", "times": 2, "loud": 1}, "error: repeat: argument 'loud' must be of type boolean or null"),
        ({"word": "no"}, "error: repeat: missing a required argument: 'times'"),
        ({"times": 1}, "error: repeat: missing a required argument: 'word'"),
        ({"word": "no", "times": 1, "tone": 1}, "error: repeat: got an unexpected keyword argument 'tone'"),
    ],
)
async def test_arguments_are_what_the_spec_declares_or_the_policy_is_told(
    arguments: dict[str, object] | str, says: str
) -> None:
    assert await answered(arguments) == says


async def test_a_schema_that_takes_anything_is_no_error() -> None:
    anything: ToolSpec = {"name": "repeat", "description": "", "parameters": {"properties": {"word": True}}}
    assert await answered({"word": "no"}, specs=(anything,)) == "no"


async def test_without_its_spec_a_tool_gets_whatever_it_can_be_called_with() -> None:
    assert await answered({"word": "no"}, specs=()) == "no"
    with pytest.raises(AttributeError):
        await answered({"word": 5, "times": 1, "loud": True}, specs=())

"""Replies that are JSON of a schema: what vLLM samples then, and under which log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from tailrace.errors import RequestRefused
from tailrace.gateway.dialects.forced_calls import offered
from tailrace.generation.engines.vllm.engine import VllmEngine
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.models.loading import tokenizer_folder
from tailrace.records import Completion, FinishReason, ToolSpec
from tailrace.rollouts import ChatTokenizer
from tests.generation.engine_kinds import require_vllm_installed
from tests.generation.engine_support import Driver, request
from tests.support.bundled_models import BUNDLED

pytestmark = pytest.mark.xdist_group("vllm")

SEATS = {
    "type": "object",
    "properties": {"left": {"enum": ["Ada", "Bob"]}, "right": {"enum": ["Ada", "Bob"]}},
    "required": ["left", "right"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    require_vllm_installed()
    from tailrace.generation.engines.vllm.core import build_core

    made = VllmEngine(
        build_core(
            ModelSettings(name=BUNDLED, max_model_tokens=512),
            GeneratorSettings(
                engine="vllm",
                slots=4,
                vllm={
                    "kv_cache_memory_bytes": 1 << 26,
                    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
                },
            ),
        )
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(tokenizer_folder(BUNDLED, tmp_path_factory.mktemp("tokenizer")))


def test_a_reply_is_json_of_its_schema_and_its_neighbours_are_not(engine: VllmEngine, tokenizer: ChatTokenizer) -> None:
    prompt = tokenizer.encode("Who sits beside Max?")
    asked = [asking(f"r{seed}", prompt, SEATS, tokenizer, seed=seed) for seed in range(3)]
    *all_guided, free = Driver(engine).run(*asked, asking("free", prompt, None, tokenizer, seed=0))
    for guided in all_guided:
        assert guided.finish_reason is FinishReason.STOP
        assert set(json.loads(said(guided, tokenizer)).values()) <= {"Ada", "Bob"}
        assert np.isfinite(guided.logprobs).all()
        assert guided.logprobs[-1] == pytest.approx(0, abs=1e-5)  # after the last bracket nothing else is left
    with pytest.raises(ValueError, match=r"Expecting|Extra"):
        json.loads(said(free, tokenizer))


def test_a_forced_call_is_one_of_a_tool_that_was_offered(engine: VllmEngine, tokenizer: ChatTokenizer) -> None:
    tools = [ToolSpec(name=name, description="", parameters=SEATS) for name in ("seat", "swap")]
    _, form = offered(tools, ("forced", None))
    assert form is not None
    prompt = tokenizer.encode("Who sits beside Max?")
    asked = [asking(f"f{seed}", prompt, json.loads(form.schema), tokenizer, seed=seed) for seed in range(8)]
    # a list of calls may be longer than the reply
    whole = [forced for forced in Driver(engine).run(*asked) if forced.finish_reason is FinishReason.STOP]
    assert whole
    for forced in whole:
        calls = json.loads(said(forced, tokenizer))
        assert {call["name"] for call in calls} <= {"seat", "swap"}
        assert all(set(call["arguments"].values()) <= {"Ada", "Bob"} for call in calls)
    _, form = offered(tools, ("forced", "swap"))
    assert form is not None
    (forced,) = Driver(engine).run(asking("named", prompt, json.loads(form.schema), tokenizer, seed=1))
    (call,) = json.loads(said(forced, tokenizer))
    assert (call["name"], set(call["arguments"])) == ("swap", {"left", "right"})


@pytest.mark.parametrize("schema", [{"type": "no such type"}, {"type": "string", "pattern": "("}])
def test_a_schema_that_cannot_be_followed_is_refused(
    engine: VllmEngine, tokenizer: ChatTokenizer, schema: dict[str, object]
) -> None:
    with pytest.raises(RequestRefused, match="request r: its JSON schema cannot be followed"):
        engine.add(asking("r", [5, 6], schema, tokenizer))
    assert not engine.has_work


def test_json_that_was_interrupted_is_not_gone_on_with(engine: VllmEngine, tokenizer: ChatTokenizer) -> None:
    (prefix,) = Driver(engine).run(asking("first", [5, 6], None, tokenizer, max_tokens=4))
    with pytest.raises(RequestRefused, match="interrupted"):
        engine.add(asking("r", [5, 6], SEATS, tokenizer, prefix=prefix))


def asking(name: str, prompt: list[int], schema: object, tokenizer: ChatTokenizer, **more: object):  # type: ignore[no-untyped-def]
    form = None if schema is None else json.dumps(schema)
    stops = (tokenizer.encode("<|im_end|>")[0],)
    return request(name, prompt, **{"json_schema": form, "max_tokens": 256, "stop_token_ids": stops, **more})


def said(completion: Completion, tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(completion.token_ids[:-1].tolist())

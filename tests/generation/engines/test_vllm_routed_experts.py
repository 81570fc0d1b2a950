"""vLLM's routed experts in our shape, over outputs of its own type: its CPU build returns none itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import SettingsError
from tailrace.generation.engines.protocol import SampledTokens
from tailrace.generation.engines.vllm.core import make_config
from tailrace.generation.engines.vllm.options import require_vllm
from tailrace.generation.engines.vllm.progress import Progress
from tailrace.generation.engines.vllm.requests import core_request
from tailrace.generation.engines.vllm.routed_experts import DeliveredExperts, ReturnedExperts
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.models.loading import resolve_model
from tailrace.records import Completion, FinishReason, GenerationRequest
from tests.generation.engine_kinds import require_vllm_installed
from tests.generation.engine_support import request
from tests.support.expert_models import expert_model

pytestmark = pytest.mark.xdist_group("vllm")

LAYERS, TOP_K = 3, 2


@pytest.fixture(autouse=True)
def _installed() -> None:
    require_vllm_installed()


def rows(first: int, end: int) -> np.ndarray:
    """As if the token at position p were routed to experts that tell p."""
    positions = np.arange(first, end).reshape(-1, 1, 1)
    return np.broadcast_to(positions, (end - first, LAYERS, TOP_K)).astype(np.uint8)


def serve(
    asked: GenerationRequest, outputs: list[tuple[list[int], list[float], np.ndarray | None]], start: int = 0
) -> tuple[SampledTokens, ReturnedExperts]:
    """The last chunk after outputs of vLLM: (tokens, log-probabilities, rows) each."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    experts = ReturnedExperts(asked.context_token_ids, start)
    progress = Progress(asked, "r#1", salt="", opens_session=True, chunk_tokens=4, added_s=0.0, experts=experts)
    for tokens, logprobs, routed in outputs:
        columns = np.array(logprobs, np.float32)[:, None]
        lists = LogprobsLists(np.array(tokens)[:, None], columns, np.zeros(len(tokens), np.int64))
        output = EngineCoreOutput(request_id="r#1", new_token_ids=tokens, new_logprobs=lists, routed_experts=routed)
        progress.take(output, 0, 1.0)
        if progress.pending >= 4:
            assert progress.report(None, 1.0).routed_experts is None
    return progress.report(FinishReason.STOP, 2.0), experts


def decoded(prompt: int, count: int, start: int = 0) -> list[tuple[list[int], list[float], np.ndarray | None]]:
    """A prompt's rows with the first token, then one row with each."""
    ends = range(prompt, prompt + count)
    return [([index], [-1.0], rows(start if end == prompt else end - 1, end)) for index, end in enumerate(ends)]


def test_rows_of_all_steps_become_one_array_without_the_last_token() -> None:
    chunk, _ = serve(request("r", range(7)), decoded(7, 100))
    assert chunk.routed_experts is not None
    assert (chunk.routed_experts.dtype, chunk.routed_experts_start) == (np.uint8, 0)
    np.testing.assert_array_equal(chunk.routed_experts, rows(0, 106))


def test_a_later_turn_asks_for_what_its_session_lacks() -> None:
    chunk, _ = serve(request("r", range(7)), decoded(7, 3, start=5), start=5)
    np.testing.assert_array_equal(chunk.routed_experts, rows(5, 9))
    assert chunk.routed_experts_start == 5
    sent = core_request(request("r", range(7)), core_id="r#1", salt="", experts_start=5)
    assert sent.sampling_params.routed_experts_prompt_start == 5


def test_tokens_that_are_not_finite_leave_no_rows_behind() -> None:
    outputs = [*decoded(7, 2), ([1, 2], [-1.0, float("nan")], rows(8, 10))]
    chunk, _ = serve(request("r", range(7)), outputs)
    assert len(chunk.token_ids) == 3
    np.testing.assert_array_equal(chunk.routed_experts, rows(0, 9))


def test_rows_that_leave_a_gap_are_no_record(caplog: pytest.LogCaptureFixture) -> None:
    chunk, _ = serve(
        request("r", range(7)), [([1], [-1.0], rows(0, 7)), ([2], [-1.0], None), ([3], [-1.0], rows(8, 9))]
    )
    assert chunk.routed_experts is None
    assert "expected 9" in caplog.text


def turn(
    handed_out: DeliveredExperts,
    prompt: list[int],
    count: int,
    *,
    prefix: Completion | None = None,
    aborted: bool = False,
) -> tuple[int, list[int]]:
    """One turn of session s: where its experts start, and all tokens."""
    asked = request("r", prompt, session="s", prefix=prefix)
    start = handed_out.start(asked)
    context = asked.context_token_ids
    outputs = decoded(len(context), count, start)
    _, experts = serve(asked, outputs, start)
    handed_out.note(asked, experts, aborted=aborted)
    return start, [*context.tolist(), *(tokens[0] for tokens, _, _ in outputs)]


def test_a_session_is_handed_each_position_once() -> None:
    handed_out = DeliveredExperts()
    first_start, tokens = turn(handed_out, [1, 2, 3], 4)
    second_start, longer = turn(handed_out, [*tokens, 8, 9], 2)
    third_start, _ = turn(handed_out, [*longer[:5], 50], 2)
    assert (first_start, second_start, third_start) == (0, 6, 0)


def test_an_aborted_turn_counts_for_the_one_that_continues_it_alone() -> None:
    for continues, expected in ((True, 5), (False, 0)):
        handed_out = DeliveredExperts()
        _, tokens = turn(handed_out, [1, 2, 3], 3, aborted=True)
        sampled = np.array(tokens[3:], np.int32)
        part = Completion(sampled, np.zeros(3, np.float32), np.zeros(3, np.int32), FinishReason.ABORTED)
        start, _ = turn(handed_out, [1, 2, 3], 2, prefix=part if continues else None)
        assert start == expected


def test_what_never_ran_was_handed_nothing() -> None:
    handed_out = DeliveredExperts()
    turn(handed_out, [1, 2, 3], 0, aborted=True)
    assert turn(handed_out, [1, 2, 3], 2)[0] == 0
    assert turn(handed_out, [1, 2, 3, 0, 1, 7], 1)[0] == 4


def test_the_build_for_cpus_refuses_in_our_words(tmp_path: Path) -> None:
    expert_model("qwen3-moe").config.save_pretrained(tmp_path)
    generator = GeneratorSettings(engine="vllm", return_routed_experts=True)
    with pytest.raises(SettingsError, match="on GPUs only"):
        make_config(resolve_model(str(tmp_path)), ModelSettings(name=str(tmp_path)), generator)


def test_vllms_own_option_is_said_by_ours() -> None:
    with pytest.raises(SettingsError, match=r"write generator\.return_routed_experts instead"):
        require_vllm(GeneratorSettings(engine="vllm", vllm={"enable_return_routed_experts": True}))

"""vLLM's sampling masks in our shape, over outputs of its own type: its CPU build returns none itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tailrace.errors import EngineFailed, SettingsError
from tailrace.generation.engines.protocol import SampledTokens
from tailrace.generation.engines.vllm.core import make_config
from tailrace.generation.engines.vllm.progress import Progress
from tailrace.generation.settings import GeneratorSettings, ModelSettings
from tailrace.models.loading import resolve_model
from tailrace.records import FinishReason, GenerationRequest
from tests.generation.engine_kinds import contract_model, require_vllm_installed
from tests.generation.engine_support import request

pytestmark = pytest.mark.xdist_group("vllm")

Output = tuple[list[int], list[float], list[list[int]] | None]


@pytest.fixture(autouse=True)
def _installed() -> None:
    require_vllm_installed()


def serve(asked: GenerationRequest, outputs: list[Output]) -> list[SampledTokens]:
    """The chunks after outputs of vLLM: (tokens, log-probabilities, what each was sampled from)."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

    progress, chunks = Progress(asked, "r#1", salt="", opens_session=True, chunk_tokens=4, added_s=0.0), []
    for tokens, logprobs, kept in outputs:
        lists = LogprobsLists(
            np.array(tokens)[:, None], np.array(logprobs, np.float32)[:, None], np.zeros(len(tokens), np.int64)
        )
        masks = None
        if kept is not None:
            offsets = np.cumsum([0, *map(len, kept)])
            masks = SamplingMaskLists(np.concatenate([np.empty(0), *kept]).astype(np.int32), offsets)
        output = EngineCoreOutput(
            request_id="r#1",
            new_token_ids=tokens,
            new_logprobs=lists,
            new_sampling_mask=None if masks is None else masks.slice_request(0, len(tokens)),
        )
        progress.take(output, 0, 1.0)
        if progress.pending >= 4:
            chunks.append(progress.report(None, 1.0))
    return [*chunks, progress.report(FinishReason.STOP, 2.0)]


def test_masks_of_all_outputs_become_supports() -> None:
    asked = request("r", [1, 2], top_p=0.9, returns_supports=True)
    outputs: list[Output] = [
        ([4], [-0.5], [[4, 6]]),
        ([5, 7], [-0.5, 0.0], [[1, 5, 9], [7]]),  # two tokens of speculative decoding
        ([2], [-0.1], [[2, 3]]),
        ([8], [-0.1], [[8]]),
    ]
    first, last = serve(asked, outputs)
    assert first.supports is not None
    assert first.supports.counts.tolist() == [2, 3, 1, 2]
    assert first.supports.token_ids.tolist() == [4, 6, 1, 5, 9, 7, 2, 3]
    assert last.supports is not None
    assert (last.supports.counts.tolist(), last.supports.token_ids.tolist()) == ([1], [8])


def test_tokens_from_one_that_is_not_finite_on_leave_no_support_behind() -> None:
    asked = request("r", [1, 2], top_k=5, returns_supports=True)
    (chunk,) = serve(asked, [([4], [-0.5], [[4, 6]]), ([5, 7], [-0.5, float("nan")], [[1, 5, 9], [7]])])
    assert chunk.supports is not None
    assert chunk.supports.counts.tolist() == [2, 3]


def test_masks_that_do_not_come_fail_the_engine_instead_of_meaning_the_whole_vocabulary() -> None:
    with pytest.raises(EngineFailed, match="did not say what they left of the vocabulary"):
        serve(request("r", [1, 2], top_p=0.9, returns_supports=True), [([4], [-0.5], None)])


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"returns_supports": True}])
def test_masks_that_nobody_asked_for_are_dropped(sampling: dict[str, float]) -> None:
    (chunk,) = serve(request("r", [1, 2], **sampling), [([4], [-0.5], [[4, 6]])])
    assert chunk.supports is None


def test_the_build_for_cpus_refuses_in_our_words(tmp_path: Path) -> None:
    contract_model().config.save_pretrained(tmp_path)
    generator = GeneratorSettings(engine="vllm", vllm={"return_sampling_mask": True})
    with pytest.raises(SettingsError, match=r"return_sampling_mask: vLLM returns .* on GPUs only"):
        make_config(resolve_model(str(tmp_path)), ModelSettings(name=str(tmp_path)), generator)

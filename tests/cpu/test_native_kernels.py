"""Native passes compute what torch's operations compute; without a compiler there are none, and nothing breaks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tailrace.cpu.build import compiled, find_compiler, load_library
from tailrace.cpu.kernels import Heads, Kernels, Rotation, find_kernels
from tailrace.generation.engines.torch.sampler import sample

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
HEADS = Heads(queries=6, keys=2, size=16)
PACKED = (6 + 2 * 2) * 16


@pytest.fixture
def kernels() -> Kernels:
    if find_compiler() is None:
        pytest.skip("no C++ compiler: make test-system")
    library = load_library()
    assert library is not None
    return Kernels(library)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found.float(), expected.detach().float(), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 130])
def test_a_sum_and_its_norm(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    stream, delta, weight = torch.randn(rows, 48), torch.randn(rows, 48).to(dtype), torch.randn(48)
    parts = [tensor.float().requires_grad_() for tensor in (stream, delta, weight)]
    total = parts[0] + parts[1]
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * parts[2]
    found_total, found_normed, inverse = kernels.add_norm(stream, delta, weight, 1e-6, dtype)
    close(found_total, total, torch.float32)
    close(found_normed, normed, dtype)
    grad_total, grad_normed = torch.randn(rows, 48), torch.randn(rows, 48).to(dtype)
    expected = torch.autograd.grad([total, normed], parts, [grad_total, grad_normed.float()])
    found = kernels.add_norm_backward(found_total, inverse, weight, grad_total, grad_normed)
    for one, other, kind in zip(found, expected, (torch.float32, dtype, torch.float32), strict=True):
        close(one, other, kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_activation(kernels: Kernels, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(7, 40)).to(dtype)
    gate_up[0, 0], gate_up[0, 1] = 200, -200
    given = gate_up.float().requires_grad_()
    expected = F.silu(given[:, :20]) * given[:, 20:]
    close(kernels.swiglu(gate_up), expected, dtype)
    gradient = torch.randn(7, 20).to(dtype)
    (grad,) = torch.autograd.grad(expected, given, gradient.float())
    close(kernels.swiglu_backward(gate_up, gradient), grad, dtype)


def test_what_is_not_a_number_stays_none(kernels: Kernels) -> None:
    gate_up = torch.full((1, 4), float("nan"))
    assert kernels.swiglu(gate_up).isnan().all()
    assert kernels.add_norm(gate_up, None, torch.ones(4), 1e-6, torch.bfloat16)[1].isnan().all()


def rotation_of(tokens: int, *, norms: bool) -> Rotation:
    angles = torch.randn(tokens, HEADS.size // 2).repeat(1, 2)
    weights = (torch.randn(HEADS.size), torch.randn(HEADS.size)) if norms else (None, None)
    return Rotation(*weights, 1e-6, angles.cos(), angles.sin(), 0.25)


def rotated(x: Tensor, weight: Tensor | None, rotation: Rotation) -> Tensor:
    """The plain formula, [tokens, heads, size]."""
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rotation.epsilon) * weight
    half = HEADS.size // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * rotation.cosine[:, None] + turned * rotation.sine[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [True, False])
def test_rotated_heads_in_padded_groups(kernels: Kernels, dtype: torch.dtype, norms: bool) -> None:
    """Two segments of up to 4 tokens; the second borrows its first token from the first."""
    packed = torch.randn(6, PACKED).to(dtype)
    rotation = rotation_of(6, norms=norms)
    gather = torch.tensor([0, 1, 2, -1, 0, 3, 4, 5])
    own_places, own_tokens = torch.tensor([0, 1, 2, 5, 6, 7]), torch.arange(6)
    borrowed_places, borrowed_tokens = torch.tensor([4]), torch.tensor([0])
    given = packed.float().requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in (rotation.query_weight, rotation.key_weight) if norms]  # type: ignore[union-attr]
    query, key, value = given.view(6, -1, HEADS.size).split([HEADS.queries, HEADS.keys, HEADS.keys], dim=1)
    query, key = (
        rotated(heads, weights[index] if norms else None, rotation) for index, heads in enumerate((query, key))
    )
    own = (gather >= 0).float().view(-1, 1, 1)
    expected = [
        (heads[gather.clamp(min=0)] * own).view(2, 4, -1, HEADS.size).transpose(1, 2)
        for heads in (query * rotation.scale, key, value)
    ]
    found = kernels.rotate_gather(packed, rotation, HEADS, gather=gather, segments=2)
    for one, other in zip(found, expected, strict=True):
        close(one, other, dtype)

    grads = [torch.randn_like(padded).to(dtype) for padded in found]
    grads[0].view(2, HEADS.queries, 4, -1)[1, :, 0] = 0  # nothing is asked of a borrowed query
    expected_grads = torch.autograd.grad(expected, [given, *weights], [grad.float() for grad in grads])
    grad = torch.empty_like(packed)
    of_weights = torch.zeros(HEADS.size), torch.zeros(HEADS.size)
    for places, tokens, adds in ((own_places, own_tokens, False), (borrowed_places, borrowed_tokens, True)):
        kernels.rotate_gather_backward(
            packed, rotation, HEADS, places=places, tokens=tokens, grads=(grads[0], grads[1], grads[2]),
            adds=adds, grad=grad, grad_query_weight=of_weights[0], grad_key_weight=of_weights[1],
        )  # fmt: skip
    for one, other in zip([grad, *of_weights], expected_grads, strict=False):
        close(one, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_groups_to_rows_and_back(kernels: Kernels, dtype: torch.dtype) -> None:
    padded = torch.randn(2, 3, 4, 8).to(dtype)
    places, tokens = torch.tensor([0, 2, 7]), torch.tensor([4, 0, 1])
    rows = torch.zeros(5, 24, dtype=dtype)
    kernels.move(padded, places, tokens, rows, inward=False)
    by_place = padded.transpose(1, 2).reshape(8, 24)
    assert torch.equal(rows[tokens], by_place[places])
    back = torch.zeros_like(padded)
    kernels.move(back, places, tokens, rows, inward=True)
    assert torch.equal(back.transpose(1, 2).reshape(8, 24)[places], by_place[places])
    assert not back.transpose(1, 2).reshape(8, 24)[[1, 3, 4, 5, 6]].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [HEADS, Heads(4, 2, 64), Heads(2, 2, 64), Heads(9, 3, 64), Heads(2, 1, 128)])
def test_a_token_of_each_slot_over_its_cache(kernels: Kernels, dtype: torch.dtype, heads: Heads) -> None:
    keys, values = (torch.randn(3, heads.keys, 32, heads.size).to(dtype) for _ in range(2))
    query, lengths = torch.randn(3, heads.queries, heads.size).to(dtype), torch.tensor([1, 32, 9])
    found = kernels.decode(query, (keys, values), lengths, heads)
    for row, length in enumerate(lengths.tolist()):
        expected = F.scaled_dot_product_attention(
            query[row, :, None].float(), keys[row, :, :length].float(), values[row, :, :length].float(), scale=1.0,
            enable_gqa=True,
        )  # fmt: skip
        close(found[row], expected.flatten(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_go_to_their_slots(kernels: Kernels, dtype: torch.dtype) -> None:
    packed, rotation = torch.randn(3, PACKED).to(dtype), rotation_of(3, norms=True)
    caches = torch.zeros(2, 4, HEADS.keys, 8, HEADS.size, dtype=dtype).unbind()
    slots, positions = torch.tensor([2, 2, 0]), torch.tensor([0, 1, 7])
    query = kernels.rotate_store(packed, rotation, HEADS, slots=slots, positions=positions, caches=caches)
    heads = packed.float().view(3, -1, HEADS.size).split([HEADS.queries, HEADS.keys, HEADS.keys], dim=1)
    close(query, rotated(heads[0], rotation.query_weight, rotation) * rotation.scale, dtype)
    close(caches[0][slots, :, positions], rotated(heads[1], rotation.key_weight, rotation), dtype)
    assert torch.equal(caches[1][slots, :, positions], heads[2].to(dtype))
    assert int(caches[0].any(-1).sum()) == 3 * HEADS.keys


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_causal_softmax_of_a_block_of_queries(kernels: Kernels, dtype: torch.dtype) -> None:
    """Two heads with 5 queries each, which stand at 3, 4, ..., 7."""
    scores = (3 * torch.randn(2, 10, 8)).to(dtype)
    hidden = torch.arange(8) > (torch.arange(10) % 5 + 3)[:, None]
    given = scores.float().requires_grad_()
    expected = given.masked_fill(hidden, float("-inf")).softmax(-1)
    gradient = torch.randn(2, 10, 8).to(dtype)
    (grad,) = torch.autograd.grad(expected, given, gradient.float())
    found = kernels.causal_softmax(scores, block=5, start=3)
    close(found, expected, dtype)
    assert not found[:, hidden].any()
    close(kernels.causal_softmax_backward(found, gradient, block=5, start=3), grad, dtype)


@pytest.mark.parametrize("vocabulary", [5, 64, 1000])
def test_tokens_and_logprobs_are_those_of_torchs_sampler(kernels: Kernels, vocabulary: int) -> None:
    rows = 300
    logits = 3 * torch.randn(rows, vocabulary)
    generator = np.random.default_rng(0)
    arguments = {
        "temperatures": np.where(np.arange(rows) % 3, generator.uniform(0.3, 2, rows), 0).astype(np.float32),
        "top_ps": np.ones(rows, np.float32),
        "top_ks": np.zeros(rows, np.int32),
        "draws": np.where(np.arange(rows) % 7, generator.uniform(size=rows), 0.0),
    }
    arguments["draws"][-1] = np.nextafter(1.0, 0.0)
    expected, found = sample(logits, **arguments), sample(logits, sample_all=kernels.sample, **arguments)
    np.testing.assert_array_equal(found[0][:-1], expected[0][:-1])
    np.testing.assert_allclose(found[1][:-1], expected[1][:-1], atol=1e-5)
    assert 0 <= found[0][-1] < vocabulary  # the last draw may round up to the end on one side
    assert np.isfinite(found[1][-1])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_says_so_and_leaves_others_alone(kernels: Kernels, wrong: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = wrong
    ones, none = np.ones(3, np.float32), np.zeros(3, np.int32)
    token_ids, logprobs, _ = sample(
        logits, temperatures=ones, top_ps=ones, top_ks=none, draws=np.full(3, 0.5), sample_all=kernels.sample
    )
    assert np.isfinite(logprobs).tolist() == [True, False, True]
    assert ((token_ids >= 0) & (token_ids < 4)).all()


def test_a_library_is_compiled_once_and_a_compiler_that_fails_is_told(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler: make test-system")
    library = compiled(compiler, tmp_path)
    written = library.stat().st_mtime_ns
    assert compiled(compiler, tmp_path) == library
    assert library.stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [library]
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        compiled(str(broken), tmp_path)
    assert failed.value.stderr == "no such flag\n"


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    load_library.cache_clear()
    try:
        assert find_kernels() is None
    finally:
        load_library.cache_clear()

"""The native kernels as functions of tensors. Every tensor is contiguous, on the CPU, and of the dtype that is named.

`T` is the dtype of compute, float32 or bfloat16; norms' weights, angles and the residual stream are float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tailrace.cpu.build import load_library

_FUNCTION = ctypes.CFUNCTYPE(None)
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Heads(NamedTuple):
    """Shape of an attention layer; a packed token is [queries | keys | values], `(queries + 2 keys) * size` long."""

    queries: int
    keys: int
    size: int


class Rotation(NamedTuple):
    """What happens to queries and keys: a norm per head where there are weights [size], then the rotary embedding.

    The embedding: Su et al. 2021, "RoFormer", arXiv:2104.09864, eq. 34, with the halves of a head as its pairs.
    """

    query_weight: Tensor | None
    key_weight: Tensor | None
    epsilon: float
    cosine: Tensor
    """[tokens, size]"""
    sine: Tensor
    """[tokens, size]"""
    scale: float
    """Queries are multiplied by it."""


Argument: TypeAlias = Tensor | Heads | int | float | None


class _Heads(ctypes.Structure):
    """`Heads` in kernels.cpp."""

    _fields_ = [(name, c_int64) for name in Heads._fields]


def find_kernels() -> Kernels | None:
    """The kernels, where they can be had and one thread computes; torch's operations share work among more."""
    if torch.get_num_threads() != 1:
        return None
    library = load_library()
    return None if library is None else Kernels(library)


class Kernels:
    """Calls into the library; the interpreter's lock is released meanwhile."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._functions: dict[str, Callable[..., None]] = {}

    def add_norm(
        self, stream: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`stream + delta` [rows, size], its norm as a `T`, and 1 / rms [rows]. Without `delta` the sum is `stream`."""
        normed, inverse = stream.new_empty(stream.shape, dtype=dtype), stream.new_empty(len(stream))
        total = stream if delta is None else torch.empty_like(stream)
        self._call("add_norm", dtype, stream, delta, weight, epsilon, *stream.shape, total, normed, inverse)
        return total, normed, inverse

    def add_norm_backward(
        self, total: Tensor, inverse: Tensor, weight: Tensor, grad_total: Tensor, grad_normed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `stream`, of `delta` (the same, as a `T`) and of the weight."""
        grad, grad_weight, dtype = torch.empty_like(total), torch.zeros_like(weight), grad_normed.dtype
        rounded = None if dtype is torch.float32 else torch.empty_like(grad_normed)
        self._call(
            "add_norm_backward",
            dtype,
            *(total, inverse, weight, grad_total, grad_normed, *total.shape, grad, rounded, grad_weight),
        )
        return grad, grad if rounded is None else rounded, grad_weight

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` [rows, size] of [rows, 2 size] (Shazeer 2020, arXiv:2002.05202, eq. 6)."""
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._call("swiglu", gate_up.dtype, gate_up, rows, size, out)
        return out

    def swiglu_backward(self, gate_up: Tensor, grad_out: Tensor) -> Tensor:
        """Gradient of `gate_up`."""
        grad = torch.empty_like(gate_up)
        self._call("swiglu_backward", gate_up.dtype, gate_up, grad_out, *grad_out.shape, grad)
        return grad

    def rotate_gather(
        self, packed: Tensor, rotation: Rotation, heads: Heads, *, gather: Tensor, segments: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Padded queries, keys and values [segments, heads, length, size] of packed tokens.

        `gather` [segments * length] names each place's token; -1 becomes zeros.
        """
        length = len(gather) // segments
        query, key, value = (
            packed.new_empty(segments, count, length, heads.size) for count in (heads.queries, heads.keys, heads.keys)
        )
        self._call(
            "rotate_gather",
            packed.dtype,
            *(packed, *_described(rotation, heads), gather, segments, length, query, key, value),
        )
        return query, key, value

    def rotate_gather_backward(
        self,
        packed: Tensor,
        rotation: Rotation,
        heads: Heads,
        *,
        places: Tensor,
        tokens: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
        adds: bool,
        grad: Tensor,
        grad_query_weight: Tensor,
        grad_key_weight: Tensor,
    ) -> None:
        """Bring padded `grads` at `places` to `grad` [tokens, packed], where they are written, or added if `adds`.

        Where `adds`, queries are left out: a borrowed token asks nothing. Weights' gradients are always added to.
        """
        self._call(
            "rotate_gather_backward",
            packed.dtype,
            *(packed, *_described(rotation, heads), places, tokens, len(places), grads[0].shape[2], *grads),
            *(int(adds), grad, grad_query_weight, grad_key_weight),
        )

    def move(self, padded: Tensor, places: Tensor, tokens: Tensor, rows: Tensor, *, inward: bool) -> None:
        """`rows` [tokens, heads * size] take what `padded` [segments, heads, length, size] holds at `places`.

        `inward` the other way round; other places of `padded` stay as they are.
        """
        _, heads, length, size = padded.shape
        self._call(
            "move_places", rows.dtype, padded, rows, heads, size, places, tokens, len(places), length, int(inward)
        )

    def rotate_store(
        self,
        packed: Tensor,
        rotation: Rotation,
        heads: Heads,
        *,
        slots: Tensor,
        positions: Tensor,
        caches: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Queries [tokens, queries, size]; keys and values go to `caches` [slots, keys, room, size]."""
        query = packed.new_empty(len(packed), heads.queries, heads.size)
        self._call(
            "rotate_store",
            packed.dtype,
            *(packed, *_described(rotation, heads), slots, positions, len(packed), caches[0].shape[2], query, *caches),
        )
        return query

    def decode(self, query: Tensor, caches: tuple[Tensor, Tensor], lengths: Tensor, heads: Heads) -> Tensor:
        """Attention of `query` [rows, queries, size], scaled, over the first `lengths` [rows] tokens of slots 0, 1, ...

        Returns [rows, queries * size].
        """
        out = query.new_empty(len(query), heads.queries * heads.size)
        self._call("decode", query.dtype, query, *caches, lengths, len(query), heads, caches[0].shape[2], out)
        return out

    def causal_softmax(self, scores: Tensor, *, block: int, start: int) -> Tensor:
        """Softmax of `scores` [batch, heads * block, keys], in place, over what each query of a block sees.

        The block's queries stand at `start`, `start` + 1, ...; each sees the keys up to its own place.
        """
        self._call("causal_softmax", scores.dtype, scores, *scores.shape, block, start)
        return scores

    def causal_softmax_backward(self, probabilities: Tensor, grad: Tensor, *, block: int, start: int) -> Tensor:
        """The gradient of scores, in place of `grad`, that of `probabilities`."""
        self._call("causal_softmax_backward", grad.dtype, probabilities, grad, *grad.shape, block, start)
        return grad

    def sample(self, logits: Tensor, temperatures: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities [rows] of `logits` [rows, vocabulary].

        `temperatures` are float32, `draws` float64; all are [rows].
        """
        chosen, logprobs = draws.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits))
        self._call("sample", logits.dtype, logits, *logits.shape, temperatures, draws, chosen, logprobs)
        return chosen, logprobs

    def _call(self, name: str, dtype: torch.dtype, *arguments: Argument) -> None:
        name = f"{name}_{_SUFFIXES[dtype]}"
        if name not in self._functions:
            self._functions[name] = ctypes.cast(c_void_p.in_dll(self._library, name), _FUNCTION)
        self._functions[name](*map(_native, arguments))


def _described(rotation: Rotation, heads: Heads) -> tuple[Argument, ...]:
    weights = rotation.query_weight, rotation.key_weight
    return *weights, rotation.epsilon, rotation.cosine, rotation.sine, heads, rotation.scale


def _native(argument: Argument) -> c_void_p | c_int64 | c_float | _Heads:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous()
        return c_void_p(argument.data_ptr())
    if isinstance(argument, Heads):
        return _Heads(*argument)
    if isinstance(argument, float):
        return c_float(argument)
    return c_void_p(None) if argument is None else c_int64(argument)

"""A stand-in for a GPU: torch computes shapes, types and devices of `cuda` tensors that have no memory.

`FakeTensorMode` refuses an operation whose tensors lie on two devices, on a machine without a GPU. What it lacks is
added here: a device guard for autograd (`stand_in.cpp`, loaded before torch), and plain values where a program reads a
tensor back, each of which is counted, since on a real device it waits.

Run as a plugin of a pytest of its own (`-p tests.devices.stand_in`): torch must be told before it is imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("stand_in.cpp")


def _load_stand_in() -> ctypes.CDLL:
    """Compile the guard and the hooks against the installed torch, and load them."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder = Path(spec.origin).parent
    libraries = torch_folder / "lib"
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "stand_in.so"
        command = ["g++", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(built)]
        command += [f"-I{torch_folder / 'include'}", f"-L{libraries}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        for library in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(libraries / library), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


_stand_in = _load_stand_in()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

_stand_in.register_stand_in_guard()
_aten: Any = torch.ops.aten


class StandInGpu(FakeTensorMode):
    """Inside, tensors on `cuda` exist. `reads` counts how often a program waited for one of them."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.reads = 0

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Never: a small tensor of the host would be copied to the device for real."""
        return False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:
            self.reads += args[0].is_cuda
            return _plain_value(args[0].dtype)
        if func in (_aten.allclose.default, _aten.equal.default):
            self.reads += args[0].is_cuda
            return True
        if func is _aten._to_copy.default and _leaves_device(args[0], kwargs or {}):
            self.reads += 1
        if func is _aten.addmm.dtype_out:  # which torch 2.11 cannot compute without memory
            total, rows, columns, _ = args
            added = super().dispatch(_aten.mm.default, types, (rows, columns))
            super().dispatch(_aten.add.Tensor, types, (total, added))
            return kwargs["out"]
        return super().dispatch(func, types, args, kwargs)


@contextmanager
def stand_in_gpu() -> Iterator[StandInGpu]:
    """Everything inside that is asked of `cuda` is computed by the stand-in; tensors read back are zeros."""
    with ExitStack() as stack:
        for owner, name, replacement in _REPLACED:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield stack.enter_context(StandInGpu())


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """As torch's own, which refuses tensors that are remembered weakly, as the mode remembers all of its own."""
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _numpy(tensor: torch.Tensor, **options: Any) -> Any:
    if not isinstance(tensor, FakeTensor):
        return _own_numpy(tensor, **options)
    if tensor.is_cuda:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _data_ptr(tensor: torch.Tensor) -> int:
    """Equal where memory is shared, as addresses are."""
    return int(tensor.untyped_storage()._cdata) if isinstance(tensor, FakeTensor) else _own_data_ptr(tensor)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Without a choice of kernels, for which a build for CUDA asks the device."""
    options["attn_mask"] = options.pop("attn_mask", None)
    return torch._scaled_dot_product_attention_math(query, key, value, **options)[0]  # type: ignore[attr-defined]


class _Queue:
    """A stream, or an event in one: nothing runs, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waited = 0

    def wait_stream(self, other: _Queue) -> None:
        assert isinstance(other, _Queue)

    def wait_event(self, event: _Queue) -> None:
        assert isinstance(event, _Queue)

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        self.waited += 1


_own_numpy, _own_data_ptr = torch.Tensor.numpy, torch.Tensor.data_ptr
_REPLACED: list[tuple[Any, str, Any]] = [
    (torch.Tensor, "numpy", _numpy),
    (torch.Tensor, "data_ptr", _data_ptr),
    (torch.nn.functional, "scaled_dot_product_attention", _attention),
    (torch.utils, "swap_tensors", _swap),
    (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
    (torch.cuda, "is_bf16_supported", lambda: True),
    (torch.cuda, "Stream", _Queue),
    (torch.cuda, "Event", _Queue),
    (torch.cuda, "current_stream", _Queue),
    (torch.cuda, "stream", nullcontext),
    (torch.cuda, "mem_get_info", lambda *_: (80 << 30, 80 << 30)),
]


def _leaves_device(tensor: Any, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return isinstance(tensor, FakeTensor) and tensor.is_cuda and device is not None and device.type == "cpu"


def _plain_value(dtype: torch.dtype) -> bool | int | float:
    return True if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0

"""Passes over activations as native code, compiled on the user's machine, once: CPU, one thread, float32 and bfloat16.

`kernels.cpp` holds the loops, `build` compiles and loads them, `kernels` calls them with tensors. Products stay with
torch and oneDNN. Nothing may depend on it: without a compiler `find_kernels` says None, and everything is computed by
torch's own operations.
"""

from tailrace.generation.engines.native.kernels import Heads, Kernels, find_kernels

__all__ = ["Heads", "Kernels", "find_kernels"]

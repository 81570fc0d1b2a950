"""What the files of a model's folder say, read without torch or transformers: its context, and whether all is there."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from tailrace.errors import CorruptData, ModelError
from tailrace.guards import guarded
from tailrace.records import Json

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of them in a model's folder, or beside an index of such a name the files that it names."""
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
)
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
"""Names that architectures give to the number of positions they were made for."""
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
"""Chat templates beside `chat_template.jinja`, by their names: `tool_use`, ..."""
UNPACKED = ("fp8", "mxfp4")
"""Ways of quantizing that transformers can undo as it loads weights."""
_MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file: its own readers take no more."""


def read_json(path: Path) -> Mapping[str, Json]:
    """The file's object; an empty one where there is no such file. Raises `ModelError` for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{path} nests JSON too deep to be read") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}; a JSON object was expected")
    return value


def public_name(folder: Path) -> str | None:
    """The name on a hub (`Qwen/Qwen3-0.6B`) of the model that a folder's files say they come from, where they do.

    Older versions of transformers write it, and checkpoints carry it. Raises `ModelError` for files that are not JSON.
    """
    given = (
        read_json(folder / "config.json").get("_name_or_path"),
        read_json(folder / "tokenizer_config.json").get("name_or_path"),
    )
    return next((name for name in given if isinstance(name, str) and is_public(name)), None)


def is_public(name: str) -> bool:
    """Whether a model's name may be one on a hub: it is none of a file or folder here.

    >>> is_public("Qwen/Qwen3-0.6B"), is_public("/models/Qwen3-0.6B"), is_public("bundled:quickstart")
    (True, False, False)
    """
    return name.count("/") == 1 and not Path(name).is_absolute() and not Path(name).exists()


def own_context(config: Mapping[str, Json]) -> int | None:
    """Tokens that a model was made for, prompt and completion together, where its config.json says so.

    No more than its rotary positions are the same for: see `rotary_limit`.

    >>> own_context({"model_type": "gpt2", "n_positions": 1024})
    1024
    """
    text = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        for name in _CONTEXTS:
            if (value := _as_context(source.get(name))) is not None:
                return min(value, rotary_limit(source) or value)
    return None


def rotary_limit(config: Mapping[str, Json]) -> int | None:
    """Length of a sample beyond which a model rotates every position of it in another way; None: it has no such length.

    LongRoPE and dynamic NTK scaling do so. transformers goes by the longest sample of a call, vLLM by the longest that
    there may be, so that no two of them agree on what lies beyond.

    >>> scaling = {"type": "longrope", "short_factor": [1.0], "long_factor": [9.0]}
    >>> rotary_limit(
    ...     {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": scaling}
    ... )
    4096
    """
    limits = []
    for rope in _rotary_embeddings(config):
        whole, name = config.get("max_position_embeddings"), "original_max_position_embeddings"
        if rope.get("long_factor"):
            limits.append(_as_context(config.get(name)) or _as_context(rope.get(name)) or _as_context(whole))
        elif "dynamic" in str(rope.get("rope_type", rope.get("type"))):
            limits.append(_as_context(whole))
    return min((limit for limit in limits if limit is not None), default=None)


def sliding_window(config: Mapping[str, Json]) -> int | None:
    """Tokens that some layer of a model sees at most, itself included, where that is less than its context.

    >>> sliding_window({"sliding_window": 4096, "max_position_embeddings": 32768})
    4096
    >>> sliding_window({"sliding_window": 4096, "layer_types": ["full_attention"]}) is None
    True
    """
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or window < 1 or (kinds and "sliding_attention" not in kinds):
        return None
    context = own_context(config)
    return window if context is None or window < context else None


def quantization(config: Mapping[str, Json]) -> str | None:
    """How a model's weights were quantized, where its config.json says that they were.

    >>> quantization({"quantization_config": {"quant_method": "awq", "bits": 4}})
    'awq'
    """
    text = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        if isinstance(found := source.get("quantization_config"), dict):
            return str(found.get("quant_method", "in an unknown way"))
    return None


def require_unpackable(name: str, config: Mapping[str, Json]) -> None:
    """Raise `ModelError` for a model whose quantized weights cannot be had as plain ones, which are trained."""
    if (method := quantization(config)) not in (None, *UNPACKED):
        raise ModelError(f"model {name!r} is quantized ({method}); name its bfloat16 weights")


def _rotary_embeddings(config: Mapping[str, Json]) -> Iterator[Mapping[str, Json]]:
    """What a config.json says of them; where kinds of layers have their own, of each."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(given, dict):
        yield given
        yield from (own for own in given.values() if isinstance(own, dict))


def _as_context(value: Json) -> int | None:
    return value if isinstance(value, int) and value > 1 else None


def holds_tokenizer(folder: Path) -> bool:
    """Whether there is a tokenizer of any kind."""
    return any(map(any, map(folder.glob, _TOKENIZERS)))


def require_tokenizer(name: str, folder: Path) -> None:
    """Raise `ModelError` for a local folder that holds no tokenizer of any kind."""
    if not holds_tokenizer(folder):
        raise ModelError(
            f"model {name!r}: the folder {folder} holds no tokenizer (tokenizer.json); save it there: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads a local folder's weights from, there or not; others beside them do not count.

    Where it finds none, all of safetensors, which vLLM loads whatever they are called.
    """
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            files = read_json(index).get("weight_map")
            named = files.values() if isinstance(files, dict) else ()
            return [folder / file for file in sorted({file for file in named if isinstance(file, str)})]
    return sorted(folder.glob("*.safetensors"))


def require_whole_weights(name: str, folder: Path) -> None:
    """Raise `ModelError` for a local folder whose weights are not there, or not all there."""
    files = weight_files(folder)
    if not files:
        raise ModelError(f"model {name!r}: the folder {folder} holds no weights ({' or '.join(_WEIGHTS)})")
    if missing := [file for file in files if not file.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"model {name!r} lacks files of its weights: {missing[0]}{more}; fetch it again")
    for path in files:
        if path.suffix == ".safetensors" and not _is_whole(path):
            raise ModelError(f"model {name!r}: {path} is cut short, or only points to the weights; fetch it again")


def _is_whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says: 8 bytes of length, the header, the tensors."""
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        size = path.stat().st_size
        if not 0 < header_bytes <= min(size - 8, _MOST_HEADER_BYTES):
            return False
        text = file.read(header_bytes)
    try:
        with guarded(f"the header of {path}"):
            header = json.loads(text)
            ends = [tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"]
            return bool(size == 8 + header_bytes + max(ends, default=0))
    except CorruptData:
        return False

"""Which model a generator was started with, so that a run that connects to it can tell whether it is its own.

Weights are compared where a run sends none (`tailrace eval`): by their files, sampled. A run that trains sends its
weights before the first rollout, so that only what they mean, the configuration, has to be the same.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import xxhash

from tailrace.models.files import read_json, weight_files
from tailrace.models.loading import load_config, resolve_model
from tailrace.records import Json

_SAMPLED_BYTES, _SAMPLES = 1 << 16, 64
"""Of each file: so many pieces of this size, over its whole length. Smaller files are read whole."""

_NOT_ARCHITECTURE = {
    "architectures",
    "attn_implementation",
    "aux_loss_alpha",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "finetuning_task",
    "id2label",
    "init_std",
    "initializer_factor",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "router_z_loss_coef",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""What may differ in the configurations of two models that compute the same from the same weights."""
_DROPOUTS = ("dropout", "dropout_p", "dropout_prob", "dropout_rate", "layerdrop", "pdrop")
"""How the names of rates end that a model has in pretraining alone: nothing is dropped while tokens are sampled."""


class ModelIdentity(msgspec.Struct, frozen=True):
    """A model, as both sides of a connection compare it."""

    name: str
    """As its user wrote it."""
    config: dict[str, Json] = {}
    """Its config.json."""
    weights: str = ""
    """A fingerprint of the files that hold them; empty where they are not known to this machine by their files."""


def identify(name: str, *, with_weights: bool = True) -> ModelIdentity:
    """The model called `name`. Raises `ModelError`."""
    source = resolve_model(name)
    folder = Path(source.location)
    if not source.is_local:
        return ModelIdentity(name, load_config(name))
    if source.gguf_file:
        config, files = load_config(name), [folder / source.gguf_file]
    else:
        config = dict(read_json(folder / "config.json"))
        files = weight_files(folder)
    return ModelIdentity(name, config, _fingerprint(files) if with_weights else "")


def other_architecture(own: Mapping[str, Json], other: Mapping[str, Json]) -> list[str]:
    """In what two configurations contradict each other; what only one of them mentions is a default of the other.

    Where their words differ, what transformers, which is imported then, reads in them counts: it does not write a
    configuration as it was published.

    >>> other_architecture({"rope_theta": 1e4, "dtype": "float32"}, {"rope_theta": 5e5, "hidden_act": "silu"})
    ['rope_theta is 500000.0 there and 10000.0 here']
    """
    return _differences(own, other) and _differences(_as_read(own), _as_read(other))


def _differences(own: Mapping[str, Json], other: Mapping[str, Json]) -> list[str]:
    found = []
    for key in sorted(filter(_is_architecture, own.keys() & other.keys())):
        here, there = own[key], other[key]
        if isinstance(here, dict) and isinstance(there, dict):
            found += [f"{key}.{difference}" for difference in _differences(here, there)]
        elif here != there:
            found.append(f"{key} is {json.dumps(there)} there and {json.dumps(here)} here")
    return found


def _as_read(config: Mapping[str, Json]) -> Mapping[str, Json]:
    """The same entries with the values that transformers gives them; as they are where it cannot read them."""
    from transformers import CONFIG_MAPPING

    try:
        read = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy({**config}))
        return _updated(config, json.loads(read.to_json_string(use_diff=False)))
    except Exception:  # noqa: BLE001 - of any kind, by the configuration's own class
        return config


def _updated(entries: Mapping[str, Json], values: Mapping[str, Json]) -> dict[str, Json]:
    """The entries, nested ones too, with the new values of those that have some."""
    updated = {}
    for key, old in entries.items():
        new = values.get(key, old)
        updated[key] = _updated(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
    return updated


def _is_architecture(key: str) -> bool:
    return key not in _NOT_ARCHITECTURE and not key.startswith("_") and not key.endswith(_DROPOUTS)


def is_other(own: ModelIdentity, other: ModelIdentity) -> bool:
    """Whether the weights are known to differ; by their names where one side does not know them by their files."""
    return own.weights != other.weights if own.weights and other.weights else own.name != other.name


def _fingerprint(files: list[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        for piece in _sampled(path):
            digest.update(piece)
    return digest.hexdigest()


def _sampled(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    step = max(_SAMPLED_BYTES, -(-size // _SAMPLES))
    yield str(size).encode()
    with path.open("rb") as file:
        for offset in range(0, size, step):
            file.seek(offset)
            yield file.read(_SAMPLED_BYTES)

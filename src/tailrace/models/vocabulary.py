"""Whether two models mean the same tokens by the same ids, so that one can score what the other sampled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tailrace.errors import ModelError
from tailrace.models.loading import explained, quiet_transformers, resolve_model


def require_same_vocabulary(own: str, other: str, *, setting: str) -> None:
    """Raise `ModelError` unless the models called `own` and `other` have the same; `setting` names the other one.

    Imports transformers only where a model is no local folder.
    """
    if own == other:
        return
    ours, theirs = vocabulary(own), vocabulary(other)
    if ours == theirs:
        return
    differing = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    token = min(differing, key=lambda one: (ours.get(one, len(ours)), one))
    ids = [f"id {found[token]}" if token in found else "no token" for found in (theirs, ours)]
    raise ModelError(
        f"{setting} is {other!r}, which has another vocabulary than {own!r}: {token!r} is {ids[0]} there and {ids[1]} "
        f"here, one of {len(differing)} differences; choose a model with the same tokenizer"
    )


def vocabulary(name: str) -> Mapping[str, int]:
    """Ids of the tokens of the model called `name`, added ones too. Raises `ModelError` where it has no tokenizer."""
    source = resolve_model(name)
    file = Path(source.location) / "tokenizer.json"
    if source.is_local and source.gguf_file is None and file.is_file():
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(file)).get_vocab()
        except Exception as error:  # the library raises no class of its own
            raise ModelError(f"model {name!r}: {file} cannot be read: {error}") from error
    from transformers import AutoTokenizer

    with explained(source), quiet_transformers():
        found: dict[str, int] = AutoTokenizer.from_pretrained(source.location, **source.arguments).get_vocab()
    return found

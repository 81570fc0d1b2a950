"""Which settings class stands behind an annotation: one section, or one of several kinds of it.

A union of kinds is `Annotated[Annotated[A, Tag("a")] | Annotated[B, Tag("b")], Discriminator(...)]`, alone or as the
entries of a tuple. The first field of every kind says which one is meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

from tailrace.config.sources import Key

_MANY = (tuple, list)
_UNIONS = (Union, UnionType)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The settings class inside an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (*_UNIONS, *_MANY):
        return next((found for part in get_args(annotation) if (found := model_in(part))), None)
    return None


def kinds_in(annotation: Any) -> dict[str, type[BaseModel]]:
    """The settings classes to choose from, by their tags; none where there is no choice."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        tag = next((one.tag for one in parts[1:] if isinstance(one, Tag)), None)
        return kinds_in(parts[0]) if tag is None else {tag: parts[0]}
    if origin not in (*_UNIONS, *_MANY):
        return {}
    return {tag: kind for part in parts for tag, kind in kinds_in(part).items()}


def says_kind(kinds: Mapping[str, type[BaseModel]]) -> str:
    """The setting that says which kind is meant."""
    return next(iter(next(iter(kinds.values())).model_fields))


class Step(NamedTuple):
    """One part of a path through the settings, and where it leads."""

    part: str | int
    field: FieldInfo | None
    """The setting or section that the part names."""
    section: type[BaseModel] | None
    """The settings class there; None at a setting, and at a choice of kinds."""
    kinds: dict[str, type[BaseModel]]
    """To choose from there."""
    is_tag: bool
    """Whether the part is only the tag of a kind, which pydantic puts into the paths that it tells."""


def walk(model: type[BaseModel], path: Key) -> Iterator[Step]:
    """The way along a path. Where it leaves tags out, the first kind that knows the next part is meant."""
    current: type[BaseModel] | None = model
    field: FieldInfo | None = None
    kinds: dict[str, type[BaseModel]] = {}
    for part in path:
        is_tag = part in kinds
        if is_tag:
            current, kinds = kinds[str(part)], {}
        elif isinstance(part, str):
            if kinds:
                current = next((kind for kind in kinds.values() if part in kind.model_fields), None)
            field = current.model_fields.get(part) if current else None
            kinds = kinds_in(field.annotation) if field else {}
            current = model_in(field.annotation) if field and not kinds else None
        yield Step(part, field, current, kinds, is_tag)


def end_of(model: type[BaseModel], path: Key) -> Step:
    """Where a path leads."""
    return [Step("", None, model, {}, False), *walk(model, path)][-1]


def without_tags(model: type[BaseModel], path: Key) -> Key:
    """A path as users write it."""
    return tuple(step.part for step in walk(model, path) if not step.is_tag)


def all_keys(model: type[BaseModel]) -> list[str]:
    """Every setting, dotted and once, those of the outer sections first."""
    return list(dict.fromkeys(_all_keys(model)))


def _all_keys(model: type[BaseModel]) -> Iterator[str]:
    inner = {name: _sections_in(field.annotation) for name, field in model.model_fields.items()}
    yield from (name for name, sections in inner.items() if not sections)
    for name, sections in inner.items():
        for section in sections:
            yield from (f"{'environment' if name == 'environments' else name}.{key}" for key in _all_keys(section))


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    section, kinds = model_in(annotation), kinds_in(annotation)
    return [section] if section else [*kinds.values()]

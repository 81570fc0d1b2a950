"""The settings reference, generated from the code, so it is always up to date."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tailrace.config.sections import kinds_in, model_in, says_kind
from tailrace.config.settings import RunSettings
from tailrace.simulation import SimulationPlan

_INTRODUCTION = """\
# Settings

Every setting of a run, generated from the code by `tailrace settings`. In a TOML file a section is a table; on the
command line the same names are dotted: `--trainer.learning_rate 1e-4`. `[[environments]]` is an array of tables;
`--environment.*` edits the only one, and `--environment NAME` names it. `--max_steps unset` takes away what a recipe
sets.

On the command line a list is given whole, as in TOML: `--observability.tags '["a", "b"]'`. A number edits one entry of
a list that the file has, from 0: `--environments.1.weight 2`. Entries can be neither added nor unset by their number.
"""

_SIMULATION_INTRODUCTION = """\
# Settings of a simulation

Every setting of a plan of `tailrace simulate`, generated from the code by `tailrace settings --of simulation`. What a
plan is, and an example, is in [scheduling](scheduling.md). In a plan's TOML file a section is a table; on the command
line the same names are dotted: `--engines.slots 32`. `[[policies]]` is an array of tables, each any part of the plan,
laid over the rest; `--sweep KEY=VALUE,VALUE` runs each policy once with each value that does not contradict its
`schedule`. The section `scheduling` is that of a run (see [settings](settings.md)), with `batch_size = 512` and
`row_tokens = 32768` where they are left out.
"""


def settings_reference() -> str:
    """Markdown with one table per section, of a run."""
    return "\n".join([_INTRODUCTION, *_tables(RunSettings)])


def simulation_reference() -> str:
    """Markdown with one table per section, of a plan of `tailrace simulate`."""
    return "\n".join([_SIMULATION_INTRODUCTION, *_tables(SimulationPlan, left_out=("scheduling",))])


def _tables(settings: type[BaseModel], left_out: Collection[str] = ()) -> list[str]:
    fields = settings.model_fields
    top = {name: field for name, field in fields.items() if not model_in(field.annotation)}
    sections = [_section("Top level", "", top, None)]
    for name, field in fields.items():
        if (model := model_in(field.annotation)) and name not in left_out:
            sections += _sections(f"`{name}`", name, _text(model), model.model_fields, _made(field))
    return sections


def _sections(title: str, name: str, text: str, fields: Mapping[str, FieldInfo], made: BaseModel | None) -> list[str]:
    """The tables of a section and of those in it. `made` is its default, where it may be left out."""
    plain = {key: field for key, field in fields.items() if not model_in(field.annotation)}
    sections = [_section(title, text, plain, made)]
    for key, field in fields.items():
        inner_name = f"{name}.{key}"
        if inner := model_in(field.annotation):
            inner_made = _made(field) if made is None else getattr(made, key)
            inner_made = inner_made if isinstance(inner_made, inner) else None
            sections += _sections(f"`{inner_name}`", inner_name, _text(inner), inner.model_fields, inner_made)
        if named := _named(field.annotation):
            named_name = f"{inner_name}.NAME"
            sections += _sections(f"`{named_name}`", named_name, _text(named), named.model_fields, None)
        if kinds := kinds_in(field.annotation):
            sections += _sections_of_kinds(inner_name, kinds)
    return sections


def _sections_of_kinds(name: str, kinds: Mapping[str, type[BaseModel]]) -> list[str]:
    """A table of what all kinds have, where they have anything, and one for each with what it has of its own."""
    says, sections = says_kind(kinds), []
    first, *others = (kind.model_fields for kind in kinds.values())
    common = {
        key: field
        for key, field in first.items()
        if key != says and all(key in fields and fields[key].description == field.description for fields in others)
    }
    if common:
        sections += _sections(f"`{name}` with any `{says}`", name, "What all of them have.", common, None)
    for tag, kind in kinds.items():
        own = {key: field for key, field in kind.model_fields.items() if key not in common}
        sections += _sections(f'`{name}` with `{says} = "{tag}"`', name, _text(kind), own, None)
    return sections


def _text(settings: type[BaseModel]) -> str:
    return (settings.__doc__ or "").strip().splitlines()[0]


def _section(title: str, text: str, fields: Mapping[str, FieldInfo], made: BaseModel | None) -> str:
    lines = [f"## {title}", "", *([text, ""] if text else []), "| setting | type | default | what it does |"]
    lines.append("| --- | --- | --- | --- |")
    for name, field in fields.items():
        default = _default(field) if made is None else _value_text(getattr(made, name))
        lines.append(f"| `{name}` | {_type(field)} | {default} | {_escape(field.description or '')} |")
    return "\n".join([*lines, ""])


def _made(field: FieldInfo) -> BaseModel | None:
    """A section's default; None where it is required, or one of several kinds."""
    made = field.get_default(call_default_factory=True)
    return made if isinstance(made, BaseModel) else None


def _named(annotation: Any) -> type[BaseModel] | None:
    """The settings class of sections that users give names to."""
    return model_in(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def _type(field: FieldInfo) -> str:
    annotation = field.annotation
    if _named(annotation):
        return "tables by name"
    if kinds := kinds_in(annotation):
        several = "list" if get_origin(annotation) is tuple else "one"
        return f"{several} of " + ", ".join(f"`{tag}`" for tag in kinds)
    kinds_of = get_args(annotation) if get_origin(annotation) is Union else [annotation]
    text = " | ".join(kind.__name__ if isinstance(kind, type) else str(kind) for kind in kinds_of)
    return f"`{_escape(text.replace('typing.', '').replace('Literal', '').replace('NoneType', 'None'))}`"


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else _value_text(field.get_default(call_default_factory=True))


def _value_text(value: object) -> str:
    if isinstance(value, BaseModel):
        settings = ", ".join(f"{name} = {given!r}" for name, given in value)
        return f"`{{ {_escape(settings)} }}`"
    return "unset" if value is None else f"`{_escape(repr(value))}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")

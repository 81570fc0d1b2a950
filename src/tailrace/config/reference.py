"""The settings reference, generated from the code, so that it is never untrue."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tailrace.config.problems import model_in
from tailrace.config.settings import RunSettings

_INTRODUCTION = """\
# Settings

Every setting of a run, generated from the code by `tailrace settings`. In a TOML file a section is a table; on the
command line the same names are dotted: `--trainer.learning_rate 1e-4`. `[[environments]]` is an array of tables;
`--environment.*` edits the only one. `--max_steps unset` takes away what a recipe sets.
"""


def settings_reference() -> str:
    """Markdown with one table per section."""
    top = {name: field for name, field in RunSettings.model_fields.items() if not model_in(field.annotation)}
    sections = [_section("Top level", "", top)]
    for name, field in RunSettings.model_fields.items():
        if model := model_in(field.annotation):
            sections += _sections(name, model)
    return "\n".join([_INTRODUCTION, *sections])


def _sections(name: str, model: type[BaseModel]) -> list[str]:
    plain = {key: field for key, field in model.model_fields.items() if not model_in(field.annotation)}
    doc = (model.__doc__ or "").strip().splitlines()[0]
    nested = [
        section
        for key, field in model.model_fields.items()
        if (inner := model_in(field.annotation))
        for section in _sections(f"{name}.{key}", inner)
    ]
    return [_section(f"`{name}`", doc, plain), *nested]


def _section(title: str, text: str, fields: dict[str, FieldInfo]) -> str:
    lines = [f"## {title}", "", *([text, ""] if text else []), "| setting | type | default | what it does |"]
    lines.append("| --- | --- | --- | --- |")
    for name, field in fields.items():
        lines.append(f"| `{name}` | {_type(field)} | {_default(field)} | {_escape(field.description or '')} |")
    return "\n".join([*lines, ""])


def _type(field: FieldInfo) -> str:
    annotation = field.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return f"`{_escape(text.replace('typing.', '').replace('Literal', '').replace('NoneType', 'None'))}`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default if field.default is not PydanticUndefined else field.get_default(call_default_factory=True)
    return "unset" if value is None else f"`{_escape(repr(value))}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")

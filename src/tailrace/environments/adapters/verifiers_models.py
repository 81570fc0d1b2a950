"""Which models other than the policy an environment of verifiers 0.3 asks for under the policy's client.

verifiers has no word for a user simulator: it is code that calls `get_model_response` with a `model` of its own. Where
the source says which one that is (a string, an attribute, a variable that is set once), it is told before a rollout is
played; what is passed in or chosen in a turn shows in that turn.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

_POSITION_OF_CLIENT, _POSITION_OF_MODEL = 2, 3
"""Among the arguments of `get_model_response(state, prompt, client, model, ...)`."""


def other_models(environment: Any, policy: str) -> Iterator[tuple[str, str]]:
    """Models that are not the `policy`'s name, each with the method that asks for it; those of its members, too.

    A call that names a client of its own asks for whatever it likes.
    """
    for member in getattr(environment, "envs", ()):
        yield from other_models(member, policy)
    for owner in type(environment).__mro__:
        if owner.__module__.partition(".")[0] in ("builtins", "abc", "typing", "verifiers"):
            continue
        for name, method in vars(owner).items():
            if inspect.isfunction(method):
                for model in _asked_for(method, environment):
                    if isinstance(model, str) and model != policy:
                        yield f"{owner.__name__}.{name}", model


def _asked_for(method: Callable[..., Any], environment: Any) -> Iterator[object]:
    """What each of its calls asks for; None for what is not known."""
    tree = _tree(method)
    for call in _calls(tree):
        if (model := _model_of(call)) is not None:
            yield _Scope(method, tree, environment).known(model)


def _tree(method: Callable[..., Any]) -> ast.AST:
    """Its source, as far as it is there."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return ast.Module([], [])


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Of `get_model_response`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get_model_response"
        ):
            yield node


def _model_of(call: ast.Call) -> ast.expr | None:
    """What it asks for; None where it says nothing of a model, or has a client of its own."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "client" in given or len(call.args) > _POSITION_OF_CLIENT:
        client = given.get("client") or call.args[_POSITION_OF_CLIENT]
        if not (isinstance(client, ast.Constant) and client.value is None):
            return None
    if len(call.args) > _POSITION_OF_MODEL:
        return call.args[_POSITION_OF_MODEL]
    return given.get("model")


class _Scope:
    """What the names of a method mean before it is called."""

    def __init__(self, method: Callable[..., Any], tree: ast.AST, environment: Any) -> None:
        code, around = method.__code__, inspect.getclosurevars(method)
        own, *others = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] or ("self",)
        self._values = {**around.globals, **around.nonlocals, own: environment}
        stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self._unknown = {*code.co_varnames, *others} - {own}
        self._assigned = {
            node.targets[0].id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            if stored.count(node.targets[0].id) == 1 and node.targets[0].id not in others
        }

    def known(self, node: ast.expr) -> object:
        """The value of what is written there; None where it shows in a turn alone."""
        try:
            return self._value(node)
        except Exception:  # noqa: BLE001 - attributes of others are code of others; what it cannot say is not known
            return None

    def _value(self, node: ast.expr) -> Any:
        """Raises whatever, for what is not known."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self._assigned:
                return self._value(self._assigned[name])
            case ast.Name(id=name) if name not in self._unknown:
                return self._values[name]
            case ast.Attribute(value=owner, attr=attribute):
                return getattr(self._value(owner), attribute)
            case ast.Subscript(value=owner, slice=key):
                return self._value(owner)[self._value(key)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._value(left) + self._value(right)
            case ast.BoolOp(op=ast.Or(), values=[*values]):
                return next((found for one in values if (found := self._value(one))), None)
            case ast.JoinedStr(values=parts):
                return "".join(str(self._value(part)) for part in parts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._value(value)
        raise LookupError(ast.dump(node))

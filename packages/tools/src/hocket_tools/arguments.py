"""Checks of arguments that several tools take."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from doctest import DocTestParser
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from hocket.basics.specification import literal
from hocket.errors import WrongType, WrongValue
from hocket.help import names
from hocket.help.arguments import understood
from hocket.help.ours import is_ours
from hocket.plugins import signatures

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: refuse arguments that do not fit its annotations, and say what to write.

    Raises ValueError for a text that is not one of a Literal's, and TypeError for other values.
    """
    signature = inspect.signature(function)
    who = function.__qualname__.removesuffix(".__init__")

    @functools.cache
    def hints() -> Mapping[str, Any]:
        from hocket.run.trainer import Trainer

        return signatures.hints(function, {"Trainer": Trainer, "Tensor": Tensor})

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in hints() and not _fits(value, hints()[name]):
                whose = type(args[0]) if who != function.__qualname__ else function
                raise _refusal(who, name, value, hints()[name], _shown(whose, name))
        return function(*args, **kwargs)

    return understood(call)


def _fits(value: object, hint: object) -> bool:
    """Whether a value fits an annotation, where no plain value stands for an object of a class."""
    return any(_is(value, member) for member in signatures.members(hint))


def _is(value: Any, hint: object) -> bool:
    cls, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    items = _items(value, hint)
    if items is not None:
        keys = value if inner and isinstance(value, Mapping) else ()
        return all(_fits(key, inner[0]) for key in keys) and all(_fits(*each) for _, *each in items)
    if cls in signatures.SEQUENCES and hasattr(value, "__array__"):
        return True
    exact = isinstance(cls, type) and cls not in (float, Any, object)
    return signatures.fits(value, hint) and (not exact or isinstance(value, cls))  # type: ignore[arg-type]


def _items(value: object, hint: object) -> list[tuple[object, object, object]] | None:
    """Return the key, the value and the annotation of each item of a container of an annotated kind, None of others."""
    cls, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if isinstance(value, Mapping) and cls in signatures.MAPPINGS:
        return [(key, item, inner[1] if inner else Any) for key, item in value.items()]
    listed = value if isinstance(value, list | tuple) and cls in signatures.SEQUENCES else None
    kinds = None if listed is None else signatures.item_hints(hint, len(listed))
    return None if listed is None or kinds is None else list(zip(range(len(kinds)), listed, kinds, strict=True))


def _refusal(who: str, name: str, value: object, hint: object, example: str) -> WrongType | WrongValue:
    """Return the error for an argument or, if it is a container of the right kind, for its first item that does not fit."""
    from hocket_cli.annotations import described

    choice = signatures.choice(value, hint)
    meant = [choice] if choice is not None else [each for each in _meant(value) if _fits(each, hint)]
    items = [each for member in signatures.members(hint) for each in _items(value, member) or ()]
    wrong = [] if meant else [each for each in items if not _fits(*each[1:])]
    if wrong:
        key, item, hint = wrong[0]
        return _refusal(who, f"{name}[{key!r}]", item, hint, _first_item(example))
    kind, shown = type(value).__name__, repr(value)
    given = f"«{name}={shown}», which is {kind}" if len(shown) < 80 and "\n" not in shown else f"{kind} as {name}"
    allowed = described(hint).replace("true or false", "True or False").replace(" or null", " or None")
    members = signatures.members(hint)
    if nn.Module in members or (str in members and example[:1] not in "'\""):  # of an example's own model and folder
        example = ""
    write = _part(value, hint) or (repr(meant[0]) if meant else example or _example(hint))
    error = WrongValue if choice is not None and type(value) is type(choice) else WrongType
    text = f"{who} was given {given}; it should be {allowed}. Write «{name}={write}»."
    return error(text if name.isidentifier() else text.replace("«", "").replace("»", ""), about=name)


def _shown(function: Any, name: str) -> str:
    """Return the source of an argument: a default or a usual one, or what the docstring's example gives by position."""
    usual = names.example(function, name).replace("…", "")
    code = "" if usual else "".join(each.source for each in DocTestParser().get_examples(function.__doc__ or ""))
    nodes = list(ast.walk(ast.parse(code)))
    assigned = {ast.unparse(each.targets[0]): each.value for each in nodes if isinstance(each, ast.Assign)}
    for call in nodes:
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == function.__name__:
            keywords = {each.arg or "": each.value for each in call.keywords}
            given = inspect.signature(function).bind_partial(*call.args, **keywords).arguments
            usual = ast.unparse(given.get(name, ast.Name("")))
            return ast.unparse(assigned[usual]) if usual in assigned else "" if usual.isidentifier() else usual
    return usual


def _first_item(source: str) -> str:
    """Return the source of the first item of a list or a dict, or empty."""
    node = ast.parse(source or "()", mode="eval").body
    items = getattr(node, "elts", getattr(node, "values", ()))
    return ast.unparse(items[0]) if items else ""


def _part(value: object, hint: object) -> str:
    """Return the expression of what fits an annotation in a Trainer, a result or a state that was given, or empty."""
    for path in ("state.model", "model", "run_folder"):
        with suppress(AttributeError):
            if is_ours(type(value).__module__) and _fits(attrgetter(path)(value), hint):
                return f"{re.split('(?=[A-Z])', type(value).__name__)[-1].lower()}.{path}"
    return ""


def _meant(value: object) -> Iterator[object]:
    """Yield what somebody may have meant by a value: text that is a number, one item of a list, and both in a mapping."""
    meant = literal(value.strip()) if isinstance(value, str) else value
    yield from (meant, [value], [meant])
    if isinstance(value, Mapping):
        yield from (dict(zip(value, items, strict=True)) for items in zip(*map(_meant, value.values()), strict=False))


def _example(hint: object) -> str:
    """Return the source of a value that fits an annotation."""
    member = signatures.members(hint)[0]
    cls = typing.get_origin(member) or member
    parts = [_example(each) for each in typing.get_args(member) if each is not ...]
    if cls in signatures.MAPPINGS:
        return f"{{{': '.join(parts)}}}"
    if cls in signatures.SEQUENCES:
        return f"[{', '.join(parts)}]"
    package = f"{cls.__module__.partition('.')[0]}." if is_ours(getattr(cls, "__module__", "")) else ""
    name = getattr(cls, "__name__", "")
    return _EXAMPLES.get(name, f"{package}{name}(…)")


_EXAMPLES = {
    "int": "1", "float": "0.5", "bool": "False", "str": "'…'", "Any": "…", "Tensor": "torch.ones(2)",
    "Module": "trainer.state.model", "Judgement": "hocket_tools.judge(trainer, 'test')",
}  # fmt: skip


def check_effect(args: argparse.Namespace, needed: bool, without: str, **defaults: object) -> None:
    """Raise WrongValue for an option that was given and has no effect, because the command lacks what it needs."""
    for name, default in defaults.items():
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value != default and not needed:
            raise WrongValue(f"{option} {value} has no effect without {without}. Add that, or remove {option}.")


def check_least(least: int, usual: int, **given: int) -> None:
    """Raise WrongValue for a number below the least one, which says what to write."""
    for name, value in given.items():
        if value < least:
            raise WrongValue(f"«{name}={value}» is too small. Give {least} or more: «{name}={usual}».")


def check_fraction(usual: float, **given: float) -> None:
    """Raise WrongValue for a number that is not between 0 and 1, which says what to write."""
    for name, value in given.items():
        if not 0 < value < 1:
            raise WrongValue(f"«{name}={value}» is not a fraction between 0 and 1. Write «{name}={usual}».")


def check_weights(model: nn.Module) -> None:
    """Raise WrongValue for parameters with NaN or infinity, and buffers with NaN: masks have infinity."""
    parameters = (name for name, each in model.named_parameters() if _wide(each) and not each.isfinite().all())
    buffers = (name for name, each in model.named_buffers() if _wide(each) and each.isnan().any())
    if wrong := [*parameters, *buffers]:
        raise WrongValue(
            f"{type(model).__name__} has weights with NaN or infinity, in {', '.join(wrong[:3])}. Load those of an earlier "
            "checkpoint."
        )


def _wide(tensor: Tensor) -> bool:
    """Whether a tensor has values, in a dtype that has NaN and infinity."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not tensor.is_meta

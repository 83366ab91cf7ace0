"""Objects of a configuration: classes and functions by import path, called with arguments that fit their signatures.

``module:name`` stands for a function, or an instance of a class that needs no arguments. With arguments it is written
``{module:name: {width: 8}}`` or ``{class_path: module.name, init_args: {width: 8}}``, at any depth.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hocket.basics.time import Interval, Time
from hocket.errors import Mistake
from hocket.help import names
from hocket.help.raised import raised
from hocket.plugins import signatures
from hocket_cli.annotations import callables, described, mapping_hint, sequence_hints
from hocket_cli.call_arguments import BY_NAME, almost, lacking, lacks, parameters_of, takes, unexpected
from hocket_cli.document import ConfigError, Node, flow, parse_value, suggestion
from hocket_cli.error_places import blamed
from hocket_cli.imports import UNREAD, Reference, as_call, reference, resolve
from hocket_cli.keys import keys
from hocket_cli.yaml_messages import argument_of, as_given, in_yaml, value_in_yaml, word

#: The annotation of an argument that has none.
UNKNOWN = Any
#: Whether values are only checked: classes and functions are imported, and their arguments compared, but none is called.
_CHECKING: ContextVar[bool] = ContextVar("checking", default=False)


@contextmanager
def checking() -> Iterator[None]:
    """Check all names, arguments and types inside, without calling anything: nothing is allocated, and no file is read."""
    token = _CHECKING.set(True)
    try:
        yield
    finally:
        _CHECKING.reset(token)


def is_checking() -> bool:
    """Whether values are only checked (`checking`): objects are then None."""
    return _CHECKING.get()


def build(node: Node, hint: Any, at: str) -> Any:
    """Return the value of a node with all objects in it made.

    Args:
        hint: the annotation of the argument that the value is for.
        at: the argument, for messages.

    Raises:
        ConfigError: a value does not fit its argument, or an object cannot be made.
    """
    dotted = hint is not UNKNOWN and not (_may_be_path(hint) and os.path.exists(str(node.value)))
    if not _only_text(hint) and (found := reference(node, dotted=dotted)):
        return make(found, hint, at)
    if isinstance(node.value, dict):
        return _mapping(node, hint, at)
    if isinstance(node.value, list):
        return _list(node, hint, at)
    return _scalar(node, hint, at)


def _may_be_path(hint: Any) -> bool:
    """Whether a text may be the path of a file or folder."""
    return any(isinstance(each, type) and issubclass(each, os.PathLike) for each in signatures.members(hint))


def _only_text(hint: Any) -> bool:
    """Whether every text is meant as a text."""
    texts = (str, Time, Interval, type(None))
    members = signatures.members(hint)
    return signatures.fits("", hint) and all(
        each in texts
        or typing.get_origin(each) is typing.Literal
        or (isinstance(each, type) and issubclass(each, os.PathLike | bool | int | float))
        for each in members
    )


def _mapping(node: Node, hint: Any, at: str) -> Any:
    accepts = mapping_hint(hint)
    cls = None if accepts in (Any, object) else _described_by_arguments(hint)
    several = len(node.value) > 1 and set(node.value) <= inspect.signature(cls).parameters.keys() if cls else False
    if cls is not None and (accepts is None or several):
        return call(cls, cls.__qualname__, node, node.where, at)
    if accepts is None:
        raise _misfit(node, hint, at)
    inner = typing.get_args(accepts)
    made = {key: build(child, inner[1] if inner else Any, f"{at}.{key}") for key, child in node.value.items()}
    if inner and (wrong := next((key for key in made if not signatures.fits(key, inner[0])), None)) is not None:
        raise ConfigError(node.value[wrong].key, f"The key {wrong!r} of {at} should be {described(inner[0])}.")
    return made


def _described_by_arguments(hint: Any) -> type | None:
    """Return the class of an annotation, such as a dataclass, if a mapping of its arguments may stand for an instance."""
    others = os.PathLike | enum.Enum | Time | Interval
    classes = [
        each
        for each in signatures.members(hint)
        if isinstance(each, type) and each.__module__ != "builtins" and not issubclass(each, others)
    ]
    if len(classes) != 1 or inspect.isabstract(classes[0]):
        return None
    return classes[0] if any(each.kind in BY_NAME for each in parameters_of(classes[0]) or ()) else None


def _list(node: Node, hint: Any, at: str) -> Any:
    length = len(node.value)
    for each in sequence_hints(hint):
        if (inner := signatures.item_hints(each, length)) is not None:
            made = [
                build(child, one, f"{at}.{i}") for i, (child, one) in enumerate(zip(node.value, inner, strict=True))
            ]
            is_tuple = (typing.get_origin(each) or each) is tuple
            return tuple(made) if is_tuple else made
    raise _misfit(node, hint, at)


def _scalar(node: Node, hint: Any, at: str) -> Any:
    value = node.value
    if not signatures.fits(value, hint):
        timed = not {Time, Interval}.isdisjoint(signatures.members(hint)) and type(value) in (int, float)
        if not timed and (node.text is None or value is None or not signatures.fits(node.text, hint)):
            raise _misfit(node, hint, at)
        value = node.text or str(value)  # such as run_name: 17
    members = signatures.members(hint)
    if isinstance(value, str):
        if Time in members or Interval in members:
            try:
                Time.parse(value)
            except ValueError as error:
                raise ConfigError(node.where, f"{at}: {error}") from None
        for each in members:
            if isinstance(each, type) and issubclass(each, enum.Enum) and value in each.__members__:
                return each[value]
        if str not in members and any(isinstance(each, type) and issubclass(each, os.PathLike) for each in members):
            return Path(value)
    return value


def _misfit(node: Node, hint: Any, at: str) -> ConfigError:
    value, should, key = node.plain(), described(hint), at.rpartition(".")[2]
    what, choice = as_call(node), signatures.choice(value, hint)
    if write := _meant(node, hint):
        what = _write(write, node, at)
    elif not what and choice is not None:
        what = _write(flow(choice), node, at)
    elif not what and sequence_hints(hint) and signatures.fits([value], hint):
        what = _write(flow([value]), node, at)
    elif not what and ("an object of class" in should or "a function" in should):
        what = (
            f"Write the import path of a class or function: `{key}: module:name`, or `{key}: {{module:name: {{…}}}}` with "
            "arguments."
        )
    if not what and at in keys():
        what = f"{at}: {keys()[at].documentation.partition('. ')[0].rstrip('.')}."
    said = f"{as_given(node, at)} is {_kind(value)}; it should be {should}. {what}"
    return (ConfigError if what else _Misfit)(node.where, said)


class _Misfit(ConfigError):
    """A value that does not fit its argument, where only the class or function of the argument can show another one."""


def _write(value: str, node: Node, at: str) -> str:
    """Return the advice to write a value, as YAML, in the place of a node."""
    override, quotes = node.where.startswith("'"), node.text is None and value == node.value
    written = word(f"{at}={value}") if override else f"`{at.rpartition('.')[2]}: {value}`"
    return f"{'Remove the quotes:' if quotes else 'Write'} {written}."


#: Values of other languages, in lower case.
_WORDS = {"none": "null", "nil": "null", "undefined": "null"}
_WORDS |= dict.fromkeys(("yes", "on", "y"), "true") | dict.fromkeys(("no", "off", "n"), "false")


def _meant(node: Node, hint: Any) -> str:
    """Return the value that was probably meant, as YAML, or empty: a number in quotes, ``None``, ``50%``, ``1e2``."""
    value = node.value
    if isinstance(value, float) and value.is_integer() and signatures.fits(int(value), hint):
        return str(int(value))
    if not isinstance(value, str):
        return ""
    if re.fullmatch(r"\d+(\.\d+)?\s*%", value) and signatures.fits(0.5, hint):
        return f"{float(value.rstrip(' %')) / 100:g}"
    for text in (value, _WORDS.get(value.lower(), ""), re.sub("[,_ ]", "", value), value.lower()):
        read = parse_value(text, node.where).value
        if text and not isinstance(read, str | dict | list) and signatures.fits(read, hint):
            return text
    return ""


def _kind(value: Any) -> str:
    named = {str: "text", bool: "a boolean", int: "an integer", float: "a number", list: "a list", dict: "a mapping"}
    return named.get(type(value), "no value")


# --- calls


def make(found: Reference, hint: Any, at: str) -> Any:
    """Return what a path names, called if it has arguments or needs none and is not a function that may stand as it is."""
    target = resolve(found)
    if target is UNREAD:
        return None
    given = found.arguments
    if not _is_code(target):
        if given is not None and given.value:
            raise ConfigError(given.where, f"{found.path} is an object and takes no arguments. Remove them.")
        return target
    arity = {_arity(each) for each in callables(hint)}
    if given is None and _wants_class(target, hint):
        return target
    if given is None and not isinstance(target, type) and _may_be_function(hint):
        needed = [] if None in arity else [lacking(target, [None] * each, {}) for each in arity if each is not None]
        if needed and all(needed):
            raise lacks(target, found.path, needed[0], found.where, max(each or 0 for each in arity))
        return target
    node = given or Node({}, found.where, found.where)
    return call(target, found.path, node, found.where, at, arity)


def _is_code(target: Any) -> bool:
    """Whether it is a class or function, and not an object that a module holds."""
    return isinstance(target, type | functools.partial) or inspect.isroutine(target)


def _may_be_function(hint: Any) -> bool:
    return bool(callables(hint)) or any(each in (Any, object) for each in signatures.members(hint))


def _wants_class(target: Any, hint: Any) -> bool:
    """Whether an argument takes a class and not an instance: ``type[X]``, or a function that returns instances of it."""
    if not isinstance(target, type):
        return False
    for each in signatures.members(hint):
        inner = typing.get_args(each)
        if (typing.get_origin(each) or each) is type:
            return True
        if callables(each) and inner:
            returned = typing.get_origin(inner[-1]) or inner[-1]
            if isinstance(returned, type) and returned is not type(None) and issubclass(target, returned):
                return True
    return False


def _arity(function: Any) -> int | None:
    inner = typing.get_args(function)
    return len(inner[0]) if inner and isinstance(inner[0], list) else None


def call(
    target: Any,
    name: str,
    node: Node,
    where: str,
    at: str,
    arity: Collection[int | None] = (),
    leading: tuple[Any, ...] = (),
) -> Any:
    """Call a class or function with the arguments of a node: a mapping, or a list of positional ones.

    Args:
        arity: the numbers of positional arguments with which the result may be called; None for any. If that many are
            missing, the target is bound to those given instead.
        leading: positional arguments that precede those of the node.
    """
    positional, named = arguments(target, name, node, at, len(leading))
    if missing := lacking(target, [*leading, *positional], named):
        if None in arity or len(missing) in arity:
            return functools.partial(target, *positional, **named)
        raise lacks(target, name, missing, where, len(leading))
    if _CHECKING.get():
        return None
    try:
        return target(*leading, *positional, **named)
    except ConfigError:
        raise
    except Exception as error:
        message = f"{at}: {in_yaml(error)}" if isinstance(error, Mistake) else raised(f"{at}: {name}", error)
        about = blamed(node.value, error) if isinstance(node.value, dict) else None
        raise ConfigError(about.where if about else where, message + unexpected(target, node, error)) from error


def defaults(target: Any, leading: int) -> dict[str, Any]:
    """Return the defaults of a class or function that a configuration can give: those that are read as the same values."""
    hints, found = signatures.hints(target), {}
    for each in parameters_of(target, leading) or ():
        if each.kind in BY_NAME and each.default is not each.empty and _is_plain(each.default):
            plain = list(each.default) if isinstance(each.default, tuple) else each.default
            try:
                read = build(_as_read(plain), hints.get(each.name, UNKNOWN), each.name)
            except ConfigError:
                continue
            if type(read) is type(each.default) and read == each.default:
                found[each.name] = plain
    return found


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(each) for each in value)
    return value is None or type(value) in (bool, int, float, str)


def _as_read(value: Any) -> Node:
    return parse_value(flow(value), "a default")


def arguments(target: Any, name: str, node: Node, at: str, leading: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and named arguments that a node describes.

    ``leading``: the number of positional arguments that somebody else passes.
    """
    hints = signatures.hints(target)
    if (parameters := parameters_of(target, leading)) is None:
        parameters = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
    if isinstance(node.value, list):
        return _positional(parameters, hints, name, node, at), {}
    if node.value is None:
        node = Node({}, node.where, node.key)
    if not isinstance(node.value, dict):
        raise ConfigError(
            node.where,
            f"The arguments of {name} are {flow(node.plain())}. Write a mapping of names to values: {{name: value}}.",
        )
    known = [each.name for each in parameters if each.kind in BY_NAME]
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    for key, child in node.value.items():
        if key not in known and not anything:
            near = argument_of(target, key, child.plain(), known) or suggestion(key, known, "")
            raise ConfigError(child.key, f"{name} has no argument '{key}'. {near} {takes(target, leading)}.")
        if key not in known and (near := almost(target, key, node.value)):
            raise ConfigError(
                child.key, f"{name} declares no argument '{key}'. Did you mean '{near}'? If not, give both."
            )
    for key, child in node.value.items():
        if not isinstance(key, str):
            raise ConfigError(child.key, f"{key!r} is no name of an argument of {name}. {takes(target, leading)}.")
        if key in known and key not in hints:
            _check_default(next(each.default for each in parameters if each.name == key), child, f"{at}.{key}", name)
    made = {}
    for key, child in node.value.items():
        try:
            made[key] = build(child, hints.get(key, UNKNOWN), f"{at}.{key}")
        except _Misfit as error:
            if (shown := names.example(target, key)) == "…":
                raise
            raise ConfigError(error.where, error.text + _write(value_in_yaml(shown), child, f"{at}.{key}")) from None
    return [], made


def _check_default(default: Any, node: Node, at: str, name: str) -> None:
    """Refuse text for an argument without an annotation whose default is a number: it is probably misspelt.

    Also a number such as ``1e2``, which is a float, where the default is an integer: sizes have to be integers.
    """
    text = isinstance(node.value, str) and reference(node) is None
    whole = type(default) is int and isinstance(node.value, float) and node.value.is_integer()
    if isinstance(default, bool | int | float) and (text or whole):
        meant, kind = _meant(node, type(default)), "text" if text else "a float"
        write = f" {_write(meant, node, at)}" if meant else ""
        raise ConfigError(
            node.where,
            f"{as_given(node, at)} is {kind}, and the default is {value_in_yaml(repr(default))}.{write} "
            f"If {name} accepts {kind}, annotate the argument.",
        )


def _positional(
    parameters: list[inspect.Parameter], hints: Mapping[str, Any], name: str, node: Node, at: str
) -> list[Any]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [each.name for each in parameters if each.kind in kinds]
    rest = [each.name for each in parameters if each.kind is inspect.Parameter.VAR_POSITIONAL]
    if len(node.value) > len(places) and not rest:
        raise ConfigError(node.where, f"{name} takes {len(places)} arguments, and {len(node.value)} are listed.")
    names = [*places, *(rest * len(node.value))][: len(node.value)]
    return [
        build(child, hints.get(each, UNKNOWN), f"{at}.{i}")
        for i, (child, each) in enumerate(zip(node.value, names, strict=True))
    ]

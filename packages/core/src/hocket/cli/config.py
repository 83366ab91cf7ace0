"""Configurations: YAML files with the arguments of a Trainer, and overrides, checked before anything is built."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isroutine, signature
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

import hocket
from hocket import types
from hocket.cli import recorded
from hocket.cli.advice import in_yaml
from hocket.cli.calls import lacking, lacks
from hocket.cli.document import ConfigError, Node, flow, suggestion
from hocket.cli.errors import blamed, explains, mentions
from hocket.cli.imports import as_call, raised, reference, resolve
from hocket.cli.keys import KINDS, LISTS, keys
from hocket.cli.objects import arguments, build, call, checking, defaults, make, shown
from hocket.cli.overrides import as_node, source
from hocket.cli.recorded import Source
from hocket.data.module import is_module
from hocket.help import names, objects
from hocket.optim.groups import OPTIONS, check_groups
from hocket.plugins import Entry, PluginConfigError, PluginError, catalog, signatures
from hocket.plugins.spec import parse_spec
from hocket.settings import Settings
from hocket.trainer import Trainer
from hocket.training import simple_metrics

#: What to write for keys that a command needs.
_EXAMPLES = {
    "model": "model: {module:Class: {width: 8}}", "train_data": "train_data: module:function", "duration": "duration: 10ep",
    "checkpoints": "checkpoints: {folder: runs/a, best: [test/loss, min, 1]}",
}  # fmt: skip
#: Names that the Trainer's annotations refer to, and imports for type checkers only.
_NAMES = {**vars(types), "Checkpoints": hocket.Checkpoints}
#: Keys whose values are objects and not settings.
_OBJECTS = {
    *KINDS, "model", "loss", "inputs", "targets", "train_data", "eval_data", "metrics", "train_metrics", "batch_transform",
}  # fmt: skip
#: Keys whose objects are functions of one argument: the parameters, or the optimizer.
_FUNCTIONS = {"optimizers": Callable[[Any], Any], "schedules": Callable[[Any], Any]}
#: Arguments that somebody else passes to a plug-in: the parameters, the split.
_LEADING = {"optimizers": 1, "datasets": 1}


@contextmanager
def trainer_from(
    args: argparse.Namespace,
    needs: Sequence[str] = (),
    of: Callable[[Node], Configuration] | None = None,
    **instead: Any,
) -> Iterator[Trainer]:
    """Enter the Trainer that a file and its overrides describe, with other values for the keys in ``instead``.

    ``of`` makes the `Configuration` from the document, if it is a subclass.

    Modules in the working folder, and beside the file, can be imported from now on. Raises ConfigError for a key or a value
    that is wrong, or one of ``needs`` that is missing, and names the key in errors of the Trainer that are about one.
    """
    read = source(args)
    read.announce()
    importable(read)
    described = (of or Configuration)(read.document)
    with _warnings_in_yaml(), described.trainer(needs, instead) as trainer:
        made = recorded.about(read, trainer.state, described.distributions)
        trainer.state.config = recorded.text(described.resolved(), made)
        if read.repeats is not None and trainer.state.strategy.rank == 0:
            differ = recorded.differences(read.made, made, trainer.settings.seed)
            print(f"hocket: {read.repeats} is repeated as {trainer.state.run_name}{differ}.", file=sys.stderr)
        try:
            yield trainer
        except ArithmeticError as error:  # a fit that diverged, which is not about one key
            if explains(error):
                error.args = (in_yaml(str(error)),)
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            where = described.blamed(error) or (args.config if needs else None)
            if isinstance(error, ConfigError) or not explains(error):
                raise
            if where is None:
                raise PluginError(in_yaml(str(error))) from error
            raise ConfigError(where, in_yaml(str(error), where.startswith("'"))) from error


def importable(read: Source) -> None:
    """Let modules in the working folder and beside the file be imported, under ``-P`` too, with which ranks are started."""
    for folder in read.folders():
        if folder not in sys.path:
            sys.path.insert(0, folder)


@contextmanager
def _warnings_in_yaml() -> Iterator[None]:
    """Show warnings in one line each, without the line of code, and with advice as a file spells it."""

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, UserWarning) and not issubclass(category, DeprecationWarning):
            print(f"hocket: {in_yaml(' '.join(str(message).split()))}", file=sys.stderr, flush=True)
        else:
            shown_before(message, category, *rest)

    with warnings.catch_warnings():
        shown_before, warnings.showwarning = warnings.showwarning, show  # type: ignore[assignment]
        yield


def _check_batches(node: Node, at: str) -> None:
    """Refuse functions, numbers and texts in a list that stands for batches. Raises ConfigError."""
    if isinstance(node.value, dict) and at == "eval_data" and reference(node) is None:
        for label, child in node.value.items():
            _check_batches(child, f"{at}.{label}")
    for each in node.value if isinstance(node.value, list) else ():
        found = reference(each)
        if not isinstance(each.value, dict | list) and (found is None or isroutine(resolve(found))):
            given = flow(each.plain())
            named = given if found and len(node.value) == 1 else "module:name"
            raise ConfigError(
                each.where,
                f"{at}: A list has the batches themselves, and {given} is {'a function' if found else 'not a batch'}. Write "
                f"`{at}: {named}`, for batches that a function returns"
                + (f"; for several sets, a mapping such as `{at}: {{test: {named}}}`." if at == "eval_data" else "."),
            )


class _Instance:
    """The annotation of plug-ins given by import path: functions are called."""


@runtime_checkable
class Metric(Protocol):
    """The annotation of metrics."""

    def update(self, *args: Any) -> Any: ...


def _metrics_by_name(key: str, node: Node) -> str:
    """Return what to write for a list with a mapping of names to metrics in it."""
    found: dict[str, Any] = {}
    for each in node.value:
        path = reference(each, dotted=True)
        plain = path.path if path is not None and path.arguments is None else each.plain()
        name = re.split("[:.]", str(plain if path is None else path.path))[-1]
        found |= plain if isinstance(plain, dict) and path is None else {name: plain}
    return f"Write `{key}: {flow(found)}`."


class Configuration:
    """A configuration whose values are being built."""

    def __init__(self, document: Node) -> None:
        self._document = document
        self._given: dict[str, Node] = {
            key: document.value[key]
            for key, each in keys().items()
            if key in document.value and (document.value[key].value is not None or each.default not in (None, []))
        }
        self._hints = signatures.hints(Trainer, _NAMES)
        for key in ("resume", "checkpoints"):
            self._hints[key] |= bool  # true is not a folder of that name
        self._hints["accumulate"] = str | None  # a number of batches, and no other unit
        for key in ("metrics", "train_metrics"):
            self._hints[key] = Mapping[str, Metric | Literal[tuple(simple_metrics.METRICS)]] | self._hints[key]  # type: ignore[misc, valid-type]
        #: The plug-ins by kind and name, and their arguments.
        self._plugins: list[tuple[str, str, Node]] = []
        #: The names of their classes, and their arguments.
        self._classes: list[tuple[str, Node]] = []
        #: The versions of the distributions that provide them.
        self.distributions: dict[str, str] = {"hocket": hocket.__version__}
        #: Plug-ins with all their arguments, by the identity of the node that names them.
        self._complete: dict[int, Any] = {}

    def check(self, needs: Sequence[str] | None = ()) -> dict[str, Any]:
        """Check all keys, names, arguments and types, and return the settings. No object is made. Raises ConfigError.

        ``needs``: keys that have to be given besides ``model``; None if that has not, either.
        """
        given, where = self._given, self._document.where
        if "data" in given and (other := next((key for key in ("train_data", "eval_data") if key in given), None)):
            raise ConfigError(given[other].key, f"{other} and data are both given. data stands for both; remove one.")
        settings = {key: self._plain(key) for key in given if key not in _OBJECTS}
        for key in settings:
            self._check(key, settings[key])
        for key in () if needs is None else ("model", *needs):
            there = {key, "data"} if key == "train_data" else {key, "fast_dev_run"} if key == "duration" else {key}
            if not there & given.keys():
                raise ConfigError(where, f"There is no {key}. Add a line such as `{_EXAMPLES[key]}`.")
        with checking():
            self._objects()
        self._check_names()
        self._plugins.clear()
        self._classes.clear()
        return settings

    def _check_names(self) -> None:
        """Check losses and metrics that are given by a name of hocket's. Raises ConfigError."""
        for key, find, convert in (
            ("loss", objects.named_loss, objects.loss),
            ("metrics", simple_metrics.find, objects.metrics),
            ("train_metrics", simple_metrics.find, objects.metrics),
        ):
            node = self._given.get(key, Node(None, "", ""))
            for each in node.value if isinstance(node.value, list) else [node]:
                name = each.value
                if (
                    key != "loss"
                    and isinstance(name, dict)
                    and each is not node
                    and reference(each, dotted=True) is None
                ):
                    raise ConfigError(
                        each.where,
                        f"{key}: items of a list have no names, and this one is {flow(each.plain())}. "
                        f"{_metrics_by_name(key, node)}",
                    )
                if isinstance(name, str) and reference(each, dotted=True) is None and find(name) is None:
                    try:
                        convert(name, {})
                    except ValueError as error:
                        raise ConfigError(each.where, in_yaml(str(error), each.where.startswith("'"))) from None

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, and named plug-ins with all arguments, as plain data. Raises ConfigError."""
        if not self._complete:
            self.check(None)
        given = self._document.value
        return {
            key: self._plain_value(given[key]) if key in given else each.default
            for key, each in keys().items()
            if key in given or key != "model"
        }

    def _plain_value(self, node: Node) -> Any:
        if id(node) in self._complete:
            return self._complete[id(node)]
        if isinstance(node.value, dict):
            return {key: self._plain_value(child) for key, child in node.value.items()}
        return [self._plain_value(child) for child in node.value] if isinstance(node.value, list) else node.plain()

    def _objects(self) -> dict[str, Any]:
        """Return the values that are objects, made."""
        given = self._given
        values = {key: self._value(key) for key in given if key in _OBJECTS and key != "data"}
        if "data" in given:
            found = reference(given["data"])
            if found and is_module(resolve(found)):
                values["data"] = make(found, _Instance, "data")
            else:
                values["train_data"] = self._split("train")
                values["eval_data"] = {"test": self._split("test")}
        return values

    def trainer(self, needs: Sequence[str], instead: Mapping[str, Any]) -> Trainer:
        """Build the values, and the Trainer from them, after all have been checked. Raises ConfigError."""
        given, where = self._given, self._document.where
        settings = self.check(needs)
        if isinstance(seed := settings.get("seed"), int):
            torch.manual_seed(seed)  # for the initial weights of the model
        values = settings | self._objects()
        if not isinstance(values["model"], nn.Module):
            raise ConfigError(
                given["model"].where,
                f"model is {type(values['model']).__name__}; it should be an object of class torch.nn.Module. Write a class, "
                "or a function that returns one: `model: module:Class`, or `model: {module:Class: {…}}` with arguments.",
            )
        try:
            return self._assemble({**values, **instead})
        except (PluginError, TypeError, ValueError, LookupError, OSError, RuntimeError) as error:
            where = self.blamed(error) or where
            key = next((f"{key}: " for key, node in self._given.items() if where in (node.where, node.key)), "")
            override = where.startswith("'")
            message = in_yaml(str(error), override) if explains(error) else raised(f"{key}Making the Trainer", error)
            raise ConfigError(where, message) from error

    def _assemble(self, values: Mapping[str, Any]) -> Trainer:
        return Trainer(**values)

    # --- values

    def _plain(self, key: str) -> Any:
        node = self._given[key]
        if key == "compile" and isinstance(node.value, dict):
            return arguments(torch.compile, "torch.compile", node, key, 1)[1]
        if key in ("train_data", "eval_data"):
            _check_batches(node, key)
        return build(node, self._hints.get(key, Any), key)

    def _value(self, key: str) -> Any:
        node, kind = self._given[key], KINDS.get(key)
        if kind is None:
            return self._plain(key)
        _check_commas(node, key)
        if key in LISTS:
            if not isinstance(node.value, list):
                items = _items(node)
                for each in items:
                    self._find(*self._named(each, kind, key), kind, key)  # the name may be wrong, too
                write = flow([each.plain() for each in items])
                raise ConfigError(node.where, f"{key}={node.plain()!r} is not a list. Write `{key}: {write}`.")
            return [self._plugin(item, kind, f"{key}.{i}") for i, item in enumerate(node.value)]
        self._check_flat(node, kind, key)
        if kind in _FUNCTIONS:
            if isinstance(node.value, list):
                return [self._plugin(item, kind, f"{key}.{i}") for i, item in enumerate(node.value)]
            if self._by_name(node, kind):
                return {name: self._plugin(item, kind, f"{key}.{name}") for name, item in node.value.items()}
        return self._plugin(node, kind, key)

    def _by_name(self, node: Node, kind: str) -> bool:
        """Whether a mapping is several optimizers or schedules by name, and not the arguments of one."""
        if not isinstance(node.value, dict) or reference(node) is not None:
            return False
        if len(node.value) != 1:
            if node.value and not any(self._names_one(each, kind) for each in node.value.values()):
                raise ConfigError(
                    node.where,
                    f"{', '.join(map(str, node.value))} are {len(node.value)} {kind}, and the file does not say which "
                    "parameters each trains. Write one; or name each, an optimizer by the submodule that it trains: "
                    "`{encoder: {adamw: {lr: 0.1}}, head: {sgd: {lr: 0.1}}}`.",
                )
            return True
        ((name, inner),) = node.value.items()
        if isinstance(inner.value, str):
            return True
        return name not in _names(kind) and self._names_one(inner, kind)

    def _names_one(self, node: Node, kind: str) -> bool:
        """Whether a value is a plug-in, and not the arguments of one."""
        inside = node.value if isinstance(node.value, dict) and len(node.value) == 1 else {}
        return (
            isinstance(node.value, str) or reference(node) is not None or any(each in _names(kind) for each in inside)
        )

    def _check_flat(self, node: Node, kind: str, at: str) -> None:
        """Refuse the name of a plug-in beside its arguments. Raises ConfigError that says where they stand."""
        theirs = next((each for each in _flat(node) if names.alias(kind, each, _names(kind))), "")
        if write := as_call(node, {*_names(kind), theirs}):
            name = names.alias(kind, theirs, _names(kind)) if theirs else ""
            write = write.replace(theirs, name or theirs, 1)
            raise ConfigError(
                node.where, f"{at}={shown(node.plain())} is a mapping of the name and the arguments. {write}"
            )

    def _plugin(self, node: Node, kind: str, at: str) -> Any:
        """Return the specification of a plug-in, or an object given by import path."""
        self._check_flat(node, kind, at)
        if found := reference(node):
            return make(found, _FUNCTIONS.get(kind, _Instance), at)
        name, inside = self._named(node, kind, at)
        if name == "auto" and kind in ("strategies", "devices"):
            return name
        entry, cls = self._find(name, inside, kind, at)
        self._plugins.append((catalog.singular(kind), entry.name, inside))
        self._classes.append((getattr(cls, "__name__", name), inside))
        leading = _LEADING.get(kind, 0)
        if isinstance(inside.value, list):
            raise ConfigError(inside.where, f"The arguments of {name} are a list. Write a mapping of names to values.")
        options: dict[str, Any] = {}
        if kind == "optimizers" and isinstance(inside.value, dict):  # what groups match is checked with the model
            _check_groups(inside.value.get("groups"), cls, name, at)
            options = {key: child.plain() for key, child in inside.value.items() if key in OPTIONS}
            given = {key: child for key, child in inside.value.items() if key not in OPTIONS}
            inside = Node(given, inside.where, inside.key)
        named = options | arguments(cls, entry.name, inside, f"{at}.{name}", leading)[1]
        given = {key: child.plain() for key, child in inside.value.items()} if inside.value else {}
        self._note(node, name, entry, {**defaults(cls, leading), **given, **options})
        if missing := lacking(cls, [None] * leading, named):
            raise lacks(cls, name, missing, inside.key, leading)
        return {name: named} if named else name

    def _note(self, node: Node, name: str, entry: Entry, complete: dict[str, Any]) -> None:
        """Remember a plug-in with all arguments, and its distribution, for `resolved`."""
        self._complete[id(node)] = {name: complete} if complete else name
        if entry.dist and entry.version:
            self.distributions[entry.dist] = entry.version

    def _find(self, name: str, inside: Node, kind: str, at: str) -> tuple[Entry, Any]:
        try:
            entry = catalog.find(kind, name)
            return entry, entry.load()
        except PluginError as error:
            raise ConfigError(inside.key, f"{at}: {in_yaml(str(error))}") from error

    def _named(self, node: Node, kind: str, at: str) -> tuple[str, Node]:
        """Return the name of a plug-in and the node of its arguments, whose key is the place of the name."""
        value = node.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = node.text or str(value)  # precision: 16
        if isinstance(value, str):
            try:
                name, config = parse_spec(value)
            except PluginConfigError as error:
                raise ConfigError(node.where, f"{at}: {error}") from None
            return name, Node({key: as_node(each, node) for key, each in config.items()}, node.where, node.where)
        if isinstance(value, dict) and len(value) == 1:
            ((name, inside),) = value.items()
            return str(name), inside
        example = (catalog.names(kind) or ["name"])[0]
        raise ConfigError(
            node.where,
            f"{at}={shown(node.plain())} does not name one {catalog.singular(kind)}. Write `{example}`, "
            f"`{{{example}: {{argument: value}}}}` or `module:Class`.",
        )

    def _split(self, split: str) -> Any:
        """Return a split of the plug-in or function that ``data`` names."""
        node = self._given["data"]
        if found := reference(node):
            target, name, inside = resolve(found), found.path, found.arguments or Node({}, found.where, found.where)
        else:
            name, inside = self._named(node, "datasets", "data")
            try:
                entry = catalog.find("datasets", name)
                target = entry.load()
            except PluginError as error:
                raise ConfigError(inside.key, f"data: {error}") from error
            if not isinstance(inside.value, list):
                self._note(node, name, entry, {**defaults(target, 1), **(inside.plain() or {})})
        return call(target, name, inside, node.where, "data", leading=(split,))

    # --- errors

    def _check(self, key: str, value: Any) -> None:
        """Check one setting as the Trainer does, with all others at their defaults. Raises ConfigError."""
        defaults = {
            name: each.default
            for name, each in signature(Trainer.__init__).parameters.items()
            if name not in ("self", "model")
        }
        try:
            Settings.of({**defaults, key: value})
        except (TypeError, ValueError) as error:
            node = self._given[key]
            named = in_yaml(str(error) if f"{key}=" in str(error) else f"{key}: {error}", node.where.startswith("'"))
            raise ConfigError(blamed(node, str(error), node.where), named) from error

    def blamed(self, error: BaseException) -> str | None:
        """Return the place of the value that an error of the Trainer is about, or None."""
        message = str(error)
        for kind, name, inside in self._plugins:
            if f"{kind} '{name}'" in "\n".join([message, *getattr(error, "__notes__", ())]):
                return blamed(inside, message, inside.key)
        if first := next((node for key, node in self._given.items() if re.match(rf"{key}\b", message)), None):
            return first.where
        for pattern in ("{key}={value!r}", "{value!r}", "{key}="):
            found = [
                node
                for key, node in self._given.items()
                if mentions(message, pattern.format(key=key, value=node.plain()))
                and not (pattern == "{value!r}" and isinstance(node.value, int))  # 3 is in many messages
            ]
            if len(found) == 1:
                return found[0].where
        keyed = [(name, node) for name, node in self._document.inside() if isinstance(name, str)]
        named = [node.key for name, node in keyed if mentions(message, repr(name))]
        if not named:  # a value at any depth
            named = [
                node.where
                for _, node in self._document.inside()
                if isinstance(node.value, str) and mentions(message, repr(node.value))
            ]
        if not named:  # a plug-in by the name of its class
            named = [inside.key for cls, inside in self._classes if mentions(message, cls)]
        return named[0] if len(set(named)) == 1 else None


def _check_groups(groups: Node | None, cls: Any, name: str, at: str) -> None:
    """Raise ConfigError for a parameter group without a pattern, or with an option that is almost one of the optimizer."""
    if groups is None:
        return
    for node in groups.value if isinstance(groups.value, list) else ():
        for key, child in node.value.items() if isinstance(node.value, dict) else ():
            known = ["match", *signature(cls).parameters]
            if key not in known and (near := suggestion(key, known, "")):
                raise ConfigError(child.key, f"{at}.{name}: A group has no option '{key}'. {near}")
    try:
        check_groups(groups.plain())
    except PluginError as error:
        raise ConfigError(groups.where, f"{at}.{name}: {in_yaml(str(error))}") from None


def _check_commas(node: Node, at: str) -> None:
    """Raise ConfigError for ``[name(a=1, b=2)]`` without quotes, which YAML splits at the comma inside the brackets."""
    if isinstance(node.value, dict):
        pieces = [key if child.value is None else child.value for key, child in node.value.items()]
    else:
        pieces = [child.value for child in node.value] if isinstance(node.value, list) else []
    joined, opened = "", 0
    for piece in pieces:
        if not isinstance(piece, str):
            joined, opened = "", 0
            continue
        joined, opened = f"{joined}, {piece}" if opened else piece, opened + piece.count("(") - piece.count(")")
        if not opened and joined != piece:
            quote = '"' if "'" in joined else "'"
            raise ConfigError(
                node.where,
                f"{at}: YAML ends a text in [ ] and {{ }} at a comma, also inside of `{joined}`. Put it in quotes: "
                f"{quote}{joined}{quote}; or write `{_as_mapping(joined)}`.",
            )


def _as_mapping(text: str) -> str:
    try:
        name, config = parse_spec(text)
    except PluginConfigError:
        return "{name: {key: value}}"
    return flow({name: config})


def _names(kind: str) -> set[str]:
    """Return the names of plug-ins of a kind, with and without their distributions."""
    return {*catalog.names(kind), *(f"{each.dist}/{each.name}" for each in catalog.entries(kind))}


def _items(node: Node) -> list[Node]:
    """Return the plug-ins that a value is that should be a list of them: names with commas, or a mapping of several."""
    if isinstance(node.value, dict) and not reference(node):
        return [Node({name: each} if each.value else name, each.where, each.key) for name, each in node.value.items()]
    if isinstance(node.value, str) and re.fullmatch(r"[\w-]+(,\s*[\w-]+)+", node.value):
        return [Node(each.strip(), node.where, node.key) for each in node.value.split(",")]
    return [node]


def _flat(node: Node) -> Iterator[str]:
    """Yield the texts in a mapping."""
    if isinstance(node.value, dict):
        yield from (each.value for each in node.value.values() if isinstance(each.value, str))

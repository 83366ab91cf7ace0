"""Configurations: YAML files with the arguments of a Trainer, and overrides, checked before anything is built."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

import hocket
from hocket.basics import types
from hocket.basics.losses import named_loss
from hocket.basics.masking import masked
from hocket.basics.run_folder import is_url
from hocket.basics.safe_files import printable
from hocket.data.checks import whose_module
from hocket.errors import HocketDeprecationWarning, Mistake
from hocket.help.raised import raised
from hocket.loop.settings import Settings
from hocket.optim.groups import OPTIONS
from hocket.plugins import Entry, PluginError, building, registry, signatures
from hocket.run.trainer import Trainer
from hocket.state import conversions, simple_metrics
from hocket.state.ranks import ALONE
from hocket_checkpoints import CheckpointError, resuming
from hocket_cli import forms, imports, recorded_config
from hocket_cli.call_arguments import lacking, lacks, takes
from hocket_cli.document import ConfigError, Node
from hocket_cli.error_places import blamed
from hocket_cli.imports import reference, resolve
from hocket_cli.keys import KIND_OF_KEY, LISTS, keys
from hocket_cli.module_origins import importable
from hocket_cli.objects import arguments, build, call, checking, defaults, make
from hocket_cli.overrides import refuse_masked, source
from hocket_cli.yaml_messages import in_yaml

#: What to write for keys that a command needs.
_EXAMPLES = {
    "model": "model: {module:Class: {width: 8}}", "train_data": "train_data: module:function", "duration": "duration: 10ep",
    "checkpoints": "checkpoints: {folder: runs/a, best: [test/loss, min, 1]}",
}  # fmt: skip
#: Names that the Trainer's annotations refer to, and imports for type checkers only.
_NAMES = {**vars(types), "Checkpoints": hocket.Checkpoints}
#: Keys whose values are objects and not settings.
_OBJECTS = {
    *KIND_OF_KEY, "model", "loss", "inputs", "targets", "train_data", "eval_data", "metrics", "train_metrics",
    "batch_transform",
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
    read: recorded_config.Source | None = None,
    **instead: Any,
) -> Iterator[Trainer]:
    """Enter the Trainer that a file and its overrides describe, with other values for the keys in ``instead``.

    ``of`` makes the `Configuration` from the document, if it is a subclass; ``read`` is the file, if it was read already.

    Modules in the working folder, and beside the file, can be imported from now on. Raises ConfigError for a key or a value
    that is wrong, or one of ``needs`` that is missing, and names the key in errors of the Trainer that are about one.
    """
    read = source(args) if read is None else read
    read.announce()
    importable(read, args.trust)
    refuse_masked(read.document, instead)
    described = (of or Configuration)(read.document)
    with _warnings_in_yaml(), described.trainer(needs, instead) as trainer:
        made = recorded_config.about(read, trainer.state, described.distributions)
        trainer.state.identity.config = recorded_config.text(described.resolved(), made)
        if read.repeats is not None and trainer.state.strategy.rank == 0:
            differ = recorded_config.differences(read.made, made, trainer.settings.seed)
            print(
                printable(f"hocket: {read.repeats} is repeated as {trainer.state.run_name}{differ}."), file=sys.stderr
            )
        elif (changed := recorded_config.changed_modules(read.made, made)) and trainer.state.strategy.rank == 0:
            there = ", ".join(f"{each} ({sys.modules[each].__file__})" for each in changed)
            print(f"hocket: {read.file} was recorded with other contents of {there}.", file=sys.stderr)
        try:
            yield trainer
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            if isinstance(error, ConfigError) or not isinstance(error, Mistake):
                raise
            # An error about an option of the command is not about the file, and a fit that diverged not about one key.
            said = in_yaml(error, options=vars(args))
            where = described.blamed(error) or (read.file if needs and not said.startswith("--") else None)
            if where is None or isinstance(error, ArithmeticError):
                error.args = (said,)
                raise
            raise ConfigError(where, in_yaml(error, where.startswith("'"))) from error


@contextmanager
def _warnings_in_yaml() -> Iterator[None]:
    """Show warnings in one line each, without the line of code, and with advice as a file spells it."""

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, UserWarning | HocketDeprecationWarning) and not issubclass(
            category, DeprecationWarning
        ):
            print(printable(f"hocket: {' '.join(in_yaml(message).split())}"), file=sys.stderr, flush=True)
        else:
            shown_before(message, category, *rest)

    with warnings.catch_warnings():
        shown_before, warnings.showwarning = warnings.showwarning, show  # type: ignore[assignment]
        yield


class _Instance:
    """The annotation of plug-ins given by import path: functions are called."""


@runtime_checkable
class Metric(Protocol):
    """The annotation of metrics."""

    def update(self, *args: Any) -> Any: ...


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
            self._hints[key] = Mapping[str, Metric | Literal[tuple(simple_metrics.METRICS)]] | self._hints.get(key, Any)  # type: ignore[misc, valid-type]
        #: The plug-ins by kind and name, with the arguments that were given and the arguments that they take.
        self._plugins: list[tuple[str, str, Node, str]] = []
        #: The names of their classes, and their arguments.
        self._classes: list[tuple[str, Node]] = []
        #: The versions of the distributions that provide them.
        self.distributions: dict[str, str] = {"hocket": hocket.__version__}
        #: Plug-ins with all their arguments, by the identity of the node that names them.
        self._complete: dict[int, Any] = {}

    # --- checks

    def check(self, needs: Sequence[str] | None = (), instead: Collection[str] = ()) -> dict[str, Any]:
        """Check all keys, names, arguments and types, and return the settings. No object is made. Raises ConfigError.

        ``needs``: keys that have to be given besides ``model``; None if that has not, either. ``instead``: keys whose values
        are replaced, and not checked.
        """
        given, where = self._given, self._document.where
        if "data" in given and (other := next((key for key in ("train_data", "eval_data") if key in given), None)):
            raise ConfigError(given[other].key, f"{other} and data are both given. data stands for both; remove one.")
        settings = {key: self._plain(key) for key in given if key not in _OBJECTS}
        for key in settings:
            if key not in instead:
                self._check_setting(key, settings[key])
        if needs is not None and "resume" not in instead:
            self._check_resume(settings)
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

    def _check_setting(self, key: str, value: Any) -> None:
        """Check one setting as the Trainer does. Raises ConfigError."""
        with self._about(key):
            with warnings.catch_warnings(action="ignore"):  # the Trainer warns
                value = Settings.arguments()[key].convert(value)
            for each in value if key == "profile" and imports.reads() else ():
                building.build("callbacks", each)

    def _check_resume(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError where there is no checkpoint to resume from, before a model is made."""
        where = conversions.resume(settings.get("resume"))
        if where is None or settings.get("fast_dev_run") or settings.get("overfit"):
            return
        with self._about("resume"):
            resuming.check(where, bool(settings.get("checkpoints")))
            if where != "auto" and not is_url(where) and not os.path.lexists(where):
                resuming.locate(where, None, ALONE)

    @contextmanager
    def _about(self, key: str) -> Iterator[None]:
        """Raise errors inside as ConfigError about this key."""
        try:
            yield
        except (TypeError, ValueError, CheckpointError) as error:
            node = self._given[key]
            said = in_yaml(error, node.where.startswith("'"))
            inside = blamed(node.value, error) if isinstance(node.value, dict) else None
            about = getattr(error, "about", None)
            raise ConfigError((inside or node).where, said if about == key else f"{key}: {said}") from error

    def _check_names(self) -> None:
        """Check losses and metrics that are given by a name of hocket's. Raises ConfigError."""
        for key, find, convert in (
            ("loss", named_loss, conversions.loss),
            ("metrics", simple_metrics.find, conversions.metrics),
            ("train_metrics", simple_metrics.find, partial(conversions.metrics, argument="train_metrics")),
        ):
            node = self._given.get(key, Node(None, "", ""))
            if key != "loss":
                forms.check_metrics(node, key)
            for each in node.value if isinstance(node.value, list) else [node]:
                name = each.value
                if isinstance(name, str) and reference(each, dotted=True) is None and find(name) is None:
                    try:
                        convert(name)
                    except ValueError as error:
                        raise ConfigError(each.where, in_yaml(error, each.where.startswith("'"))) from None

    # --- objects

    def _objects(self) -> dict[str, Any]:
        """Return the values that are objects, made."""
        given = self._given
        values = {key: self._value(key) for key in given if key in _OBJECTS and key != "data"}
        if "data" in given:
            found = reference(given["data"])
            if found and whose_module(resolve(found)):
                values["data"] = make(found, _Instance, "data")
            else:
                values["train_data"] = self._split("train")
                values["eval_data"] = {"test": self._split("test")}
        return values

    def _plain(self, key: str) -> Any:
        node = self._given[key]
        if key == "compile" and isinstance(node.value, dict):
            return arguments(torch.compile, "torch.compile", node, key, 1)[1]
        if key in ("train_data", "eval_data"):
            forms.check_batches(node, key)
        return build(node, self._hints.get(key, Any), key)

    def _value(self, key: str) -> Any:
        node, kind = self._given[key], KIND_OF_KEY.get(key)
        if kind is None:
            return self._plain(key)
        if isinstance(node.value, str) and key not in LISTS:
            with self._about(key):  # such as device: cuda:0
                node.value = Settings.arguments()[key].convert(node.value)
        forms.check_commas(node, key)
        if key in LISTS:
            forms.check_list(node, kind, key)
        else:
            forms.check_nested(node, kind, key)
        if isinstance(node.value, list) and (key in LISTS or kind in _FUNCTIONS):
            return [self._plugin(item, kind, f"{key}.{i}") for i, item in enumerate(node.value)]
        if kind in _FUNCTIONS and forms.by_name(node, kind):
            return {name: self._plugin(item, kind, f"{key}.{name}") for name, item in node.value.items()}
        return self._plugin(node, kind, key)

    def _plugin(self, node: Node, kind: str, at: str) -> Any:
        """Return the specification of a plug-in, or an object given by import path."""
        forms.check_nested(node, kind, at)
        if found := reference(node):
            return make(found, _FUNCTIONS.get(kind, _Instance), at)
        name, inside = forms.named(node, kind, at)
        if name == "auto" and kind in ("strategies", "devices"):
            return name
        entry, cls = forms.find(name, inside, kind, at)
        self._plugins.append((registry.singular(kind), entry.name, inside, takes(cls, _LEADING.get(kind, 0))))
        self._classes.append((getattr(cls, "__name__", name), inside))
        leading = _LEADING.get(kind, 0)
        if isinstance(inside.value, list):
            raise ConfigError(inside.where, f"The arguments of {name} are a list. Write a mapping of names to values.")
        options: dict[str, Any] = {}
        if kind == "optimizers" and isinstance(inside.value, dict):  # what groups match is checked with the model
            forms.check_groups(inside.value.get("groups"), cls, name, at)
            options = {key: child.plain() for key, child in inside.value.items() if key in OPTIONS}
            given = {key: child for key, child in inside.value.items() if key not in OPTIONS}
            inside = Node(given, inside.where, inside.key)
        named = options | arguments(cls, entry.name, inside, f"{at}.{name}", leading)[1]
        self._note(node, name, entry, cls, {**(inside.plain() or {}), **options})
        if missing := lacking(cls, [None] * leading, named):
            raise lacks(cls, name, missing, inside.key, leading)
        return {name: named} if named else name

    def _split(self, split: str) -> Any:
        """Return a split of the plug-in or function that ``data`` names."""
        node = self._given["data"]
        if found := reference(node):
            target, name, inside = resolve(found), found.path, found.arguments or Node({}, found.where, found.where)
        else:
            name, inside = forms.named(node, "datasets", "data")
            entry, target = forms.find(name, inside, "datasets", "data")
            if isinstance(inside.value, dict | None):
                self._note(node, name, entry, target, inside.plain() or {})
        return call(target, name, inside, node.where, "data", leading=(split,))

    def _note(self, node: Node, name: str, entry: Entry, cls: Any, given: dict[str, Any]) -> None:
        """Remember a plug-in with all arguments, and its distribution, for `resolved`."""
        complete = {**defaults(cls, _LEADING.get(entry.kind, 0)), **given}
        self._complete[id(node)] = {name: complete} if complete else name
        if entry.dist and entry.version:
            self.distributions[entry.dist] = entry.version

    # --- the Trainer

    def trainer(self, needs: Sequence[str], instead: Mapping[str, Any]) -> Trainer:
        """Build the values, and the Trainer from them, after all have been checked. Raises ConfigError."""
        given, where = self._given, self._document.where
        settings = self.check(needs, instead)
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
            noted = self._noted(error)
            advice = f"Change the value. {noted[1]}." if noted else ""
            message = (
                in_yaml(error, override)
                if isinstance(error, Mistake)
                else raised(f"{key}Making the Trainer", error, advice)
            )
            raise ConfigError(where, message) from error

    def _assemble(self, values: Mapping[str, Any]) -> Trainer:
        return Trainer(**values)

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, and named plug-ins with all arguments, as plain data without secrets.

        Raises ConfigError. Import paths are not imported.
        """
        if not self._complete:
            with imports.unread():
                self.check(None)
        given = self._document.value
        found = {
            key: self._plain_value(given[key]) if key in given else each.default
            for key, each in keys().items()
            if key in given or key != "model"
        }
        return dict(masked(found))

    def _plain_value(self, node: Node) -> Any:
        if id(node) in self._complete:
            return self._complete[id(node)]
        if isinstance(node.value, dict):
            return {key: self._plain_value(child) for key, child in node.value.items()}
        return [self._plain_value(child) for child in node.value] if isinstance(node.value, list) else node.plain()

    def _noted(self, error: BaseException) -> tuple[Node, str] | None:
        """Return what was given to the plug-in that an error names, and the arguments that it takes; or None."""
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return next(
            ((inside, takes) for kind, name, inside, takes in self._plugins if f"{kind} '{name}'" in said), None
        )

    def blamed(self, error: BaseException) -> str | None:
        """Return the place of the value that an error of the Trainer is about, or None."""
        if noted := self._noted(error):
            inside, _ = noted
            about = blamed(inside.value, error) if isinstance(inside.value, dict) else None
            return about.where if about else inside.key
        nested = [(name, node) for name, node in self._document.inside() if isinstance(name, str)]
        once = {name: node for name, node in nested if [other for other, _ in nested].count(name) == 1}
        about = blamed(self._given, error) or blamed(once, error)
        return about.where if about else None

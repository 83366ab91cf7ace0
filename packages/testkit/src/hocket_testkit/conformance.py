"""The base of all suites: hooks for authors to configure them, and tests that every kind of plug-in must pass.

An inherited test may be skipped or replaced only with a reason::

    class TestMixUp(hocket.testkit.AlgorithmConformance):
        exempt = {"test_works_with_microbatches": "each microbatch draws its own mixing ratio"}

Without a reason, replacing it (or setting it to None) is an error when the class is defined.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import pickle
import random
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import hocket
from hocket import plugins
from hocket.basics import seeding
from hocket.basics.kinds import HEAVY
from hocket.errors import Unsupported, WrongType
from hocket.hookspecs import Event
from hocket.hookspecs.attachment import Attachment
from hocket.plugins import registry
from hocket.plugins.bus import Bus
from hocket_testkit.compare import difference
from hocket_testkit.footprint import changed, footprint
from hocket_testkit.imports import Imported, import_in_fresh_process
from hocket_testkit.reference import TwoSteps, convolutional_network, labelled_images

_PACKAGE = __name__.rpartition(".")[0]


class Conformance:
    """The base of all suites. Inherit from the suite of your kind of plug-in and define :meth:`make`."""

    #: The kind of plug-in, one of ``hocket.plugins.KINDS``.
    kind: ClassVar[str]
    #: The short name, if no entry point declares the class (it was passed to `hocket.plugins.register`).
    name: ClassVar[str | None] = None
    #: Packages that the plug-in's module may import, such as ``{"transformers"}``. Those are not checked.
    heavy: ClassVar[Collection[str]] = ()
    #: Inherited test -> why it does not apply. It is skipped with that reason, or may be replaced.
    exempt: ClassVar[Mapping[str, str]] = {}
    #: Inherited test -> (tolerance, reason), for tests that compare within a tolerance.
    tolerances: ClassVar[Mapping[str, tuple[float, str]]] = {}
    #: The device to train on.
    device: ClassVar[str] = "cpu"
    #: The folder of the current test, where runs are stored.
    folder: Path

    # --- for authors

    _runs = 0

    def make(self) -> Any:
        """Return a new plug-in, as small as possible while still acting."""
        raise Unsupported(f"{type(self).__name__} needs a make(self) that returns a new plug-in to test.")

    def model(self) -> nn.Module:
        """Return a new small model, or `hocket.Task`, to train; draw its weights from torch's generator, which is seeded."""
        return convolutional_network()

    def data(self) -> Any:
        """Return training data: a list of batches, or a DataLoader over a map-style data set. Random numbers as in `model`."""
        return labelled_images()

    def loss(self) -> Any:
        """Return the ``loss=`` of the Trainer; None for a model that has its own."""
        return nn.functional.cross_entropy

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer over a list of parameters."""
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def arguments(self) -> dict[str, Any]:
        """Return further arguments for every Trainer of the suite, such as ``{"schedule": "cosine"}``."""
        return {}

    # --- for suites

    def declared(self) -> Any:
        """Return what the entry point names: the class of the plug-in."""
        return type(self.make())

    @pytest.fixture(autouse=True)
    def _begin(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
        test = request.function.__name__
        if test in self.exempt and request.function.__module__.startswith(_PACKAGE):
            pytest.skip(self.exempt[test])
        self.folder = tmp_path
        before = footprint()
        yield
        # A change that persists would be blamed only on the first test that caused it.
        after = footprint()
        there = before["os.environ"]  # libraries add variables when they are first used
        after["os.environ"] = {name: value for name, value in after["os.environ"].items() if name in there}
        different = [name for name in changed(before, after) if name not in _OF_TESTS]
        assert not different, (
            f"{test} leaves {', '.join(different)} changed in the process. Undo that when the run is closed, or in the test."
        )

    def trainer(self, plugin: Any = None, **changes: Any) -> hocket.Trainer:
        """Return a Trainer of the reference run with ``plugin`` attached, or none of this kind; ``changes`` are arguments."""
        self._runs += 1  # each run has its own folder
        arguments = {
            "model": self.seeded(self.model),
            "loss": self.loss(),
            "train_data": self.seeded(self.data),
            "eval_data": self.seeded(self.data),
            "optimizer": self.optimizer,
            "duration": "2ep",
            "seed": 17,
            "device": self.device,
            "strategy": "single",
            "folder": self.folder,
            "run_name": "run" if self._runs == 1 else f"run-{self._runs}",
            **self.arguments(),
            **changes,
        }
        if plugin is not None:
            argument = _SINGLE.get(self.kind)
            arguments[argument or self.kind] = plugin if argument else [*arguments.get(self.kind, ()), plugin]
        return hocket.Trainer(**arguments)

    def two_steps(self) -> TwoSteps:
        """Return a task that trains two instances of `model`, each in its own step."""
        return TwoSteps((self.seeded(self.model), self.seeded(self.model)), self.loss(), self.optimizer)

    def seeded(self, make: Callable[[], Any]) -> Any:
        """Return ``make()``, called with fixed global random numbers, which are restored afterwards."""
        with seeding.preserved():
            random.seed(0)
            torch.manual_seed(0)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(0)
            return make()

    def tolerance(self, test: str, default: float) -> float:
        """Return the tolerance of a test in `tolerances`, or ``default``."""
        return self.tolerances.get(test, (default, ""))[0]

    def plugin_name(self) -> str | None:
        """Return the plug-in's name, as declared or from `name`; None if it has none."""
        cls = self.declared()
        if self.name is not None:
            return self.name
        entry = registry.entry_of(self.kind, cls)
        if entry is None:  # a package may declare a re-exported class, under another module than the class's own
            top = cls.__module__.partition(".")[0]
            near = (e for e in registry.entries(self.kind) if e.target.partition(":")[0].partition(".")[0] == top)
            entry = next((e for e in near if e.api == registry.API and e.load() is cls), None)
        return None if entry is None else entry.name

    def _module(self) -> str:
        declared = self.declared()
        module: str | None = getattr(declared, "__module__", None)
        entry = next((each for each in registry.entries(self.kind) if each.obj is declared), None)
        if hasattr(declared, "run") and not isinstance(declared, type):  # a command, which is an instance
            module = declared.run.__module__
        return module or (entry.target.partition(":")[0] if entry else "")

    def _import(self) -> Imported:
        return import_in_fresh_process(self._module(), tuple(sorted(self.heavy)))

    def _files(self) -> list[Path]:
        """Return everything in the folder of the test."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    # --- tests for every plug-in

    def test_inherited_tests_are_all_there(self) -> None:
        """Replaced or skipped tests have a reason: checked when the class is defined, and again here."""
        _check_exemptions(type(self))

    def test_make_gives_a_new_plugin_each_time(self) -> None:
        assert self.make() is not self.make(), (
            f"make() of {type(self).__name__} returned one object twice. Return a new plug-in each time: the tests compare "
            "fresh ones with those that were used."
        )

    def test_goes_by_a_name(self) -> None:
        """``Trainer(algorithms=["name"])`` finds exactly this class."""
        cls, name = self.declared(), self.plugin_name()
        target = f"{self._module()}:{getattr(cls, '__qualname__', '…')}"
        assert name is not None, (
            f"No entry point declares {target}. Add a line `my-name = "
            f'"{target}"` under [project.entry-points."hocket.v1.{self.kind}"] in pyproject.toml '
            "and install the package again (an editable install does not notice); for a plug-in that is registered in the "
            "process, set `name` in the test class."
        )
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name), (
            f"'{name}' is not a name that can be typed everywhere. Use lower-case words with hyphens, such as "
            f"'{_kebab(getattr(cls, '__name__', 'my-command'))}'."
        )
        found = plugins.get(self.kind, name)
        assert found is cls, (
            f"The name '{name}' leads to {found!r}, not to {cls!r}. Point the entry point at the class."
        )

    def test_importing_it_brings_nothing_heavy(self) -> None:
        """Naming one plug-in must not cost the import of libraries that it does not need."""
        imported = self._import()
        assert not imported.error, (
            f"{self._module()} cannot be imported on its own, in a new process: {imported.error}."
        )
        heavy = sorted(imported.packages & set(HEAVY) - set(self.heavy))
        assert not heavy, (
            f"Importing {self._module()} imports {', '.join(heavy)}. Import it in the function that uses it; "
            f"if the plug-in is nothing without it, declare heavy = {set(heavy)} in the test class."
        )

    def test_importing_it_changes_nothing(self) -> None:
        """Importing touches no environment variable, random number, signal, logger or setting of torch."""
        different = [name for name in self._import().changed if name not in _OF_LIBRARIES]
        assert not different, (
            f"Importing {self._module()} changed {', '.join(different)}. A module that is imported "
            "defines things; do the rest on an event, and undo it on Event.CLOSE."
        )

    def test_making_it_changes_nothing(self) -> None:
        before = footprint()
        self.make()
        different = changed(before, footprint())
        assert not different, (
            f"Making the plug-in changed {', '.join(different)}. An __init__ stores its arguments; draw random numbers from "
            "state.generator(self) and open what is needed on an event."
        )
        assert not self._files(), f"Making the plug-in wrote {self._files()}. Write when there is something to write."

    def test_implements_known_hooks_only(self) -> None:
        """It can be attached, which checks names and arguments of hooks, and implements at least one hook."""
        attachment = Attachment(self.kind, self.plugin_name() or "plugin", self.make())
        bus = Bus([attachment])
        hooks = [hook for hook in _hooks() if bus.listeners(hook)]
        assert hooks, (
            f"{type(attachment.obj).__name__} implements no hook, so attaching it does nothing. `hocket plugins hooks` prints "
            "what there is; an Algorithm also needs `events = {Event.…}`."
        )

    def test_has_a_summary(self) -> None:
        """The first line of the docstring, which `hocket plugins list` shows."""
        doc = self.declared().__doc__ or ""
        summary = doc.strip().partition("\n")[0]
        assert len(summary.split()) >= 2, (
            f"The docstring of {self.declared().__name__} begins with {summary!r}. Its first line is what `hocket plugins "
            "list` shows: say in one sentence what the plug-in does."
        )

    def test_pickles(self) -> None:
        """Spawned processes, such as ranks and DataLoader workers, receive plug-ins pickled."""
        plugin = self.make()
        copied = pickle.loads(pickle.dumps(plugin))
        assert type(copied) is type(plugin)
        if hasattr(plugin, "state_dict"):
            found = difference(copied.state_dict(), plugin.state_dict(), at="state_dict()")
            assert found is None, f"A pickled copy differs from the plug-in: {found}."

    # --- the mechanism

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_exemptions(cls)


#: Entries of the footprint that tests change themselves.
_OF_TESTS = ("the global random numbers", "running threads", "the filters of warnings")
#: Entries that libraries change when they are imported.
_OF_LIBRARIES = ("the filters of warnings",)
#: Kinds of which a Trainer takes exactly one, with the argument's name.
_SINGLE = {
    "actions": "actions", "devices": "device", "precisions": "precision", "schedules": "schedule", "strategies": "strategy",
}  # fmt: skip


def _check_exemptions(cls: type[Conformance]) -> None:
    """Raise TypeError for inherited tests that are replaced without a reason, and for reasons that match no test."""
    if _of_kit(cls):
        return
    tests = {name for base in cls.__mro__ if _of_kit(base) for name in vars(base) if name.startswith("test_")}
    given = [*cls.exempt.items(), *((name, reason) for name, (_, reason) in cls.tolerances.items())]
    for name, reason in given:
        if name not in tests:
            near = difflib.get_close_matches(name, tests, 1)
            hint = f" Did you mean '{near[0]}'?" if near else f" It inherits {', '.join(sorted(tests))}."
            raise WrongType(f"{cls.__name__} makes an exception for '{name}', which it does not inherit.{hint}")
        if not isinstance(reason, str) or not reason.strip():
            raise WrongType(
                f"{cls.__name__} makes an exception for '{name}' without a reason. Say in a sentence why it does not apply."
            )
    for name in sorted(tests - set(cls.exempt)):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if not _of_kit(owner):
            raise WrongType(
                f"{owner.__name__} replaces or removes the inherited {name} without a reason. Leave it as it is, give what you "
                f"add another name, or write exempt = {{'{name}': 'why it does not apply'}}."
            )


def _of_kit(cls: type) -> bool:
    return cls.__module__.startswith(f"{_PACKAGE}.") or cls is object


def _hooks() -> list[str]:
    from hocket.hookspecs import SPECS

    return [hook for spec in SPECS for hook in vars(spec) if not hook.startswith("_")]


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()


# --- helpers of tests


def weights(trainer: hocket.Trainer) -> dict[str, Any]:
    """Return a copy of the full weights."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in trainer.model_state_dict(evaluated=False).items()
    }


def contents(data: Any) -> dict[str, Any]:
    """Return the contents of user data by reference: its batches or samples, and the attributes of a loader."""
    dataset = getattr(data, "dataset", None)
    if isinstance(data, Sequence):
        return {"batches": list(data)}
    if dataset is not None and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        attributes = {name: id(value) for name, value in vars(data).items() if not name.startswith("_")}
        return {"attributes": attributes, "samples": [dataset[index] for index in range(len(dataset))]}
    raise WrongType(
        f"data() returned {type(data).__name__}. Return a list of batches, or a DataLoader over a data set with __getitem__ "
        "and __len__, so that the tests can see whether the plug-in changes it."
    )


class Planned(Exception):
    """Raised by a test in the middle of training."""


def raiser(hook: str, after: int = 1) -> Any:
    """Return a callback that raises Planned on the ``after``-th call of ``hook``; its count and ``after`` are writable."""

    def listen(self: Any, state: hocket.State) -> None:
        self.calls += 1
        if self.calls == self.after:
            raise Planned(f"raised by a test in {hook}")

    assert hook in {event.value for event in Event}
    return type("Raiser", (hocket.Callback,), {"calls": 0, "after": after, hook: listen})()


def parameters_of(cls: type) -> list[str]:
    """Return the arguments of a class, without those that are passed on (``**kwargs``)."""
    given = list(inspect.signature(cls).parameters.values())
    return [p.name for p in given if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]

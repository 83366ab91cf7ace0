"""The content of a checkpoint: the components of a run, from which another Trainer continues bitwise identically.

The tree is made of dicts with string keys, lists, tensors, numbers, strings, bytes and None (`checkpoints/plain_data.py`).
States that differ between ranks are gathered under ``ranks``, by rank; everything else is identical on all ranks. Tensors may
be the run's own, which saves a copy: write the tree, or copy it, before training continues.

To save more state, add an entry to `hocket_checkpoints.core_components`. Plug-ins and Tasks add theirs by
``checkpoint_components(state)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from hocket.basics.dtensors import mesh_of
from hocket.basics.plain_data import decode
from hocket.data.nesting import map_tensors
from hocket.errors import WrongState
from hocket.help import warn
from hocket.loop.agreement import ranks_of
from hocket.state.component import Check, Component, ContentError, Like, PerRank, Saved, Tree
from hocket.state.state import State
from hocket_checkpoints.components.configuration import Configuration
from hocket_checkpoints.components.data import EvaluationData, TrainingData

#: Counts up when the tree changes; see :meth:`Content.load_state_dict`.
VERSION = 1
#: The key below which components of plug-ins and the Task are saved, so that their names never collide with core's.
OFFERED = "components"
#: Whether state of plug-ins that are not attached is allowed; see `without_plugins`.
LEFT_OUT: ContextVar[bool] = ContextVar("hocket_left_out", default=False)
#: Keys of the tree that belong to no component.
_FRAME = {"version", "ranks"}


@contextmanager
def without_plugins() -> Iterator[None]:
    """Allow state of plug-ins that are not attached: a Trainer that only evaluates leaves out callbacks on purpose."""
    token = LEFT_OUT.set(True)
    try:
        yield
    finally:
        LEFT_OUT.reset(token)


def of_run(state: State) -> Content:
    """Return the content of a run's checkpoints, of which core knows what the Trainer calls."""
    content = state.content
    assert isinstance(content, Content)
    return content


class Content:
    """Save and load the components of a run. All ranks call its methods together.

    Args:
        components: in the order in which they are saved and loaded. The last one comes after the components of plug-ins.
        configuration: that of the components which takes changes of the user before a fit.
        training_data, evaluation_data: those of the components that wait for data.
    """

    def __init__(
        self,
        state: State,
        components: Sequence[Component],
        configuration: Configuration,
        training_data: TrainingData,
        evaluation_data: EvaluationData,
    ) -> None:
        self._state, self._own, self.configuration = state, list(components), configuration
        #: Called by the Trainer when its data is set, which may be after loading.
        self.train_data_is_set, self.eval_sets_are_made = training_data.data_is_set, evaluation_data.sets_are_made
        #: The exception that interrupted loading, so that this run has parts of a checkpoint only; or empty.
        self._failed = ""

    @property
    def components(self) -> list[Component]:
        """All components, those of plug-ins and of the Task included."""
        from hocket_checkpoints.plugin_components import offered

        *first, last = self._own
        return [*first, *offered(self._state), last]

    # --- save

    def worth_saving(self) -> bool:
        """Whether every component allows a checkpoint to be written now. The guard does not if weights are non-finite."""
        return all([each.worth_saving() for each in self.components])  # a list: every rank has to call all of them

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """Return the tree; unless ``gather``, sharded tensors are DTensors.

        Raises RuntimeError in the middle of a batch, and TypeError if a plug-in's state is not plain data.
        """
        components = self.components
        for each in components:
            each.complete()
        tree: dict[str, Any] = {"version": VERSION}
        mine: dict[str, Any] = {}
        for each in components:
            _put(tree if each.scope == "run" else mine, each.path, each.state_dict(gather))
        tree["ranks"] = self._state.bus.all_gather_object(map_tensors(_copy, mine))
        return tree

    # --- load

    def like(self) -> Like:
        """Return a function that says how this run shards a tensor, by path, for `hocket_checkpoints.storage.format.read`."""
        functions = {f"{each.path}.": each.like() for each in self.components if each.scope == "run"}

        def like(path: str, reference: dict[str, Any]) -> Tensor | None:
            for prefix, function in functions.items():
                found = function(path.removeprefix(prefix), reference) if path.startswith(prefix) else None
                if isinstance(found, Tensor) and mesh_of(found) is not None:
                    return found if list(found.shape) == reference["shape"] else None
            return None

        return like

    def load_state_dict(
        self, tree: Mapping[str, Any], strict: bool, ignore: Sequence[str] = (), copy: bool = True
    ) -> None:
        """Continue from the state of another run. The tree is not changed.

        Args:
            strict: whether all state in the tree and in the run must have a counterpart. Otherwise state without one, weights
                of another shape included, is skipped with a warning.
            ignore: globs of dotted paths in the tree; the state of the run that they match is not changed.
            copy: whether the tree is reused, so that none of its tensors may be kept.

        Raises:
            ContentError: something does not fit, such as another optimizer, or weights of another shape. Nothing was loaded.
            Exception: that of a component that failed to load. `check_loaded` refuses this run until another load succeeds.
        """
        if tree.get("version") != VERSION:
            raise ContentError(
                f"The checkpoint's content has version {tree.get('version')!r}, and this hocket reads {VERSION}. Upgrade the "
                "older."
            )
        from hocket_checkpoints.weight_differences import shapes_of

        model, own = decode(tree.get("model"), copy=False), tree.get("ranks")
        if not isinstance(own, list) or not own or not all(isinstance(each, Mapping) for each in own):
            raise ContentError("The checkpoint has no rank's state: its list 'ranks' is missing, empty or damaged.")
        if not isinstance(model, Mapping):
            raise ContentError("The checkpoint has no weights: its 'model' is missing or damaged.")
        weights = shapes_of(model)
        if ignore:
            from hocket_checkpoints.ignoring import ignoring

            tree = ignoring(tree, self.state_dict(), ignore)
        saved, components = Saved(tree, strict, weights, copy), self.components
        ranks = ranks_of(self._state)
        checks = ranks.agree(lambda: self._check(components, saved))

        def load() -> None:
            for component, check in checks:
                component.load_state_dict(check.state)

        try:
            ranks.agree(load)
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}".rstrip(": ")
            raise
        self._failed = ""

    def check_loaded(self) -> None:
        """Raise RuntimeError if loading failed after some components had been loaded."""
        if self._failed:
            raise WrongState(
                f"Loading a checkpoint raised {self._failed} after parts of it were loaded, so this Trainer has some parts of "
                "the checkpoint and some of its own, and training cannot continue from there. Make a new Trainer, or load a "
                "checkpoint again, without the part that failed: trainer.load_state_dict(tree, ignore=['…'])."
            )

    def _check(self, components: Sequence[Component], saved: Saved) -> list[tuple[Component, Check]]:
        """Return the components to load. Raises the errors of `load_state_dict` before anything is loaded, and warns."""
        checks, problems, messages = [], _unknown(components, saved.tree, self._state), list[str]()
        error: ValueError | None = None
        for component in components:
            there, state = self._find(component, components, saved.tree)
            try:
                check = component.check(state, saved) if there else component.absent(saved)
            except ValueError as raised:
                error = error or raised
                continue
            problems += check.problems
            messages += check.warnings
            if there:
                checks.append((component, check))
        if problems and saved.strict:
            said = " ".join([*problems, *([] if error is None else [getattr(error, "marked", str(error))])])
            raise ContentError(
                f"{said} «To omit parts, call trainer.load_state_dict(tree, ignore=['…']), or with strict=False¦To begin a new "
                "run instead, write »«¦resume=None»«¦, and another folder in checkpoints»."
            ) from error
        if error is not None:
            raise error
        if problems:
            messages.insert(0, f"Loaded with strict=False. {' '.join(problems)}")
        for message in messages:
            warn(message)
        return checks

    def _find(self, component: Component, components: Sequence[Component], tree: Mapping[str, Any]) -> tuple[bool, Any]:
        """Return whether the tree has the component's state, and the state, without the keys of components below it."""
        if component.scope == "rank":
            states = [_get(each, component.path) for each in tree["ranks"]]
            if all(each is _ABSENT for each in states):
                return False, None
            strategy = self._state.strategy
            known = [None if each is _ABSENT else each for each in states]
            return True, PerRank(known, strategy.rank, strategy.world_size)
        state = _get(tree, component.path)
        below = {each.path.rpartition(".")[2] for each in components if each.path.startswith(f"{component.path}.")}
        if below and isinstance(state, Mapping):
            state = {key: value for key, value in state.items() if key not in below}
        return state is not _ABSENT, state


def _unknown(components: Sequence[Component], tree: Mapping[str, Any], state: State) -> list[str]:
    """Return problems for the parts of the tree that no component loads."""
    there = [("run", name, name) for name in _names(tree) if name not in _FRAME]
    of_ranks = dict.fromkeys(name for each in tree["ranks"] for name in _names(each))
    there += [("rank", name, f"ranks.*.{name}") for name in of_ranks]
    return [
        _unclaimed(name, glob, tree, state)
        for scope, name, glob in there
        if not any(each.scope == scope and _covers(each.path, name) for each in components)
    ]


def _names(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the components in a tree: its keys, and the paths of components of plug-ins."""
    for key, value in tree.items():
        if key == OFFERED:
            yield from (f"{OFFERED}.{name}" for name in value if not LEFT_OUT.get())
        else:
            yield key


def _covers(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _unclaimed(name: str, glob: str, tree: Mapping[str, Any], state: State) -> str:
    from hocket_checkpoints.components.plugins import how_to_get

    who, how, here = "upgrade hocket", "", {each.name for each in state.bus.attachments}
    if name.startswith(f"{OFFERED}."):
        absent = [each for each in tree["attached"] if each["kind"] == "callbacks" and each["name"] not in here]
        named = [each for each in absent if f"{OFFERED}.{each['name']}" == name] or absent
        who = "attach the plug-in that saved it"
        how = f" {how_to_get('callbacks', named[0])}" if len(named) == 1 else ""
    return (
        f"The checkpoint has '{name}', which nothing here loads: {who}«, or omit it by trainer.load_state_dict(tree, "
        f"ignore=['{glob}'])¦».{how}"
    )


class _Absent:
    """A placeholder for a missing key."""


_ABSENT = _Absent()


def _get(tree: Mapping[str, Any], path: str) -> Any:
    found: Any = tree
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return _ABSENT
        found = found[key]
    return found


def _put(tree: dict[str, Any], path: str, value: Tree) -> None:
    *above, key = path.split(".")
    for each in above:
        tree = tree.setdefault(each, {})
    tree[key] = value


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, because other ranks cannot read this rank's device."""
    return tensor.to("cpu", copy=True)

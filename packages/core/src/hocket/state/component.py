"""The components of a checkpoint. Each saves, checks and loads its own state; see `Component`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

from hocket.basics.plain_data import decode
from hocket.basics.plugin_errors import PluginError

#: Plain data: dicts with string keys, lists, tensors, numbers, strings, bytes and None; see `hocket.basics.plain_data`.
Tree: TypeAlias = Any
#: Called with a path in the tree and the description of the tensor stored there; see `hocket_checkpoints.storage.format.read`.
Like: TypeAlias = Callable[[str, dict[str, Any]], Tensor | None]


class ContentError(PluginError, ValueError):
    """A checkpoint does not fit the Trainer that it is loaded into."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint that is loaded.

    Example:
        >>> from hocket.checkpoints import Saved
        >>> checkpoint = Saved(tree={"counter": 3}, strict=True, weights={"weight": (1, 4)}, copy=False)
        >>> checkpoint.decode(checkpoint.tree["counter"])
        3
    """

    #: All of it, for checks that need the state of other components.
    tree: Mapping[str, Tree]
    #: Whether problems are errors. Otherwise they are warnings, and components load the part that fits.
    strict: bool
    #: Shapes of the checkpoint's weights by name, ignored ones included.
    weights: Mapping[str, tuple[int, ...]]
    #: Whether the tree is reused, so that components must not keep its tensors.
    copy: bool

    def decode(self, tree: Tree) -> Any:
        """Undo `encode`; components may keep the tensors of the result."""
        return decode(tree, self.copy)


@dataclass(frozen=True, slots=True)
class PerRank:
    """The saved states of a component with ``scope = "rank"``, and which of them this rank continues.

    Example:
        >>> from hocket.checkpoints import PerRank
        >>> saved = PerRank(states=["of rank 0", "of rank 1", "of rank 2"], rank=0, world_size=2)
        >>> saved.own, list(saved.dealt)
        ('of rank 0', ['of rank 0', 'of rank 2'])
    """

    #: Indexed by rank of the saved run.
    states: Sequence[Any]
    rank: int
    world_size: int

    @property
    def existed(self) -> bool:
        """Whether the saved run had this rank."""
        return self.rank < len(self.states)

    @property
    def own(self) -> Any:
        """This rank's state; that of rank 0 for a new rank."""
        return self.states[self.rank if self.existed else 0]

    @property
    def dealt(self) -> Sequence[Any]:
        """The states that this rank merges, so that each is taken by exactly one rank; may be empty."""
        return self.states[self.rank :: self.world_size]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of checking a component's saved state.

    Example:
        >>> from hocket.checkpoints import Check, Component
        >>> class Vocabulary(Component):
        ...     path = "acme-vocabulary"
        ...     def __init__(self, words):
        ...         self.words = words
        ...     def check(self, saved, checkpoint):
        ...         return Check(problems=() if saved["words"] == self.words else ["The vocabulary differs."])
        >>> Vocabulary(["a", "b"]).check({"words": ["a"]}, None).problems
        ['The vocabulary differs.']
    """

    #: The argument of `Component.load_state_dict`: the saved state or, with ``strict=False``, the part of it that fits.
    state: Any = None
    #: Misfits and what to type next, a sentence or two each. They are raised together, before anything is loaded.
    problems: Sequence[str] = ()
    #: Messages for the user about a state that can be loaded.
    warnings: Sequence[str] = ()


class Component:
    """A part of a run that saves itself, such as the optimizers or a plug-in's queue.

    Plug-ins and Tasks add parts of their own by a method ``checkpoint_components(state)`` that returns some of these. Most
    state does not need one: ``state_dict`` and ``load_state_dict`` of a plug-in, and `hocket.Task.extra_state`, are saved
    anyway. A component adds state for each rank, tensors in shards, checks before loading, and a rule for another world size.

    Example:
        >>> import hocket, hocket_checkpoints
        >>> class Queue(hocket.Callback):
        ...     def checkpoint_components(self, state):
        ...         return [QueueState(self)]
        >>> class QueueState(hocket.checkpoints.Component):
        ...     path, scope = "acme-queue", "rank"
        ...     def __init__(self, queue):
        ...         self.queue = queue
        ...     def state_dict(self, gather):
        ...         return {"items": self.queue.items}
        ...     def load_state_dict(self, saved):
        ...         self.queue.items = [item for state in saved.dealt for item in state["items"]]
    """

    #: The path of its state in the checkpoint, which must never change. For plug-ins it is below ``components``.
    path: str
    #: ``"run"`` if all ranks have the same state, or shards of it; ``"rank"`` if each has its own, which is then saved by rank.
    scope: Literal["run", "rank"] = "run"

    def complete(self) -> None:
        """Raise RuntimeError if the state cannot be taken now. Called on all components before `state_dict`."""

    def worth_saving(self) -> bool:
        """Whether a checkpoint may be written now; if not, say why in a warning. Every rank calls it and returns the same."""
        return True

    def state_dict(self, gather: bool) -> Tree:
        """Return the state. Unless ``gather``, tensors may be DTensors, of which each rank writes its shard.

        Called on every rank. Tensors may be the run's own; they are written or copied before training continues.
        """
        raise NotImplementedError

    def like(self) -> Like:
        """Return a function that says how this run shards a tensor, by its path below :attr:`path`.

        It returns the DTensor or, for a tensor that is read in full, None. A tensor that is not sharded, or has another
        shape, counts as None.
        """
        return lambda path, reference: None

    def check(self, saved: Tree, checkpoint: Saved) -> Check:
        """Compare the saved state with this run. Changes nothing; called for all components before any is loaded.

        Args:
            saved: the saved result of `state_dict` or, for ``scope = "rank"``, a `PerRank` of it.

        May raise a ValueError for a state that even ``strict=False`` cannot skip.
        """
        return Check(saved)

    def absent(self, checkpoint: Saved) -> Check:
        """As `check`, for a checkpoint without this component. ``Check()`` lets it start fresh; by default it is a problem."""
        return Check(problems=[f"The checkpoint has no '{self.path}'."])

    def load_state_dict(self, saved: Tree) -> None:
        """Continue from ``saved``, the state that `check` returned."""
        raise NotImplementedError


class Content(Protocol):
    """The content of a run's checkpoints. All ranks call its methods together."""

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """Return the state of the run; unless ``gather``, sharded tensors are DTensors."""

    def load_state_dict(self, tree: Mapping[str, Any], strict: bool, ignore: Sequence[str] = ()) -> None:
        """Continue from the state of another run."""

    def check_loaded(self) -> None:
        """Raise RuntimeError if loading failed after some of the state had been loaded."""

    def train_data_is_set(self) -> None:
        """Continue from a position that was loaded before there was training data."""

    def eval_sets_are_made(self) -> None:
        """Continue from positions that were loaded before there were evaluation sets."""

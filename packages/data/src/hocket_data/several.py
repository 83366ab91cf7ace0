"""Several loaders as one source of batches: side by side, in turn or drawn at random."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Literal

from hocket.data.adapters import CombinedLoaders, adapt, as_recorded, prepared, register
from hocket.data.batches import Padding, unpadded
from hocket.data.checks import MODES
from hocket.data.errors import DataError
from hocket.data.loaders import batch_size
from hocket.data.rank_slices import Slices
from hocket.data.source import Position, Source, epoch_owners
from hocket.data.stateful import has_state
from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket_data.combining import Member, Parts, cycle, in_turn, shortest, weighted

Mode = Literal["cycle", "shortest", "in turn", "weighted"]
_SIDE_BY_SIDE = ("cycle", "shortest")


class Several(CombinedLoaders):
    """Several loaders as one: ``train_data=Several({"labelled": a, "unlabelled": b}, "cycle")``.

    A batch is a dict from the loader's name to its batch. In the modes ``"in turn"`` and ``"weighted"`` it has one entry, so
    a Task sees which loader it is from: ``((name, batch),) = batch.items()``.

    Each loader is any data that a Trainer takes, `Several` included, except iterators. It has its own per-rank slices,
    position, worker processes and epochs: ``set_epoch`` receives the number of times that it was iterated before. Every epoch
    begins all loaders anew.

    Args:
        loaders: the loaders by name.
        mode: ``"cycle"``: a batch of each; loaders that have ended begin again, until each has ended once. An epoch has as
            many batches as the longest. ``"shortest"``: a batch of each until the first has ended, as ``zip`` does. ``"in
            turn"``: a batch of one loader after the other; those that have ended are skipped, until all have. An epoch has
            the sum of their batches. ``"weighted"``: a batch of one loader, drawn with ``weights``; a loader that has ended
            begins again. An epoch has ``batches``, or the sum of their batches.
        weights: for ``"weighted"``: positive numbers by loader. They need not sum to 1.
        batches: for ``"weighted"``: number of batches in an epoch.
        named: False for the batch itself instead of ``{name: batch}``, with ``"in turn"`` and ``"weighted"``.
        seed: of the choice in ``"weighted"``, a function of seed and epoch that is identical on all ranks.

    Raises:
        TypeError: the loaders are not in a dict, or one is an iterator, which ends with the first epoch.
        ValueError: an argument does not apply to the mode, or two loaders would disturb each other.

    Example:
        >>> from hocket.data import Several
        >>> list(Several({"labelled": [1, 2], "unlabelled": [10, 20, 30]}, "cycle"))
        [{'labelled': 1, 'unlabelled': 10}, {'labelled': 2, 'unlabelled': 20}, {'labelled': 1, 'unlabelled': 30}]
        >>> list(Several({"a": [1, 2], "b": [10, 20, 30]}, "in turn"))
        [{'a': 1}, {'b': 10}, {'a': 2}, {'b': 20}, {'b': 30}]
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable[Any]],
        mode: Mode | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        batches: int | None = None,
        named: bool = True,
        seed: int = 0,
    ) -> None:
        _check_loaders(loaders)
        if mode is None or mode not in MODES:
            allowed = "; ".join(f"{name!r}: {meaning}" for name, meaning in MODES.items())
            raise WrongValue(f"«mode={mode!r}» is not a mode of Several. Give one of {allowed}.")
        _check_arguments(loaders, mode, weights, batches, named)
        if mode in ("cycle", "weighted"):
            _check_epochs(loaders)
        self.loaders, self.mode = dict(loaders), mode
        self.weights = None if weights is None else {name: float(weights[name]) for name in loaders}
        self.batches, self.named, self.seed = batches, named, seed
        #: The epoch of the next iteration outside of a Trainer; None to count from the last one.
        self.epoch: int | None = None
        self._source: SeveralSource | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in a custom loop."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own_source())

    def __len__(self) -> int:
        """Return the number of batches in an epoch. Raises TypeError if it is unknown."""
        return len(self._own_source())

    def __repr__(self) -> str:
        names = ", ".join(f"{name!r}: {type(loader).__name__}" for name, loader in self.loaders.items())
        given = {"weights": self.weights, "batches": self.batches}
        return f"Several({{{names}}}, {self.mode!r}" + "".join(
            f", {name}={value!r}" for name, value in given.items() if value is not None
        ) + (f", seed={self.seed})" if self.weights else ")")  # fmt: skip

    @property
    def num_workers(self) -> int:
        """Number of worker processes of all loaders."""
        return sum(getattr(loader, "num_workers", 0) for loader in self.loaders.values())

    def global_batches(self, size: int | None) -> dict[str, int | None]:
        """Return the size of each loader's global batches, for the Trainer's ``global_batch=size``.

        Where a batch has all loaders, ``size`` is that of the first one, and those of the others keep their proportion to it.
        Raises ValueError if that is not possible.
        """
        sizes = {name: batch_size(loader) for name, loader in self.loaders.items()}
        if size is None or self.mode not in _SIDE_BY_SIDE or not any(sizes.values()):
            return dict.fromkeys(self.loaders, size)
        first, *_ = known = [each for each in sizes.values() if each is not None]
        if len(known) < len(sizes) or any(size * each % first for each in known):
            raise WrongValue(
                f"«global_batch={size}» is the number of samples of the first loader; the others keep their proportion to it. "
                f"That is not possible with the batch sizes {sizes}. Give a multiple of them, and DataLoaders whose "
                "batch_size can be set; or omit global_batch: then each rank trains on batches of these sizes."
            )
        return {name: size * each // first for name, each in sizes.items() if each is not None}

    def prepared(self, prepare_data: Callable[..., Any], train: bool, global_batch: int | None) -> SeveralSource:
        """Return this rank's slices of all loaders, as the strategy's ``prepare_data`` makes them of each.

        Raises:
            ValueError: an evaluation or prediction would not see every sample once, or ``global_batch`` is not possible.
        """
        if not train and self.mode != "in turn":
            names = ", ".join(f"{name!r}: …" for name in self.loaders)
            raise WrongValue(
                f"Several(…, {self.mode!r}) may repeat or omit samples, and every sample counts once here. Evaluate the "
                f"loaders as sets, «eval_data={{{names}}}», or write Several(…, 'in turn')."
            )
        sizes = self.global_batches(global_batch)
        sources = {
            name: adapt(prepared(loader, prepare_data, train, sizes[name]), given=loader)
            for name, loader in self.loaders.items()
        }
        return SeveralSource(self, sources=sources)

    def _own_source(self) -> SeveralSource:
        if self._source is None:
            self._source = SeveralSource(self)
        return self._source


class SeveralSource:
    """The `hocket.data.Source` of `Several`.

    Args:
        sources: those of the loaders, by name; None to adapt each loader, with a copy of ``slices``.
    """

    kind: ClassVar[str] = "several"
    priority = 100

    def __init__(
        self,
        data: Several,
        slices: Slices | None = None,
        given: Any = None,
        sources: Mapping[str, Source] | None = None,
    ) -> None:
        if sources is None:
            sources = {name: adapt(each, copy.copy(slices)) for name, each in data.loaders.items()}
        self.data = data
        self._members = {name: Member(name, source) for name, source in sources.items()}
        #: The current epoch, the number of batches of it that were yielded, and the loader whose turn it is.
        self._epoch = -1
        self._yielded = self._turn = 0
        self._warned = False
        if data.mode == "weighted" and self.length() is None:
            raise WrongValue(
                "The length of an epoch of Several(…, 'weighted') is unknown, because that of a loader is. Give it in batches: "
                "Several(…, 'weighted', batches=1000)."
            )

    @classmethod
    def serves(cls, data: object) -> bool:
        """Whether this is `Several`."""
        return isinstance(data, Several)

    # --- epochs

    def begin(self, epoch: int | None = None, at: Position | None = None) -> Iterator[Any]:
        """See :meth:`hocket.data.Source.begin`."""
        for member in self._members.values():
            member.numbered = epoch is not None
        if at is None:
            self._epoch = self._epoch + 1 if epoch is None else epoch
            self._yielded = self._turn = 0
            for member in self._members.values():
                member.epochs, member.ended = max(member.epochs, epoch or 0), False
                member.begin()
        else:
            if problem := self.compatible(at):
                raise DataError(problem)
            self._epoch, self._yielded, self._turn = at["epoch"], at["yielded"], at["turn"]
            for each in at["loaders"]:
                self._members[each["name"]].load(each)
        return self._batches()

    def __iter__(self) -> Iterator[Any]:
        """See :meth:`hocket.data.Source.__iter__`."""
        return self.begin(self.data.epoch)

    def _batches(self) -> Iterator[Any]:
        for parts in self._combined():
            for turn, (name, member) in enumerate(self._members.items(), 1):
                if name in parts:
                    member.yielded += 1
                    self._turn = turn % len(self._members)
            self._yielded += 1
            yield self._joined(parts)
        for member in self._members.values():
            member.batches = None  # the rest of a longer loader, with its worker processes

    def _combined(self) -> Iterator[Parts]:
        members, mode = list(self._members.values()), self.data.mode
        if mode == "cycle":
            return cycle(members)
        if mode == "shortest":
            return shortest(members)
        if mode == "in turn":
            return in_turn(members, self._turn)
        assert self.data.weights is not None
        choices = weighted(members, self.data.weights, f"{self.data.seed}/{self._epoch}", self._yielded)
        return islice(choices, len(self) - self._yielded)

    def _joined(self, parts: Parts) -> Any:
        """Return the batch of all loaders. It is padding if this rank has no slice of one of them."""
        padding = [name for name, part in parts.items() if type(part) is Padding]
        batch: Any = {name: unpadded(part)[0] for name, part in parts.items()}
        if not self.data.named:
            (batch,) = batch.values()
        if not padding:
            return batch
        if len(padding) < len(parts) and not self._warned:
            self._warned = True
            warn(
                f"A batch of loader '{padding[0]}' has no slice for this rank, so this rank's slices of the other loaders do "
                "not count in that step: they cannot be separated. Give the loader «drop_last=True», or the strategy "
                "uneven='end'."
            )
        return Padding(batch)

    def close(self) -> None:
        """See :meth:`hocket.data.Source.close`."""
        for member in self._members.values():
            member.source.close()
            member.batches = None

    def length(self) -> int | None:
        """See :meth:`hocket.data.Source.length`."""
        if self.data.batches is not None:
            return self.data.batches
        lengths = [member.source.length() for member in self._members.values()]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return None
        return {"cycle": max, "shortest": min}.get(self.data.mode, sum)(known)

    def __len__(self) -> int:
        """Return the number of batches in an epoch. Raises TypeError if it is unknown."""
        length = self.length()
        if length is None:
            raise WrongType("The number of batches is unknown, because a loader has no length.")
        return length

    # --- positions

    def position(self, batches: int | None = None) -> Position:
        """See :meth:`hocket.data.Source.position`."""
        between = batches is None
        return {
            "kind": self.kind,
            "several": self._described(),
            "batches": self.length(),
            "epoch": self._epoch,
            "yielded": 0 if between else self._yielded,
            "turn": 0 if between else self._turn,
            "loaders": [member.position(between) for member in self._members.values()],
        }

    def restore(self, at: Position) -> None:
        """See :meth:`hocket.data.Source.restore`."""
        if at["kind"] != self.kind:
            return
        self._epoch = at["epoch"]
        for each in at["loaders"]:
            if member := self._members.get(each["name"]):
                member.epochs = each["epochs"]
                member.source.restore(each["position"])

    def compatible(self, at: Position) -> str:
        """See :meth:`hocket.data.Source.compatible`."""
        if at["kind"] != self.kind:
            return (
                f"The checkpoint was taken in the middle of an epoch over data of the kind '{at['kind']}', and now there are "
                "several loaders. Resume with the data that the run began with, or from the end of an epoch."
            )
        then, now = at["several"], self._described()
        if then != now:
            changed = ", ".join(
                f"{name} was {then.get(name)!r}, is {now[name]!r}" for name in now if then.get(name) != now[name]
            )
            return (
                "The checkpoint was taken in the middle of an epoch over several loaders, and they are combined in another way "
                f"now: {changed}. Resume as the run began, or from the end of an epoch."
            )
        for each in at["loaders"]:
            source = as_recorded(self._members[each["name"]].source, each["position"]["kind"])
            if each["in_progress"] and (problem := source.compatible(each["position"])):
                return f"Loader '{each['name']}': {problem}"
        if None not in (at["batches"], self.length()) and at["batches"] != self.length():
            return (
                f"An epoch of several loaders had {at['batches']} batches when the checkpoint was taken, in the middle of one, "
                f"and has {self.length()} now. Resume with the same data and batch sizes."
            )
        return ""

    def changed(self, at: Position) -> list[str]:
        """Return how the data of a position between epochs differs from this data, where the run can continue with it."""
        return [
            f"in loader '{each['name']}' {text}"
            for each in at.get("loaders", ())
            if (member := self._members.get(each["name"])) and hasattr(member.source, "changed")
            for text in member.source.changed(each["position"])
        ]

    def reshare(self, positions: Sequence[Position], ranks: int) -> Position:
        """See :meth:`hocket.data.Source.reshare`."""
        first = positions[0]
        if first["kind"] != self.kind:
            return first
        loaders = []
        for number, each in enumerate(first["loaders"]):
            if member := self._members.get(each["name"]):
                of_ranks = [position["loaders"][number]["position"] for position in positions]
                each = {**each, "position": member.source.reshare(of_ranks, ranks)}
            loaders.append(each)
        return {**first, "loaders": loaders}

    def _described(self) -> dict[str, Any]:
        """Return what must not change within an epoch."""
        data = self.data
        weights = None if data.weights is None else list(data.weights.values())
        return {"loaders": list(data.loaders), "mode": data.mode, "weights": weights, "seed": data.seed}


register(SeveralSource)


def _check_loaders(loaders: object) -> None:
    if not isinstance(loaders, Mapping) or not loaders or not all(isinstance(name, str) for name in loaders):
        raise WrongType(
            f"Several takes a dict of loaders by name, such as Several({{'labelled': a, 'unlabelled': b}}, 'cycle'), not "
            f"{loaders!r}."
        )
    for name, loader in loaders.items():
        if isinstance(loader, Iterator) and not has_state(loader):
            raise WrongType(
                f"Loader '{name}' is an iterator ({type(loader).__name__}), which can be iterated once. Give what it iterates "
                "over, such as the list or the DataLoader itself; «mode='cycle'» begins it again."
            )
        twin = next((other for other, each in loaders.items() if each is loader and other != name), None)
        if twin is not None:
            raise WrongValue(f"Loaders '{name}' and '{twin}' are the same object. Make a loader for each name.")


def _check_arguments(loaders: Any, mode: str, weights: Any, batches: Any, named: bool) -> None:
    weighted = mode == "weighted"
    if not weighted and (weights is not None or batches is not None):
        given = "weights" if batches is None else "batches"
        raise WrongValue(f"{given}= is for «mode='weighted'», and the mode is '{mode}'. Omit it, or give that mode.")
    if weighted and not (
        isinstance(weights, Mapping)
        and weights.keys() == loaders.keys()
        and all(isinstance(weight, int | float) and 0 < weight < float("inf") for weight in weights.values())
    ):
        raise WrongValue(
            f"«mode='weighted'» needs a positive weight for each loader ({', '.join(map(repr, loaders))}), not "
            f"«weights={weights!r}». Give a dict, such as «weights={dict.fromkeys(loaders, 1.0)!r}»."
        )
    if batches is not None and (isinstance(batches, bool) or not isinstance(batches, int) or batches < 1):
        raise WrongValue(
            f"«batches={batches!r}» is not a number of batches. Give a positive int, or «None» for all loaders' sum."
        )
    if not named and mode in _SIDE_BY_SIDE:
        raise WrongValue(
            f"«named=False» is for batches of one loader, and «mode='{mode}'» yields one of each. Omit it."
        )


def _check_epochs(loaders: Mapping[str, Any]) -> None:
    """Raise ValueError if ``set_epoch`` of one loader would reach another one, which is in another epoch."""
    owners: dict[int, str] = {}
    for name, loader in loaders.items():
        for owner in epoch_owners(loader):
            other = owners.setdefault(id(owner), name)
            if other != name:
                raise WrongValue(
                    f"Loaders '{other}' and '{name}' share a {type(owner).__name__}, whose set_epoch is called when either "
                    "begins again. Make one for each, such as hocket.data.seeded(dataset) for each loader."
                )

"""A checkpoint that is copied and written in a thread, while training goes on.

Nobody but an optimizer's step changes parameters and optimizers' state, so they can be copied while the gradients of the next
batch are computed: the loop waits for that before weights change (`FitLoop.settle`). Everything else is copied at once, and so
is all of it where somebody may write to weights before: plug-ins that act in between, or a model whose forward does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket.algorithm import Phase
from hocket.checkpoints.errors import CheckpointError
from hocket.checkpoints.snapshot import Snapshot, Staging
from hocket.distributed.dtensors import local
from hocket.hookspecs import Event

if TYPE_CHECKING:
    from hocket.callback import Callback
    from hocket.plugins.spec import Voice
    from hocket.state import State

#: Why a checkpoint is given up; the run goes on.
WEIGHTS_CHANGED = (
    "weights were written to before the optimizer's step, while they were copied; the next ones are copied at once."
)
_EVENTS = list(Event)
#: Where plug-ins can act between a batch's checkpoint and the next step of the optimizer; and an epoch's, besides.
_AFTER_BATCH = {
    Event.BATCH_CHECKPOINT.value,
    *(e.value for e in _EVENTS[_EVENTS.index(Event.BEFORE_DATALOADER) : _EVENTS.index(Event.AFTER_TRAIN_BATCH) + 1]),
    "gradients", "split_batch", "move_batch", "forward", "loss", "backward", "clip_gradients", "zero_grad",
}  # fmt: skip
_AFTER_EPOCH = {Event.EPOCH_CHECKPOINT.value, Event.EPOCH_START.value}
#: Algorithms of these change samples, losses or gradients.
_NOT_WEIGHTS = (Phase.SELECT, Phase.DATA, Phase.LOSS, Phase.GRADIENT)


class Background:
    """One checkpoint at a time: `start` it, `settle` it before weights change, `join` it.

    Args:
        owner: the plug-in that writes checkpoints.
    """

    def __init__(self, owner: Callback) -> None:
        self._owner = owner
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._copying: _Copying | None = None
        #: Whether weights stay as they are until the optimizer's step; found out after the first checkpoint.
        self._stay: bool | None = None

    def start(self, state: State, snapshot: Snapshot, write: Callable[[Exception | None], None]) -> None:
        """Copy the snapshot, in the thread what may wait, then call ``write`` there, with what went wrong before."""
        sources = [each.tensor for each in snapshot.stored]
        stepped = [] if self._stay is False or self._plugins_write(state) else _stepped(state)
        places = {_address(local(each.detach())) for each in stepped}
        watched = [each for each in sources if _address(each) in places and not each.is_inference()]
        waiting = {id(each) for each in watched} if self._stay else set()
        # Of sharded tensors the whole one has a version, not what this rank holds of it.
        versions = [(each, each._version) for each in [*stepped, *watched] if not each.is_inference()]
        copy_rest = self._staging.copy(snapshot, lambda tensor: id(tensor) in waiting)
        copies = {id(source): each.tensor for source, each in zip(sources, snapshot.stored, strict=True)}
        progress, started = state.progress, state.progress.started
        copying = _Copying([(each, copies[id(each)]) for each in watched], versions, lambda: progress.started > started)

        def run() -> None:
            try:
                copy_rest()
            except Exception as error:
                copying.problem = error
            copying.copied.set()
            if waiting:
                copying.settled.wait()
            write(copying.problem)

        thread = threading.Thread(target=run, name="hocket-checkpoint")
        thread.start()
        self._thread, self._copying = thread, copying if watched else None

    def _plugins_write(self, state: State) -> bool:
        """Whether plug-ins act in between that are not known to leave weights alone."""
        hooks = _AFTER_BATCH if state.timestamp.batch_in_epoch else _AFTER_BATCH | _AFTER_EPOCH
        voices = [voice for hook in hooks for voice in state.bus.listeners(hook) if voice.obj is not self._owner]
        return any(_may_write(voice) for voice in voices)

    def settle(self) -> None:
        """Before weights change: wait for the copy."""
        copying = self._copying
        if copying is None:
            return
        copying.copied.wait()
        changed = any(tensor._version != version for tensor, version in copying.versions)
        if self._stay is None and copying.batch_began():
            self._stay = not changed and all(_same(source, kept) for source, kept in copying.watched)
        elif self._stay and changed:
            self._stay = False
            copying.problem = CheckpointError(WEIGHTS_CHANGED)
        copying.settled.set()
        self._copying = None

    def join(self) -> None:
        """Wait until it is written."""
        self.settle()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


@dataclass(slots=True, eq=False)
class _Copying:
    #: What only optimizers should change, and its copies; versions at the time of the checkpoint.
    watched: list[tuple[Tensor, Tensor]]
    versions: list[tuple[Tensor, int]]
    #: Whether the next batch has.
    batch_began: Callable[[], bool]
    copied: threading.Event = field(default_factory=threading.Event)
    settled: threading.Event = field(default_factory=threading.Event)
    problem: Exception | None = None


def _may_write(voice: Voice) -> bool:
    if voice.kind == "algorithms":
        return voice.obj.phase not in _NOT_WEIGHTS
    return voice.kind == "callbacks" and type(voice.obj).__module__.partition(".")[0] != "hocket"


def _stepped(state: State) -> list[Tensor]:
    """What optimizers' steps change."""
    kept = [value for each in state.optimizers for values in each.state.values() for value in values.values()]
    return [*state.task.parameters(), *(value for value in kept if isinstance(value, Tensor))]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(source: Tensor, kept: Tensor) -> bool:
    """To the last bit."""
    return torch.equal(
        source.cpu().contiguous().view(-1).view(torch.uint8), kept.contiguous().view(-1).view(torch.uint8)
    )

"""Mistakes of a first day: declarations in another form, state saved and not restored, losses and workers of odd values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from newcomers import INPUTS, LABELS, Mistake, fit, model, trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import hocket
from hocket import Event


class Samples(Dataset[Any]):
    """Samples with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], LABELS[index]


class Composed:
    """As torchvision composes transforms."""

    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = transforms


def spawned(evaluated: bool = False, method: str = "spawn", data: Any = None, **options: Any) -> Any:
    made = DataLoader(Samples() if data is None else data, 8, num_workers=1, multiprocessing_context=method, **options)
    return fit(eval_data=made) if evaluated else fit(train_data=made)


def local_data() -> Dataset[Any]:
    class Local(Samples):
        pass

    return Local()


def algorithm(**attributes: Any) -> Any:
    """A Trainer with an algorithm that declares this."""
    members = {"events": {Event.AFTER_LOSS}, "apply": lambda self, event, state: None, **attributes}
    return trainer(algorithms=[type("Mine", (hocket.Algorithm,), members)()])


def saving(base: type = hocket.Callback, argument: str = "callbacks", **members: Any) -> Any:
    """A fit with checkpoints, and a plug-in with these methods."""
    if base is hocket.Algorithm:
        members |= {"events": {Event.AFTER_LOSS}, "apply": lambda self, event, state: None}
    else:
        members |= {"batch_end": lambda self, state: None}
    return fit(**{argument: [type("Mine", (base,), members)()]}, checkpoints="runs/first-day")


class Position(hocket.checkpoints.Component):
    """A component that cannot be loaded."""

    path = "position"

    def state_dict(self, gather: bool) -> Any:
        return {"at": 1}


class SavesOnly(hocket.Task):
    """A task with half of an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])

    def extra_state(self) -> Any:
        return {"n": 1}


class HalfModule(hocket.data.DataModule):
    """Data with half of an extra state."""

    def train(self) -> Any:
        return [(INPUTS, LABELS)]

    def extra_state(self) -> Any:
        return {"n": 1}


def valued(value: Callable[[torch.Tensor], Any], **options: Any) -> Any:
    """Train on a hocket.Loss of this value."""
    return fit(loss=lambda outputs, targets: hocket.Loss(value(F.cross_entropy(outputs, targets)), **options))


def state(self: Any) -> Any:
    return {"n": 1}


def load(self: Any, saved: Any) -> None:
    self.n = saved["n"]


_TOP = "at its top level"
_SET = "a set of members of hocket.Event"
_ALL = "scalar tensor, or a dict of named ones"
_NAMED = "Named losses are scalar tensors"
_BOTH = "checkpoints cannot restore its state"

MISTAKES = [
    Mistake("a lambda as collate_fn", lambda: spawned(collate_fn=lambda samples: default_collate(samples)), "refuses loader.collate_fn, the function", _TOP, "Write def … at the top level"),
    Mistake("a lambda among transforms", lambda: spawned(data=Samples(transform=Composed(abs, lambda x: x))), "refuses loader.dataset.transform.transforms[1], the function", _TOP, "or write num_workers=0"),
    Mistake("a lambda as worker_init_fn", lambda: spawned(worker_init_fn=lambda number: None), "refuses loader.worker_init_fn, the function", _TOP, "Write def"),
    Mistake("a generator in a data set", lambda: spawned(data=Samples(files=(name for name in "ab"))), "refuses loader.dataset.files, an object of the class generator", _TOP, "in worker_init_fn"),
    Mistake("a lock in evaluation data", lambda: spawned(evaluated=True, data=Samples(lock=threading.Lock())), "refuses loader.dataset.lock, an object of the class lock", _TOP, "Make the object where it is used"),
    Mistake("a local class of data", lambda: spawned(method="forkserver", data=local_data()), "started by 'forkserver' get the parts of the loader by pickle, which refuses loader.dataset, an object of the class local_data.<locals>.Local", _TOP, "Define the class"),
    Mistake("events as text", lambda: algorithm(events="after_loss"), "events = 'after_loss'", _SET, "events = {hocket.Event.AFTER_LOSS}"),
    Mistake("events as texts", lambda: algorithm(events=["after_loss", "batch_end"]), "events = ['after_loss', 'batch_end']", _SET, "events = {hocket.Event.AFTER_LOSS, hocket.Event.BATCH_END}"),
    Mistake("one event", lambda: algorithm(events=Event.AFTER_LOSS), "events = <Event.AFTER_LOSS", _SET, "events = {hocket.Event.AFTER_LOSS}"),
    Mistake("an event of Lightning", lambda: algorithm(events="on_train_batch_end"), "events = 'on_train_batch_end'", _SET, "events = {hocket.Event.BATCH_END}"),
    Mistake("before as text", lambda: algorithm(before="ema"), "before = 'ema'", "a set of names of algorithms", "before = {'ema'}"),
    Mistake("conflicts as text", lambda: algorithm(conflicts="mixup"), "conflicts = 'mixup'", "a set of names of algorithms", "conflicts = {'mixup'}"),
    Mistake("a phase as text", lambda: algorithm(phase="loss"), "phase = 'loss'", "a member of hocket.Phase", "phase = hocket.Phase.LOSS"),
    Mistake("needs as text", lambda: algorithm(needs="full_parameters"), "needs = 'full_parameters'", "a member of hocket.Need", "needs = hocket.Need.FULL_PARAMETERS"),
    Mistake("every_batches as a number", lambda: saving(every_batches=10), "every_batches = 10", "numbers of batches by event", "every_batches = {'batch_end': 10}"),
    Mistake("a callback that only saves", lambda: saving(state_dict=state), "Mine defines state_dict() and no load_state_dict()", _BOTH, "def load_state_dict(self, state) too"),
    Mistake("a callback that only loads", lambda: saving(load_state_dict=load), "Mine defines load_state_dict() and no state_dict()", _BOTH, "def state_dict(self) too"),
    Mistake("an algorithm that only saves", lambda: saving(hocket.Algorithm, "algorithms", state_dict=state), "Algorithm 'mine': Mine defines state_dict()", _BOTH, "def load_state_dict(self, state) too"),
    Mistake("a logger that only saves", lambda: saving(hocket.Logger, "loggers", state_dict=state), "Logger 'mine': Mine defines state_dict()", _BOTH, "def load_state_dict(self, state) too"),
    Mistake("a callback without a base that only saves", lambda: saving(object, state_dict=state), "Mine defines state_dict()", _BOTH, "def load_state_dict(self, state) too"),
    Mistake("a component that only saves", lambda: saving(checkpoint_components=lambda self, state: [Position()]), "Callback 'mine': Position defines state_dict()", _BOTH, "def load_state_dict(self, state) too"),
    Mistake("a task that only saves", lambda: fit(model=SavesOnly(), loss=None, checkpoints="runs/first-day"), "SavesOnly defines extra_state() and no load_extra_state()", _BOTH, "def load_extra_state(self, state) too"),
    Mistake("a data module that only saves", lambda: hocket.Trainer(model(), data=HalfModule(), loss="cross_entropy", checkpoints="runs/first-day"), "HalfModule defines extra_state() and no load_extra_state()", _BOTH, "def load_extra_state(self, state) too"),
    Mistake("a hocket.Loss of a nested dict", lambda: valued(lambda loss: {"a": {"b": loss}}), "The loss named 'a' is dict", _NAMED, "{'a/b': …}"),
    Mistake("a hocket.Loss of a tuple", lambda: valued(lambda loss: (loss, loss)), "The value of a hocket.Loss is tuple", _ALL, "name them: {'a': a, 'b': b}"),
    Mistake("a hocket.Loss of a number", lambda: valued(lambda loss: loss.item()), "The value of a hocket.Loss is float", _ALL, "without .item()"),
    Mistake("a hocket.Loss of None", lambda: valued(lambda loss: None), "The value of a hocket.Loss is NoneType", _ALL, "return loss"),
    Mistake("a hocket.Loss of a hocket.Loss", lambda: valued(hocket.Loss), "The value of a hocket.Loss is Loss", _ALL, "Return that Loss itself"),
    Mistake("parts of numbers", lambda: valued(lambda loss: loss, parts={"a": 1.0}), "parts= of a hocket.Loss has 'a', which is float", _NAMED, "state.log({'a': value})"),
    Mistake("parts in a list", lambda: valued(lambda loss: loss, parts=[1.0]), "parts= of a hocket.Loss is list", _NAMED, "parts={'a': a, 'b': b}"),
    Mistake("a metric made of a number", lambda: fit(metrics={"a": lambda: 3.0}, eval_data=[(INPUTS, LABELS)]), "Metric 'a' (float)", "update, compute and reset", "MulticlassAccuracy(10)"),
]  # fmt: skip

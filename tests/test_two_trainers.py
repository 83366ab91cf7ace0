"""Two Trainers in one process do not notice each other."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import weights
from torch.nn import functional as F

import hocket
from hocket import plugins
from hocket.basics.seeding import RandomStream
from hocket.hookspecs.attachment import Attachment
from hocket.loggers.memory import MemoryLogger
from hocket.precision.bf16 import BF16
from hocket.strategies.single import SingleDevice


def make(data: Any, model: Any, seed: int) -> hocket.Trainer:
    """With everything that draws random numbers; loaders without a generator of their own."""
    loader = torch.utils.data.DataLoader(data().dataset, 16, shuffle=True)
    return hocket.Trainer(
        model=model(dropout=0.3),
        loss=F.cross_entropy,
        train_data=loader,
        eval_data={"test": data(20)},
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        schedule="cosine",
        duration="3ep",
        eval_every="4ba",
        algorithms=["ema", "label-smoothing", "sam"],
        seed=seed,
    )


def test_alternating_fits_end_with_the_weights_each_has_alone(data, model) -> None:
    alone = []
    for seed in (1, 2):
        trainer = make(data, model, seed)
        trainer.fit()
        alone.append(weights(trainer))
    first, second = make(data, model, 1), make(data, model, 2)
    for _ in range(9):
        first.fit("2ba")
        torch.rand(3)  # what the process draws in between does not matter either
        second.fit("2ba")
    for trainer, expected in zip((first, second), alone, strict=True):
        assert trainer.state.timestamp.batch == 18
        assert all(torch.equal(a, b) for a, b in zip(weights(trainer), expected, strict=True))


def test_a_seed_leaves_the_callers_random_numbers_alone(data, model) -> None:
    torch.manual_seed(9)
    expected = torch.rand(4)
    torch.manual_seed(9)
    make(data, model, 1).fit()
    assert torch.equal(torch.rand(4), expected)


def test_every_seed_works(data, model) -> None:
    """composer.md 3.2: seed 2**32 - 1 with a rank added was an error."""
    make(data, model, 2**32 - 1).fit("1ba")
    stream = RandomStream(2**32 - 1, rank=3)
    with stream:
        torch.rand(1)


def test_trainers_share_no_plugins(data, model) -> None:
    first, second = make(data, model, 1), make(data, model, 2)
    assert not {attachment.obj for attachment in first.state.bus.attachments} & {
        attachment.obj for attachment in second.state.bus.attachments
    }


# --- one instance


class Counts(hocket.Callback):
    """Counts batches."""

    batches = 0

    def batch_end(self, state: hocket.State) -> None:
        self.batches += 1


def quick(data: Any, model: Any, **arguments: Any) -> hocket.Trainer:
    return hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(), optimizer="sgd(lr=0.1)", duration="1ba", **arguments
    )


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("callbacks", Counts),
        ("loggers", MemoryLogger),
        ("algorithms", lambda: plugins.get("algorithms", "ema")(smoothing=0.9)),
        ("strategy", SingleDevice),
        ("precision", BF16),
    ],
)
@pytest.mark.filterwarnings("ignore:EMA averages nothing")
@pytest.mark.parametrize("before", ["new", "fitted", "closed", "collected"])
def test_an_instance_belongs_to_one_trainer(data, model, argument: str, make: Any, before: str) -> None:
    plugin = make()
    given = [plugin] if argument.endswith("s") else plugin
    first: hocket.Trainer | None = quick(data, model, run_name="fold-1", **{argument: given})
    if before == "fitted":
        first.fit()
    elif before == "closed":
        first.close()
    elif before == "collected":
        first = None
    one = rf"{argument}=\[?{type(plugin).__name__}\(…\)"
    with pytest.raises(
        plugins.PluginError, match=rf"belongs to another Trainer \(run 'fold-1'\).*{one}.*or give its name"
    ):
        quick(data, model, **{argument: given})


def test_an_instance_may_be_tried_again_and_copied(data, model) -> None:
    """A constructor that raised leaves nothing behind; copies, classes, names and configurations are new each time."""
    plugin = Counts()
    with pytest.raises(ValueError, match="clip_gradients"):
        quick(data, model, callbacks=[plugin], clip_gradients=-1.0)
    trainer = quick(data, model, callbacks=[plugin, Counts, "lr-monitor", {"speed-monitor": {"every": "1ba"}}])
    trainer.fit()
    trainer.fit("1ba")
    assert plugin.batches == 2
    quick(data, model, callbacks=[copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin)), Counts]).fit()
    assert plugin.batches == 2


def test_an_instance_is_given_once(data, model) -> None:
    plugin = Counts()
    with pytest.raises(plugins.PluginError, match="is one Counts that is given twice"):
        quick(data, model, callbacks=[plugin, plugin])


def test_the_memory_of_an_instance_is_not_kept(data, model) -> None:
    """Nor does a new object in its place count as the old one."""
    plugin = Counts()
    quick(data, model, callbacks=[plugin])
    gone = weakref.ref(plugin)
    del plugin
    gc.collect()
    assert gone() is None
    for _ in range(20):
        quick(data, model, callbacks=[Counts()])


class InThreads(hocket.Callback):
    """Calls functions in a thread each, in the middle of a fit."""

    def __init__(self, *functions: Any) -> None:
        self._functions = functions

    def batch_end(self, state: hocket.State) -> None:
        if state.timestamp.batch == 2:
            for function in self._functions:
                with ThreadPoolExecutor(1) as pool:
                    error = pool.submit(function).exception()
                assert isinstance(error, RuntimeError)
                assert re.search(
                    "Sequential .run .* cannot be made, fitted.*in thread 'MainThread'.*Process", str(error)
                )


def test_a_trainer_in_another_thread_is_refused_while_one_computes(data, model) -> None:
    alone = make(data, model, 1)
    alone.fit()
    other = make(data, model, 1)
    batches = list(data())
    calls = [other.fit, lambda: other.evaluate(batches), lambda: other.predict(batches), lambda: make(data, model, 1)]
    watched = make(data, model, 1)
    watched.state.bus.attach(Attachment("callbacks", "in-threads", InThreads(*calls)))
    watched.fit()
    with ThreadPoolExecutor(1) as pool:  # one after another
        pool.submit(other.fit).result()
    for trainer in (watched, other):
        assert all(map(torch.equal, weights(trainer), weights(alone)))


def test_a_trainer_within_another_is_allowed(data, model) -> None:
    alone, outer, inner = make(data, model, 1), make(data, model, 1), make(data, model, 2)
    alone.fit()

    class Inner(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            inner.fit("1ba")

    outer.state.bus.attach(Attachment("callbacks", "inner", Inner()))
    outer.fit("4ba")
    outer.fit()
    assert all(map(torch.equal, weights(outer), weights(alone)))

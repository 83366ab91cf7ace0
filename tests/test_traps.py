"""Faults that were found by running the peers, each with a test that hocket does the right thing.

Those of one algorithm or one part are tested with it: S16 and clipping in ``test_clipping.py``, S17 in ``test_blurpool.py``,
S18 in ``test_time.py``, S19 in ``test_schedules.py``, S9 to S11, S23 and S25 in ``test_evaluation.py``, S7, S8 and 2.2-n in
``test_training.py``, S26 and 2.2-b in ``test_exactness.py``, 2.2-g and 2.2-h in ``test_bad_input.py``, 2.2-j in
``test_event_order.py``, 2.2-o in ``test_ddp_training.py``.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from support import sgd
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import hocket
from hocket import Event, Phase, plugins


def test_what_selects_acts_before_what_changes(data, model) -> None:
    """S6: selection that the user named first was undone by data algorithms that ran in reverse."""
    ran: list[str] = []

    def make(name: str, phase: Phase) -> hocket.Algorithm:
        def apply(self: Any, event: Event, state: hocket.State) -> None:
            ran.append(name)

        return type(name, (hocket.Algorithm,), {"events": {Event.AFTER_DATALOADER}, "phase": phase, "apply": apply})()

    for order in (1, -1):
        algorithms = [make("Select", Phase.SELECT), make("Change", Phase.DATA)][::order]
        hocket.Trainer(
            model=model(),
            loss=F.cross_entropy,
            train_data=data(8),
            optimizer=sgd,
            duration="1ba",
            algorithms=algorithms,
        ).fit()
    assert ran == ["Select", "Change"] * 2


def test_paired_work_nests(data, model) -> None:
    """What is opened last is closed first."""
    ran: list[str] = []

    def make(name: str) -> hocket.Algorithm:
        def apply(self: Any, event: Event, state: hocket.State) -> None:
            ran.append(f"{name} {event.value}")

        events = {Event.BEFORE_LOSS, Event.AFTER_LOSS}
        return type(name, (hocket.Algorithm,), {"events": events, "phase": Phase.LOSS, "apply": apply})()

    hocket.Trainer(
        model=model(),
        loss=F.cross_entropy,
        train_data=data(8),
        optimizer=sgd,
        duration="1ba",
        algorithms=[make("A"), make("B")],
    ).fit()
    assert ran == ["A before_loss", "B before_loss", "B after_loss", "A after_loss"]


@pytest.mark.filterwarnings("ignore:EMA averages nothing")
def test_lists_of_the_user_are_not_changed(data, model) -> None:
    """Lightning 2.2-d: the Trainer added to the list of callbacks that it was given."""
    callbacks, loggers, algorithms = ["lr-monitor"], ["memory"], ["ema"]
    hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(8), optimizer=sgd, duration="1ba", callbacks=callbacks,
        loggers=loggers, algorithms=algorithms,
    ).fit()  # fmt: skip
    assert (callbacks, loggers, algorithms) == (["lr-monitor"], ["memory"], ["ema"])


def test_an_error_while_cleaning_up_does_not_hide_the_first(data, model) -> None:
    """Lightning 2.2-i: a callback raising in on_exception hid the error, and the other callbacks did not run."""
    heard: list[str] = []

    class Bad(hocket.Callback):
        def exception(self, state: hocket.State) -> None:
            raise OSError("cannot write the report")

        def close(self, state: hocket.State) -> None:
            raise OSError("cannot close")

    class Good(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            raise ValueError("the first error")

        def exception(self, state: hocket.State) -> None:
            heard.append(str(state.exception))

        def close(self, state: hocket.State) -> None:
            heard.append("close")

    trainer = hocket.Trainer(
        model=model(),
        loss=F.cross_entropy,
        train_data=data(8),
        optimizer=sgd,
        duration="1ba",
        callbacks=[Bad(), Good()],
    )
    with pytest.raises(ValueError, match="the first error") as raised:
        trainer.fit()
    assert heard == ["the first error", "close"]
    notes = "".join(raised.value.__notes__)
    assert "cannot write the report" in notes and "cannot close" in notes and "'bad'" in notes
    trainer.state.bus.detach(
        next(attachment for attachment in trainer.state.bus.attachments if attachment.name == "bad")
    )


def test_a_plugin_that_was_detached_is_not_closed_with_the_trainer(data, model) -> None:
    heard: list[str] = []

    class Closing(hocket.Callback):
        def close(self, state: hocket.State) -> None:
            heard.append("close")

    for detached in (False, True):
        heard.clear()
        trainer = hocket.Trainer(model=model(), loss=F.cross_entropy, optimizer=sgd, callbacks=[Closing()])
        if detached:
            trainer.state.bus.detach(next(v for v in trainer.state.bus.attachments if isinstance(v.obj, Closing)))
        del trainer
        gc.collect()
        assert heard == [] if detached else heard == ["close"]


def test_any_callback_sees_what_was_measured(data, model) -> None:
    """Lightning 2.2-m: only subclasses of one class saw a metric at the end of an epoch; others saw None."""
    seen: list[Any] = []

    class Monitor(hocket.Callback):
        def epoch_end(self, state: hocket.State) -> None:
            seen.append(state.metrics["train/accuracy"])

        def eval_end(self, state: hocket.State) -> None:
            seen.append(state.metrics["eval/loss"])

    class Accuracy:
        def update(self, outputs: Any, targets: Any) -> None: ...
        def reset(self) -> None: ...
        def compute(self) -> float:
            return 0.5

    hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(8), eval_data=data(8), optimizer=sgd, duration="1ep",
        callbacks=[Monitor()], train_metrics={"accuracy": Accuracy()},
    ).fit()  # fmt: skip
    assert seen[0] == 0.5 and seen[1] > 0


def test_a_short_epoch_is_logged(data, model) -> None:
    """Lightning 2.2-q: nothing was written when an epoch had fewer batches than the logging interval."""
    logger = plugins.get("loggers", "memory")()
    hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(8), optimizer=sgd, duration="2ep", log_every="100ba",
        loggers=[logger], callbacks=["lr-monitor"],
    ).fit()  # fmt: skip
    assert [batch for batch, _ in logger.metrics["train/loss"]] == [1, 2]
    assert [batch for batch, _ in logger.metrics["lr/group0"]] == [1, 2]


@pytest.mark.parametrize("made", ["None", "(1, 2)", "1 / 0", "Broken"])
def test_a_broken_plug_in_harms_nobody(data, model, tmp_path, monkeypatch, made) -> None:
    """Lightning 2.2-r: an entry point that failed, or gave something else, broke every Trainer in the environment."""
    module = f"broken_{abs(hash(made))}"
    info = tmp_path / "broken_thing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-thing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hocket.v1.callbacks]\nbroken-thing = {module}:Broken\n")
    (tmp_path / f"{module}.py").write_text("" if made == "Broken" else f"Broken = {made}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.refresh()
    try:
        assert "broken-thing" in plugins.names("callbacks")
        build = {"model": model(), "loss": F.cross_entropy, "train_data": data(8), "optimizer": sgd, "duration": "1ba"}
        assert hocket.Trainer(**build, callbacks=["lr-monitor"]).fit().timestamp.batch == 1
        with pytest.raises((plugins.PluginError, TypeError), match="broken-thing"):
            hocket.Trainer(**build, callbacks=["broken-thing"])
    finally:
        plugins.refresh()


class Failing(Dataset[Any]):
    """Fails at one sample."""

    bad: int | None = 20

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError("unreadable sample")
        return torch.zeros(8), 1


@pytest.mark.parametrize("persistent", [False, True])
def test_an_exception_leaves_the_process_clean(model, persistent) -> None:
    """Workers end, threads too; the caller's random numbers are as they were, and a later fit may follow."""
    data = Failing()
    loader = DataLoader(data, 4, num_workers=2, persistent_workers=persistent)
    trainer = hocket.Trainer(
        model=model(dropout=0.5), loss=F.cross_entropy, train_data=loader, optimizer=sgd, duration="1ep", seed=1,
        loggers=["jsonl"],
    )  # fmt: skip
    threads = set(threading.enumerate())
    torch.manual_seed(5)
    with pytest.raises(OSError, match="unreadable sample"):
        trainer.fit()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(state, torch.get_rng_state())
    gc.collect()
    assert not torch.multiprocessing.active_children()
    started = set(threading.enumerate()) - threads
    for thread in started:  # queues that are closed end their feeders without waiting for them
        thread.join(10)
    assert not [thread.name for thread in started if thread.is_alive()]
    data.bad = None  # a fit continues with the batch that could not be read
    assert trainer.fit("3ba").timestamp.batch == 8, "five before the bad sample, three more"
    trainer.close()
    assert not torch.multiprocessing.active_children()


def test_closing_may_come_twice_and_before_anything(model) -> None:
    trainer = hocket.Trainer(model=model(), loss=F.cross_entropy, loggers=["jsonl", "progress", "console"])
    trainer.close()
    trainer.close()

"""The recorded sequence of events is the table of docs/reference/events.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import sgd
from torch.nn import functional as F

import hocket
from hocket import Event
from hocket.hookspecs import Events

PAGE = Path(__file__).parent.parent / "docs/reference/events.md"


def unrolled(lines: list[str]) -> list[str]:
    """The events that a table with ``× n`` stands for."""
    events: list[str] = []
    while lines:
        line = lines.pop(0)
        indent = len(line) - len(line.lstrip())
        if repeated := re.fullmatch(r"\s*× (\d+)", line):
            block = []
            while lines and len(lines[0]) - len(lines[0].lstrip()) > indent:
                block.append(lines.pop(0))
            events += unrolled(block) * int(repeated[1])
        else:
            events.append(line.strip())
    return events


def table() -> list[str]:
    return unrolled(PAGE.read_text().split("```")[1].strip("\n").splitlines())


def recorder() -> tuple[hocket.Callback, list[str], list[Any]]:
    """A callback that listens to every event there is."""
    heard: list[str] = []
    seen: list[Any] = []

    def listen(event: Event) -> Any:
        def method(self: Any, state: hocket.State) -> None:
            heard.append(event.value)
            seen.append((event, state.timestamp.copy(), state.previous.copy()))

        return method

    kind = type("Recorder", (hocket.Callback,), {event.value: listen(event) for event in Event})
    return kind(), heard, seen


def test_every_event_is_a_hook_in_the_same_order() -> None:
    assert [event.value for event in Event] == [name for name in vars(Events) if not name.startswith("_")]


def test_the_recorded_sequence_is_the_documented_one(data, model) -> None:
    callback, heard, _ = recorder()
    with hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(12, 4), eval_data=data(8, 4), optimizer=sgd, duration="2ep",
        microbatch=2, callbacks=[callback],
    ) as trainer:  # fmt: skip
        trainer.fit()
    assert heard == table()


def test_the_table_is_composers_without_iterations() -> None:
    """composer.md 1.4, observed there; hocket's own are init to before_fit, after_fit and close."""
    microbatch = ["before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"]
    batch = [
        "before_dataloader",
        "after_dataloader",
        "batch_start",
        "before_train_batch",
        *microbatch * 2,
        "after_train_batch",
    ]
    batch += ["batch_end", "batch_checkpoint"]
    evaluated = ["eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"]
    evaluation = ["eval_before_all", "eval_start", *evaluated * 2, "eval_end", "eval_after_all"]
    epoch = ["epoch_start", *batch * 3, "before_dataloader", "epoch_end", *evaluation, "epoch_checkpoint"]
    assert table()[4:-2] == ["fit_start", *epoch * 2, "fit_end"]


def test_timestamps_move_before_the_events_that_end(data, model) -> None:
    callback, _, seen = recorder()
    hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(12, 4), optimizer=sgd, duration="2ep", callbacks=[callback]
    ).fit()
    ends = [(now.batch, now.batch_in_epoch, before.batch) for event, now, before in seen if event is Event.BATCH_END]
    assert ends == [(1, 1, 0), (2, 2, 1), (3, 3, 2), (4, 1, 3), (5, 2, 4), (6, 3, 5)]
    epochs = [(now.epoch, now.batch_in_epoch, before.epoch) for event, now, before in seen if event is Event.EPOCH_END]
    assert epochs == [(1, 0, 0), (2, 0, 1)]


def test_a_fit_that_stops_inside_an_epoch_is_continued_there(data, model) -> None:
    callback, heard, _ = recorder()
    trainer = hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=data(12, 4), optimizer=sgd, callbacks=[callback], duration="2ep"
    )
    trainer.fit("2ba")
    assert heard.count("epoch_start") == 1 and "epoch_end" not in heard
    trainer.fit("1ba")
    assert heard.count("epoch_start") == 1 and heard.count("epoch_end") == 1, "the stop coincides with the loader's end"
    trainer.fit()
    assert heard.count("epoch_start") == heard.count("epoch_end") == 2


def test_evaluate_and_predict_have_events_of_their_own(data, model) -> None:
    callback, heard, _ = recorder()
    trainer = hocket.Trainer(model=model(), loss=F.cross_entropy, callbacks=[callback])
    heard.clear()
    trainer.evaluate(data(4, 4))
    block = [
        "eval_before_all",
        "eval_start",
        "eval_batch_start",
        "eval_before_forward",
        "eval_after_forward",
        "eval_batch_end",
    ]
    assert heard == ["eval_standalone_start", *block, "eval_end", "eval_after_all", "eval_standalone_end"]
    heard.clear()
    trainer.predict([torch.randn(4, 8)])
    block = ["predict_batch_start", "predict_before_forward", "predict_after_forward", "predict_batch_end"]
    assert heard == ["predict_start", *block, "predict_end"]


@pytest.mark.parametrize(
    "event", [e for e in Event if e.value in table() and e is not Event.CLOSE and e.value != "init"]
)
def test_an_exception_on_any_event_closes(data, model, event) -> None:
    callback, heard, _ = recorder()
    error = RuntimeError("stop here")

    def fail(self: Any, state: hocket.State) -> None:
        raise error

    failing = type("Failing", (hocket.Callback,), {event.value: fail})()
    with pytest.raises(RuntimeError, match="stop here") as raised:
        hocket.Trainer(
            model=model(), loss=F.cross_entropy, train_data=data(8, 4), eval_data=data(8, 4), optimizer=sgd, duration="1ep",
            callbacks=[failing, callback],
        ).fit()  # fmt: skip
    assert heard[-2:] == ["exception", "close"]
    assert f"'failing' in {event.value}" in "".join(raised.value.__notes__)

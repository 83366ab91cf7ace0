"""Events as methods of a Task: called like those of a callback, between algorithms and callbacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.basics.plugin_errors import PlanError
from hocket.hookspecs import Event


class Net(hocket.Task):
    """A linear model; `recording` adds methods to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: list[str] = []

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(batch)

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return outputs.square().mean()


def recording(*names: str, base: type[Net] = Net) -> Any:
    """Return a task that records the events of these names."""

    def method(name: str) -> Any:
        def record(self: Any, state: hocket.State) -> None:
            self.seen.append(name)

        return record

    return type("Recording", (base,), {name: method(name) for name in names})()


class Recorder(hocket.Callback):
    """Record all events."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        for event in Event:
            vars(self)[event.value] = lambda state, name=event.value: self.seen.append(name)


def trainer(model: nn.Module, folder: Path, **options: Any) -> hocket.Trainer:
    torch.manual_seed(1)
    given = {"train_data": [torch.randn(4, 2) for _ in range(3)], "optimizer": "sgd(lr=0.1)", "duration": "2ep"}
    return hocket.Trainer(model=model, device="cpu", folder=folder, **{**given, **options})


def test_no_method_of_a_task_has_the_name_of_an_event() -> None:
    assert [event.value for event in Event if hasattr(hocket.Task, event.value)] == []


def test_a_task_gets_the_events_that_a_callback_gets(tmp_path: Path) -> None:
    task, callback = recording(*(event.value for event in Event)), Recorder()
    with trainer(task, tmp_path, callbacks=[callback], eval_data=[torch.randn(4, 2)], microbatch=2) as made:
        made.fit()
        made.evaluate()
        made.predict([torch.randn(4, 2)])
    assert task.seen == callback.seen
    assert set(task.seen) == {event.value for event in Event} - {"exception"}


def test_a_task_comes_after_algorithms_and_before_callbacks(tmp_path: Path) -> None:
    order: list[str] = []

    class Swap(hocket.Algorithm):
        """An algorithm."""

        events = {Event.BATCH_START, Event.BATCH_END}

        def apply(self, event: Event, state: hocket.State) -> None:
            order.append("algorithm")

    class Watch(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            order.append("callback")

    class Mine(Net):
        def batch_end(self, state: hocket.State) -> None:
            order.append("task")

    made = trainer(Mine(), tmp_path, algorithms=[Swap()], callbacks=[Watch()], duration="1ba")
    made.fit()
    assert order == ["algorithm", "algorithm", "task", "callback"]
    assert made.plan().events["batch_end"] == ("swap", "Mine", "watch")


def test_a_method_logs_requests_and_changes_the_task(tmp_path: Path) -> None:
    class Mine(Net):
        def epoch_start(self, state: hocket.State) -> None:
            state.log({"temperature": 1 / (1 + state.timestamp.epoch)})

        def epoch_end(self, state: hocket.State) -> None:
            if state.timestamp.epoch == 2:
                state.request(hocket.Decision.STOP, reason="enough")

    result = trainer(Mine(), tmp_path, duration="5ep", log_every="1ep").fit()
    assert result.history["temperature"] == [1.0, 0.5]
    assert result.timestamp.epoch == 2


def test_an_exception_names_the_method(tmp_path: Path) -> None:
    class Mine(Net):
        def batch_end(self, state: hocket.State) -> None:
            raise KeyError("lost")

    with pytest.raises(KeyError) as caught:
        trainer(Mine(), tmp_path).fit()
    assert "Raised by task 'Mine' in batch_end." in caught.value.__notes__


@pytest.mark.parametrize("signature", ["self", "self, epoch", "self, state, epoch", "self, state=None, *rest"])
def test_other_arguments_are_an_error(signature: str, tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec(f"def init({signature}): pass", scope)
    task = type("Mine", (Net,), {"init": scope["init"]})()
    with pytest.raises(TypeError, match=re.escape("Define def init(self, state), or give the method another name")):
        trainer(task, tmp_path)


def test_a_part_by_the_name_of_an_event_is_no_method(tmp_path: Path) -> None:
    task = Net()
    task.exception = nn.Linear(2, 1)
    made = trainer(task, tmp_path)
    made.fit()
    assert "task" not in {each.kind for each in made.state.bus.attachments}


def test_the_methods_of_a_plain_module_are_not_called(tmp_path: Path) -> None:
    class Plain(nn.Linear):
        def epoch_start(self, state: hocket.State) -> None:
            raise AssertionError("a plain module has no events")

    data = [(torch.randn(4, 2), torch.randn(4, 1))]
    trainer(Plain(2, 1), tmp_path, loss=nn.MSELoss(), train_data=data).fit()


def test_events_of_the_forward_pass_are_refused_where_loss_functions_compute_it(tmp_path: Path) -> None:
    class Steps(Net):
        def train_batch(self, batch: Tensor, step: Any) -> None:
            step(self.mine, batch)

        def mine(self, batch: Tensor) -> Tensor:
            return self.loss(self(batch), batch)

    with pytest.raises(PlanError, match=re.escape("Task 'Recording' acts on after_forward")):
        trainer(recording("after_forward", base=Steps), tmp_path).fit()
    task = recording("after_loss", "batch_end", base=Steps)
    trainer(task, tmp_path, duration="1ba").fit()
    assert task.seen == ["after_loss", "batch_end"]


def test_events_of_microbatches_are_refused_where_a_strategy_has_none(tmp_path: Path) -> None:
    class Engine(hocket.Strategy):
        microbatch_events = False

    with pytest.raises(PlanError, match=r"Task 'Recording' acts on after_backward.*Remove these methods"):
        trainer(recording("after_backward"), tmp_path, strategy=Engine())


def test_a_resumed_run_calls_them_on(tmp_path: Path) -> None:
    class Mine(Net):
        def __init__(self) -> None:
            super().__init__()
            self.epochs = 0

        def epoch_start(self, state: hocket.State) -> None:
            self.epochs += 1

        def extra_state(self) -> int:
            return self.epochs

        def load_extra_state(self, state: int) -> None:
            self.epochs = state

    trainer(Mine(), tmp_path, checkpoints=tmp_path / "saved", duration="1ep").fit()
    task = Mine()
    trainer(task, tmp_path, checkpoints=tmp_path / "saved", resume="auto", duration="3ep").fit()
    assert task.epochs == 3

"""Steps of a task's own, attributes that nobody reads, and names of other libraries in places of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from newcomers import Mistake, fit, loader, trainer
from torch import Tensor, nn

import hocket

DATA = [torch.ones(8, 3)] * 3


class Two(hocket.Task):
    """Two layers; what ``train_batch`` does is given."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)
        self.body = body
        self.kept: Any = None

    def train_batch(self, batch: Tensor, step: Any) -> Any:
        return self.body(self, batch, step)

    def loss_a(self, batch: Tensor) -> Tensor:
        return self.a(batch).square().mean()

    def loss_b(self, batch: Tensor) -> Tensor:
        return self.b(batch).square().mean()

    def in_place(self, batch: Tensor) -> Tensor:
        return self.a(batch.mul_(10)).square().mean()

    def carried(self, batch: Tensor) -> Tensor:
        self.kept = self.a(batch) if self.kept is None else self.a(batch) + self.kept
        return self.kept.square().mean()

    def named(self, batch: Tensor) -> Any:
        return {"Total": self.loss_a(batch), "first": self.loss_a(batch)}


class Swapped(Two):
    def train_batch(self, step: Any, batch: Tensor) -> Any:
        step(self.loss_a, batch)


class Sized(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(batch)

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return outputs.square().mean()

    def count(self, batch: Tensor) -> Any:
        return batch.shape


def steps(body: Callable[..., Any], task: type[Two] = Two) -> Callable[[], Any]:
    given = {"a": "sgd(lr=0.1)", "b": "sgd(lr=0.1)"}
    return lambda: trainer(model=task(body), loss=None, train_data=DATA, optimizer=given).fit()


def without_gradients(task: Any, batch: Tensor, step: Any) -> None:
    with torch.no_grad():
        step(task.loss_a, batch, "a")


def assign(name: str, value: Any) -> Callable[[], Any]:
    return lambda: setattr(trainer(), name, value)


class Stops(hocket.Callback):
    def epoch_end(self, state: Any) -> None:
        state.stop_training = True


class Returns(hocket.Callback):
    def epoch_end(self, state: Any) -> Any:
        return hocket.Decision.STOP


class ReturnsFalse(hocket.Callback):
    def batch_end(self, state: Any) -> Any:
        if state.timestamp.batch > 1:
            return False
        return None


def batch_of_none() -> Any:
    return trainer(model=Sized(), loss=None, train_data=DATA).fit()


MISTAKES = [
    Mistake("train_batch(step, batch)", steps(lambda task, batch, step: None, Swapped), "(step, batch) in another order", "(batch, step)", "Define def train_batch(self, batch, step)"),
    Mistake("the optimizer of another loss", steps(lambda task, batch, step: step(task.loss_b, batch, "a")), "In a step of 'a' the parameters of 'b' require no gradient", "b.weight", "step(…, 'a', 'b')"),
    Mistake("step under no_grad", steps(without_gradients), "under torch.no_grad()", "no loss has a gradient", "outside of that block"),
    Mistake("step.backward", steps(lambda task, batch, step: step.backward(task.loss_a(batch))), "Steps has no 'backward'", "it has any, batch", "step(loss_function, batch)"),
    Mistake("step.batch_idx", steps(lambda task, batch, step: step.batch_idx), "no 'batch_idx'", "it has any, batch", "Write step.batch"),
    Mistake("self.optimizers()", steps(lambda task, batch, step: task.optimizers()), "'optimizers' belongs to Lightning", "train_batch(self, batch, step)", "step(loss_function, batch)"),
    Mistake("a graph kept on self", steps(lambda task, batch, step: step(task.carried, batch)), "used again with its graph", "carry=", "hidden.detach()"),
    Mistake("'Total'", steps(lambda task, batch, step: step(task.named, batch)), "a dict of 'Total', 'first'", "added up", "call it 'total'"),
    Mistake("a batch changed in place", steps(lambda task, batch, step: step(task.in_place, batch)), "changed a tensor of its batch in place", "other values", "x = x * 10"),
    Mistake("backward alone", steps(lambda task, batch, step: task.loss_a(batch).backward()), "computed gradients and called no step", "in a loss function", "by_hand.step()"),
    Mistake("an optimizer by number", steps(lambda task, batch, step: step(task.loss_a, batch, 0)), "given int as the name", "'a', 'b'", "step(loss_function, batch, 'optimizer'"),
    Mistake("count of a shape", batch_of_none, "returned torch.Size([8, 3])", "the number of samples", "len(batch[0])"),
    Mistake("a schedule of a misspelt optimizer", lambda: trainer(optimizer={"layer": "sgd(lr=0.1)"}, model=Sized(), loss=None, schedule={"layers": "cosine"}), "'layers'", "there is 'layer'", "Write 'layer'"),
    Mistake("a decision that is returned", lambda: fit(callbacks=[Returns()]), "returns STOP from epoch_end()", "events return nothing", "state.request(hocket.Decision.STOP"),
    Mistake("False from a callback", lambda: fit(callbacks=[ReturnsFalse()]), "returns False from batch_end()", "events return nothing", "state.request(hocket.Decision.STOP"),
    Mistake("loggers twice", lambda: trainer(loggers=["jsonl", "jsonl"]), "'jsonl' twice", "the same filename", "Remove one"),
    Mistake("a folder that is a file", lambda: (open("runs.txt", "w").close(), trainer(folder="runs.txt")), "folder='runs.txt'", "is a file and no folder", "folder='runs'"),
    Mistake("a writer as logger", lambda: trainer(loggers=[type("SummaryWriter", (), {"close": len, "flush": len, "add_scalar": len})()]), "SummaryWriter", "implements no hook", "class Mine(hocket.Logger)"),
    # attributes
    Mistake("trainer.duration = …", assign("duration", "5ep"), "Trainer.duration cannot be set", "hocket.Trainer(duration=…)", "trainer.fit('5ep')"),
    Mistake("trainer.model = …", assign("model", nn.Linear(1, 1)), "Trainer.model cannot be set", "It is an argument", "hocket.Trainer(model=…)"),
    Mistake("state.stop_training = True", lambda: trainer(callbacks=[Stops()]).fit(), "State.stop_training cannot be set", "nothing would read it", "state.request(hocket.Decision.STOP"),
    Mistake("trainer.state.epoch", lambda: trainer().state.epoch, "State has no 'epoch'", "it has", "state.timestamp.epoch"),
    Mistake("result.metrics.loss", lambda: trainer(eval_data=loader()).fit().metrics.loss, "no attribute 'loss'", "train/loss, eval/loss", "['eval/loss']"),
    Mistake("result.history.history", lambda: trainer().fit().history.history, "History has no attribute 'history'", "values are found by name", "['train/loss']"),
    Mistake("result.history[0]", lambda: trainer().fit().history[0], "a table of columns by name", "train/loss", "history['train/loss'][0]"),
    Mistake("result.model", lambda: trainer().fit().model, "Result has no 'model'", "it has best", "trainer.state.model"),
    Mistake("best= of a metric that is not measured", lambda: trainer(eval_data=loader(), checkpoints=hocket.Checkpoints("runs/unmeasured", best=("eval/accuracy", "max", 1))).fit(), "monitors 'eval/accuracy'", "only 'eval/loss'", "metrics='accuracy'"),
    Mistake("OneCycleLR that is too short", lambda: trainer(schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=1)).fit(), "total_steps=1", "2 batches", "Write total_steps=2"),
]  # fmt: skip

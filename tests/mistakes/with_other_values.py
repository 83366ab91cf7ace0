"""Values that people try after the first mistakes, found when the tables above were complete."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
from newcomers import (
    INPUTS,
    LABELS,
    NUMBERS,
    Mistake,
    Module,
    classify,
    fit,
    loader,
    model,
    nothing,
    of_library,
    regress,
    trainer,
)
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.data import Several


class Good(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.layer = model()

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])


class Nested(Good):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Scheduled(Good):
    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.SGD(self.parameters(), 0.1), "lr_scheduler": None}


class WithAccuracy(Good):
    def loss(self, outputs: Any, batch: Any) -> Any:
        return {"loss": F.cross_entropy(outputs, batch[1]), "acc": 0.5}


class WithoutGradient(Good):
    @torch.no_grad()
    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])


class ReadsRate(hocket.Callback):
    def batch_end(self, state: hocket.State) -> None:
        print(state.lr)


class ReadsMetric(hocket.Callback):
    def epoch_end(self, state: hocket.State) -> None:
        print(state.metrics["val/loss"])


class WithoutApply(hocket.Algorithm):
    events = {hocket.Event.BATCH_END}


class NamesEvents(hocket.Algorithm):
    events: Any = {"batch_end"}

    def apply(self, event: Any, state: Any) -> None: ...


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(4, 3, 3)

    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs).mean(-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, batch_first=True)

    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs)


class FixedSize(Module):
    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs).reshape(9, 3)


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 2), nn.Flatten(), nn.Linear(4, 3))


def arguments() -> Any:
    return of_library("transformers.training_args", "TrainingArguments", to_dict=nothing, learning_rate=1)()


def runtime() -> hocket.Runtime:
    return hocket.Runtime(device="cpu")


class Multiplies:
    """A metric whose update does not fit."""

    def reset(self) -> None: ...

    def update(self, outputs: Any, targets: Any) -> None:
        outputs @ targets

    def compute(self) -> float:
        return 0.0


def does(batch_end: Any) -> Any:
    """Train with a callback that does this at the end of each batch."""
    return fit(callbacks=[type("Does", (hocket.Callback,), {"batch_end": lambda self, state: batch_end(state)})()])


MISTAKES = [
    Mistake("schedule='step'", lambda: trainer(schedule="step"), "schedule 'step' needs step_size", "Its signature is step(", "write {'step': {'step_size': '30ba'}}"),
    Mistake("precision=True", lambda: trainer(precision=True), "True is not one of", "bf16, ", "such as 'bf16'"),
    Mistake("optimizer=a module", lambda: trainer(optimizer=nn.Linear(1, 1)), "not list", "the list of parameters", "'adamw(lr=1e-3)'"),
    Mistake("optimizer without parameters", lambda: trainer(optimizer=lambda: None), "1 was given", "the list of parameters", "optimizer=lambda parameters:"),
    Mistake("'sgd lr=0.1'", lambda: trainer(optimizer="sgd lr=0.1"), "'sgd lr=0.1'", "adam, adamw", "'sgd(lr=0.1)'"),
    Mistake("optimizer={}", lambda: trainer(optimizer={}), "{} does not name one", "adam, adamw", "Write {'name': {'key': value}}"),
    Mistake("configure_optimizers of lists", lambda: trainer(model=Nested(), loss=None, optimizer=None), "returned nested lists", "a sequence of optimizers", "Trainer(schedule="),
    Mistake("configure_optimizers of a dict", lambda: trainer(model=Scheduled(), loss=None, optimizer=None), "a dict of 'optimizer', 'lr_scheduler'", "a sequence of optimizers", "Trainer(schedule="),
    Mistake("a loss with an accuracy", lambda: fit(model=WithAccuracy(), loss=None), "The loss named 'acc' is float", "scalar tensors", "metrics='accuracy'"),
    Mistake("forward under no_grad", lambda: fit(model=WithoutGradient(), loss=None), "no gradient", "computed from the model's outputs", "torch.no_grad()"),
    Mistake("state.lr", lambda: fit(callbacks=[ReadsRate()]), "State has no 'lr'", "batch, ", "state.optimizers[0].param_groups[0]['lr']"),
    Mistake("a metric of another set", lambda: fit(callbacks=[ReadsMetric()]), "no value 'val/loss'", "there is none, without an evaluation", "eval_data={'val': loader}"),
    Mistake("metrics['val/loss']", lambda: fit(eval_data=loader()).metrics["val/loss"], "no value 'val/loss'", "there is 'train/loss', 'eval/loss'", "Write 'eval/loss'"),
    Mistake("an algorithm without apply", lambda: fit(algorithms=[WithoutApply()]), "WithoutApply declares events", "apply(event, state)", "def apply(self, event, state)"),
    Mistake("events by name", lambda: trainer(algorithms=[NamesEvents()]), "'batch_end'", "members of hocket.Event", "events = {hocket.Event.BATCH_END}"),
    Mistake("early stopping, metric=", lambda: trainer(callbacks=[{"early-stopping": {"metric": "val_loss"}}]), "no argument 'metric'", "Its signature is early-stopping(", "'monitor'"),
    Mistake("half_life=100", lambda: trainer(algorithms=[{"ema": {"half_life": 100}}]), "half_life=100", "str | hocket.basics.time.Time", "half_life='100ba'"),
    Mistake("a Conv1d, channels last", lambda: classify(torch.rand(16, 10, 4), model=Sequences()), "float32 of shape (16, 10, 4)", "(samples, channels, length)", "inputs.transpose(1, 2)"),
    Mistake("a Conv1d of a table", lambda: classify(INPUTS, model=Sequences()), "float32 of shape (16, 4)", "(samples, channels, length)", "inputs.unsqueeze(1)"),
    Mistake("an LSTM", lambda: classify(torch.rand(16, 7, 4), model=Recurrent()), "outputs: tuple of 2", "the loss takes one tensor", "outputs[0]"),
    Mistake("a fixed reshape", lambda: classify(model=FixedSize()), "float32 of shape (16, 4)", "sizes that this batch does not", "x.reshape(len(x), -1)"),
    Mistake("batches of arrays", lambda: fit(train_data=[(INPUTS.numpy(), LABELS.numpy())]), "a NumPy array", "makes tensors", "torch.from_numpy(inputs)"),
    Mistake("labels in a list", lambda: classify(targets=LABELS.tolist()), "targets: list of 16", "as a tensor", "torch.tensor(labels)"),
    Mistake("targets of None", lambda: classify(targets=None), "targets: None", "as a tensor", "torch.tensor(labels)"),
    Mistake("enumerate(loader)", lambda: fit(train_data=enumerate(loader())), "train_data is enumerate", "an iterable of batches", "DataLoader(dataset"),
    Mistake("range(10)", lambda: fit(train_data=range(10)), "train_data is range", "an iterable of batches", "DataLoader(dataset"),
    Mistake("a Path", lambda: fit(train_data=Path("data")), "cannot be iterated", "an iterable of batches", "train_data=torch.utils.data.DataLoader(dataset"),
    Mistake("eval_data=[loader, loader]", lambda: trainer(eval_data=[loader(), loader()]), "a list of 2 loaders", "one iterable of batches", "eval_data={'first': loader"),
    Mistake("evaluate(model, loader)", lambda: trainer().evaluate(model(), loader()), "Linear(…), DataLoader(…)", "takes data by position", "trainer.evaluate(data)"),
    Mistake("state.log(name, value)", lambda: does(lambda state: state.log("a", 1)), "given 'a', 1", "values by name", "state.log({'a': 1})"),
    Mistake("state.log(name)", lambda: does(lambda state: state.log("a")), "was given 'a'", "values by name", "state.log({'a': value})"),
    Mistake("state.log(on_step=)", lambda: does(lambda state: state.log({"a": 1}, on_step=True)), "'on_step'", None, "over='interval'"),
    Mistake("state.log(reduce='average')", lambda: does(lambda state: state.log({"a": 1}, reduce="average")), "reduce='average'", "'mean'", "reduce='mean'"),
    Mistake("state.log of an epoch", lambda: does(lambda state: state.log({"epoch": 1}, reduce="mean")), "'epoch'", "the position of a row", "'my/epoch'"),
    Mistake("state.log(name=value)", lambda: does(lambda state: state.log(a=1)), "State.log()", "values by name", "state.log({'name': value})"),
    Mistake("state.request('stop')", lambda: does(lambda state: state.request("stop")), "was given 'stop'", "STOP, SKIP_BATCH, EVALUATE", "Write Decision.STOP"),
    Mistake("state.request()", lambda: does(lambda state: state.request()), "State.request()", "hocket.Decision", "state.request(hocket.Decision.STOP"),
    Mistake("history['eval_loss']", lambda: fit(eval_data=loader()).history["eval_loss"], "no 'eval_loss'", "It has: epoch, batch", "history['eval/loss']"),
    Mistake("history.series('eval_loss')", lambda: fit(eval_data=loader()).history.series("eval_loss"), "no 'eval_loss'", "It has: epoch, batch", "history['eval/loss']"),
    Mistake("result['eval/loss']", lambda: fit(eval_data=loader())["eval/loss"], "A Result", "its metrics and its history", "Write result.metrics['eval/loss']"),
    Mistake("result['eval_loss']", lambda: fit(eval_data=loader())["eval_loss"], "A Result", "its metrics and its history", "Write result.metrics['eval/loss']"),
    Mistake("result['batch']", lambda: fit()["batch"], "A Result", "its metrics and its history", "Write result.history['batch']"),
    Mistake("an error in a metric's update", lambda: fit(eval_data=loader(), metrics={"mine": Multiplies()}), "metric 'mine' (Multiplies), with outputs: float32 of shape (8, 3)", "update(outputs, targets)", "update_metric(self, metric, outputs, batch)"),
    Mistake("an error in a training metric's update", lambda: fit(train_metrics={"mine": Multiplies()}), "metric 'mine' (Multiplies), with outputs: float32 of shape (8, 3)", "update(outputs, targets)", "update_metric(self, metric, outputs, batch)"),
    Mistake("Several in turn to a plain model", lambda: fit(train_data=Several({"a": loader(), "b": loader()}, "in turn")), "a dict from 'a' to a batch", "yields the batch itself", "Several(…, named=False)"),
    Mistake("Several without a mode", lambda: Several({"a": loader(), "b": loader()}), "mode=None is not a mode", "'cycle': a batch of each", "Give one of 'cycle'"),
    Mistake("names by position", lambda: hocket.Trainer(model(), loader(), "cross_entropy", "sgd(lr=0.1)"), "'sgd(lr=0.1)'", "takes model and train_data by position", "loss='cross_entropy', optimizer='sgd(lr=0.1)')"),
    Mistake("a schedule and a duration by position", lambda: hocket.Trainer(model(), loader(), "MSELoss", "AdamW", "StepLR", "3ep", "bf16"), "'StepLR'", "takes model and train_data by position", "loss='MSELoss', optimizer='AdamW', schedule='StepLR', duration='3ep', precision='bf16')"),
    Mistake("Runtime(model)", lambda: hocket.Runtime(model()), "Linear(…)", "takes no argument by position", "model = runtime.setup(model)"),
    Mistake("Runtime.prepare of three", lambda: runtime().prepare(model(), None, loader()), "was given 3 values", "takes module and optimizers", "data = runtime.setup_data(loader)"),
    Mistake("fit(loader, '3ep')", lambda: trainer().fit(loader(), "3ep"), "the text '3ep'", "an iterable of batches", "duration='3ep'"),
    Mistake("fit(3, loader)", lambda: trainer().fit(3, loader()), "the number 3", "an iterable of batches", "duration='3ep'"),
    Mistake("Trainer(model, TrainingArguments)", lambda: hocket.Trainer(model(), arguments()), "TrainingArguments of transformers", "Each setting is an argument of the Trainer", "train_data="),
    Mistake("Trainer(loader, model)", lambda: hocket.Trainer(loader(), model()), "model=DataLoader(…)", "a torch.nn.Module", "hocket.Trainer(model, train_data)"),
    Mistake("compile={'mod': …}", lambda: trainer(compile={"mod": "x"}), "'mod'", "it takes fullgraph, dynamic", "compile=True"),
    Mistake("deterministic='warn'", lambda: trainer(deterministic="warn"), "deterministic='warn'", "True or False", "Write deterministic=False"),
    Mistake("folder=None", lambda: trainer(folder=None), "folder=None", "text or a path", "folder='runs'"),
    Mistake("duration=timedelta", lambda: trainer(duration=datetime.timedelta(hours=1)), "datetime.timedelta(seconds=3600)", "a number and a unit", "'90min'"),
    Mistake("Checkpoints(dirpath=…)", lambda: hocket.Checkpoints(dirpath="a"), "dirpath='a'", "Its arguments are folder", "folder='a'"),
    Mistake("Checkpoints()", lambda: hocket.Checkpoints(), "not given folder", "Checkpoints(folder=…)", "Write Checkpoints(folder=…)"),
    Mistake("EvalSet(name=…)", lambda: hocket.EvalSet(loader(), name="val"), "name='val'", "Its arguments are data", "eval_data={'val': hocket.EvalSet(loader)}"),
    Mistake("load_weights(3)", lambda: trainer().load_weights(3), "weights=3", "a file or folder, tensors by name", "trainer.load_weights('model.pt')"),
    Mistake("load_state_dict(weights)", lambda: trainer().load_state_dict(model().state_dict()), "weight, bias", "the state of a whole run", "trainer.load_weights(state_dict)"),
    Mistake("a weight for each of 5 classes", lambda: classify(loss=nn.CrossEntropyLoss(weight=torch.ones(5))), "weight tensor of shape", "each of the 3 classes", "weight=torch.ones(3)"),
    Mistake("token ids of -1", lambda: classify(torch.full((16, 2), -1), model=embedding()), "the batch has -1", "from 0 to 9", "inputs.clamp(min=0)"),
    Mistake("token ids as floats", lambda: classify(torch.ones(16, 2), model=embedding()), "float32 of shape (16, 2)", "integers of dtype int64", "inputs.long()"),
    Mistake("classes in the last dimension", lambda: classify(torch.rand(4, 7, 4), torch.zeros(4, 7).long()), "float32 of shape (4, 7, 3)", "(samples, classes, length)", "outputs.transpose(1, 2)"),
    Mistake("the accuracy of numbers", lambda: regress(metrics="accuracy", eval_data=[(INPUTS, NUMBERS)]), "the loss MSELoss is of numbers", "right labels", "metrics='mae'"),
    Mistake("metrics=len", lambda: trainer(metrics=len, eval_data=loader()), "metrics=len", "update(outputs, targets), compute() and reset()", "metrics='accuracy'"),
    Mistake("metrics=3", lambda: trainer(metrics=3, eval_data=loader()), "metrics=3", "update(outputs, targets), compute() and reset()", "metrics='accuracy'"),
]  # fmt: skip

"""Mistakes that are understood: each trains as the explicit spelling does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy
import torch
from newcomers import NUMBERS, Accepted, loader, model, trainer
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.state.simple_metrics import Accuracy, MeanSquaredError
from hocket_insight.callbacks.lr_monitor import LRMonitor


def plain(**changes: Any) -> hocket.Trainer:
    """The explicit spelling, trained."""
    made = trainer(**changes)
    made.fit()
    return made


def accepted(
    name: str, said: str = "", listed: bool = False, explicit: dict[str, Any] | None = None, **changes: Any
) -> Accepted:
    return Accepted(name, lambda: plain(**changes), lambda: plain(**(explicit or {})), said, listed)


def numbers(**changes: Any) -> dict[str, Any]:
    return {"model": model(outputs=1), "train_data": loader(targets=NUMBERS), **changes}


def checkpointed(changes: dict[str, Any], resume: Any) -> hocket.Trainer:
    """A run of one epoch and a second that continues it."""
    plain(**changes)
    return plain(**changes, model=model(), duration="2ep", resume=resume)


def by_position(*given: Any) -> hocket.Trainer:
    made = hocket.Trainer(*given, loss=F.cross_entropy, optimizer="sgd(lr=0.1)", duration="1ep", device="cpu")
    made.fit(*([] if len(given) > 1 else [loader()]))
    return made


def fitted(*given: Any, **by_name: Any) -> hocket.Trainer:
    made = trainer(train_data=None, **({"duration": None} if "duration" in by_name else {}))
    made.fit(*given, **by_name)
    return made


def in_parts(outputs: Any, targets: Any) -> Any:
    return {"classes": F.cross_entropy(outputs, targets), "size": outputs.square().mean()}


EVALUATED = {"eval_data": loader()}

MISTAKES = [
    Accepted("Trainer(model).fit(loader)", lambda: by_position(model()), lambda: plain(), listed=True),
    Accepted("Trainer(model, loader)", lambda: by_position(model(), loader()), lambda: plain()),
    Accepted("fit(loader)", lambda: fitted(loader()), lambda: plain(), listed=True),
    Accepted("fit(loader, eval_loader)", lambda: fitted(loader(), loader()), lambda: plain(eval_data=loader())),
    Accepted("fit(loader, duration=…)", lambda: fitted(loader(), duration="2ep"), lambda: plain(duration="2ep")),
    accepted("precision=torch.bfloat16", "precision='bf16': autocast", True, {"precision": "bf16"}, precision=torch.bfloat16),
    accepted("precision=torch.float32", precision=torch.float32),
    accepted("device=torch.device('cpu')", listed=True, device=torch.device("cpu")),
    accepted("device='cpu:0'", device="cpu:0"),
    accepted("loss='cross_entropy'", listed=True, loss="cross_entropy"),
    accepted("loss='CrossEntropyLoss'", loss="CrossEntropyLoss"),
    accepted("loss='torch.nn.functional.cross_entropy'", loss="torch.nn.functional.cross_entropy"),
    accepted("loss='sparse_categorical_crossentropy'", "loss=torch.nn.functional.cross_entropy", loss="sparse_categorical_crossentropy"),
    accepted("loss=nn.CrossEntropyLoss", listed=True, loss=nn.CrossEntropyLoss),
    accepted("loss='mse'", explicit=numbers(loss=nn.MSELoss()), **numbers(loss="mse")),
    accepted("loss='mae'", "loss=torch.nn.functional.l1_loss", explicit=numbers(loss=nn.L1Loss()), **numbers(loss="mae")),
    accepted("metrics='accuracy'", listed=True, explicit={"metrics": {"accuracy": Accuracy()}, **EVALUATED}, metrics="accuracy", **EVALUATED),
    accepted("metrics=['accuracy']", listed=True, explicit={"metrics": {"accuracy": Accuracy()}, **EVALUATED}, metrics=["accuracy"], **EVALUATED),
    accepted("metrics=['acc']", explicit={"metrics": {"accuracy": Accuracy()}, **EVALUATED}, metrics=["acc"], **EVALUATED),
    accepted("a metric class", listed=True, explicit={"metrics": {"Accuracy": Accuracy()}, **EVALUATED}, metrics=Accuracy, **EVALUATED),
    accepted("one metric", listed=True, explicit={"metrics": {"Accuracy": Accuracy()}, **EVALUATED}, metrics=Accuracy(), **EVALUATED),
    accepted("a list of metrics", listed=True, explicit={"metrics": {"Accuracy": Accuracy()}, **EVALUATED}, metrics=[Accuracy()], **EVALUATED),
    accepted("a class in a dict", explicit={"metrics": {"a": Accuracy()}, **EVALUATED}, metrics={"a": Accuracy}, **EVALUATED),
    accepted("a name in a dict", explicit={"metrics": {"a": Accuracy()}, **EVALUATED}, metrics={"a": "accuracy"}, **EVALUATED),
    accepted("a function in a dict", explicit={"metrics": {"a": Accuracy()}, **EVALUATED}, metrics={"a": lambda: Accuracy()}, **EVALUATED),
    accepted("a function in a list", explicit={"metrics": [Accuracy()], **EVALUATED}, metrics=[lambda: Accuracy()], **EVALUATED),
    accepted("a partial in a dict", explicit={"metrics": {"a": Accuracy()}, **EVALUATED}, metrics={"a": functools.partial(Accuracy)}, **EVALUATED),
    accepted("a function of a name", explicit={"metrics": {"a": Accuracy()}, **EVALUATED}, metrics=lambda: {"a": lambda: "accuracy"}, **EVALUATED),
    accepted("a hocket.Loss of a dict", explicit={"loss": in_parts}, loss=lambda outputs, targets: hocket.Loss(in_parts(outputs, targets), reduction="mean")),
    accepted("a hocket.Loss of a dict with a total", loss=lambda outputs, targets: hocket.Loss({"total": F.cross_entropy(outputs, targets), "norm": outputs.square().mean()})),
    accepted("train_metrics='accuracy'", explicit={"train_metrics": {"accuracy": Accuracy()}}, train_metrics="accuracy"),
    accepted("EvalSet(metrics='mse')", explicit=numbers(loss=nn.MSELoss(), eval_data=hocket.EvalSet(loader(targets=NUMBERS), {"mse": MeanSquaredError()})), **numbers(loss=nn.MSELoss(), eval_data=hocket.EvalSet(loader(targets=NUMBERS), "mse"))),
    accepted("checkpoints='runs/a'", listed=True, explicit={"checkpoints": None}, checkpoints="runs/a"),
    accepted("checkpoints=Path", checkpoints=Path("runs/b")),
    accepted("checkpoints=True", "checkpoints='runs/checkpoints'", True, checkpoints=True),
    accepted("checkpoints=False", checkpoints=False),
    accepted("checkpoints={…}", checkpoints={"folder": "runs/c", "keep": 1}),
    accepted("resume=True", listed=True, resume=True, checkpoints="runs/d"),
    accepted("resume=False", resume=False),
    Accepted("resume=True continues", lambda: checkpointed({"checkpoints": "runs/e"}, True), lambda: plain(duration="2ep"), listed=True),
    Accepted("the folder of Checkpoints", lambda: checkpointed({"checkpoints": "runs/f"}, "runs/f"), lambda: plain(duration="2ep"), "its newest, 'ep1-ba2'", listed=True),
    accepted("compile='default'", listed=True, compile=None),
    accepted("callbacks=an instance", callbacks=LRMonitor()),
    accepted("callbacks=None", callbacks=None),
    accepted("callbacks='lr-monitor'", callbacks="lr-monitor"),
    accepted("callbacks={…}", callbacks={"lr-monitor": {}, "speed-monitor": {"every": "5ba"}}),
    accepted("clip_gradients=np.float32(1)", explicit={"clip_gradients": 1.0}, clip_gradients=numpy.float32(1.0)),
    accepted("a callback class", callbacks=[LRMonitor]),
    accepted("a list of a class and a dict", callbacks=[{"lr-monitor": {}}]),
    accepted("loggers=None", loggers=None),
    accepted("loggers=False", loggers=False),
    accepted("an optimizer class", explicit={"optimizer": lambda p: torch.optim.Adagrad(p)}, optimizer=torch.optim.Adagrad),
    accepted("a duration with a space", duration="1 ep"),
    accepted("a Time", duration=hocket.Time(1, hocket.Unit.EPOCH)),
    accepted("clip_gradients=1", explicit={"clip_gradients": 1.0}, clip_gradients=1),
    accepted("an optimizer instance", **(lambda net: {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)})(model())),
]  # fmt: skip

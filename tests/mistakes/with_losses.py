"""Losses, their targets, and metrics."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics.classification as torchmetrics
from newcomers import INPUTS, LABELS, NUMBERS, Mistake, Module, classify, fit, loader, model, regress, trainer
from torch import Tensor, nn
from torch.nn import functional as F


class Pair(Module):
    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs), inputs


class Dict(Module):
    def forward(self, inputs: Tensor) -> Any:
        return {"logits": self.layer(inputs)}


class Own(Module):
    def forward(self, inputs: Tensor) -> Any:
        return {"loss": self.layer(inputs).mean()}


class Scalar(Module):
    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs).mean()


class Both(Module):
    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs).mean(), self.layer(inputs)


class Cut(Module):
    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs).detach().requires_grad_()


class Classes(Module):
    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs).argmax(1)


class Array(Module):
    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs).detach().numpy()


class Listed(Module):
    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs).tolist()


class Forgets(Module):
    def forward(self, inputs: Tensor) -> Any:
        self.layer(inputs)


class Metric:
    """Has no compute and reset."""

    def update(self, outputs: Any, targets: Any) -> None: ...


class Returns:
    """Returns what no metric does."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def update(self, outputs: Any, targets: Any) -> None: ...
    def compute(self) -> Any:
        return self.value

    def reset(self) -> None: ...


class Needs:
    def __init__(self, num_classes: int) -> None: ...
    def update(self, outputs: Any, targets: Any) -> None: ...
    def compute(self) -> float:
        return 0.0

    def reset(self) -> None: ...


def backward(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, targets)
    loss.backward()
    return loss


def evaluated(**changes: Any) -> Any:
    return fit(eval_data=loader(), **changes)


def with_accuracy(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    accuracy = (outputs.argmax(1) == targets).float().mean()
    return {"ce": F.cross_entropy(outputs, targets), "accuracy": accuracy}


def evaluate(batch: Any, **changes: Any) -> Any:
    return trainer(metrics="accuracy", **changes).evaluate([batch])


MISTAKES = [
    Mistake("float labels", lambda: classify(targets=LABELS.float()), "targets: float32 of shape (16,)", "class indices, int64", "targets.long()", listed=True),
    Mistake("labels out of range", lambda: classify(targets=LABELS + 1), "these are 1 to 3", "labels are 0 to 2", "targets - 1", listed=True),
    Mistake("more classes than outputs", lambda: classify(targets=LABELS * 3), "these are 0 to 6", "labels are 0 to 2", "torch.nn.Linear(…, 7)"),
    Mistake("negative labels", lambda: classify(targets=LABELS - 1), "these are -1 to 1", "labels are 0 to 2", "targets + 1"),
    Mistake("int32 labels", lambda: classify(targets=LABELS.int()), "targets: int32 of shape (16,)", "class indices, int64", "targets.long()"),
    Mistake("labels (N, 1)", lambda: classify(targets=LABELS[:, None]), "targets: int64 of shape (16, 1)", "class indices, int64", "targets.squeeze(1)"),
    Mistake("one-hot integers", lambda: classify(targets=F.one_hot(LABELS, 3)), "targets: int64 of shape (16, 3)", "class indices, int64", "targets.argmax(1)"),
    Mistake("cross_entropy of one output", lambda: classify(model=model(outputs=1), targets=NUMBERS[:, 0]), "outputs: float32 of shape (16, 1)", "class indices", "mse_loss"),
    Mistake("(N, 1) and (N,) in MSE", lambda: regress(targets=NUMBERS[:, 0]), "outputs of shape (16, 1) and targets of shape (16)", "the same shape", "outputs.squeeze(1)"),
    Mistake("(N, 1) and (N,) in a lambda", lambda: regress(targets=NUMBERS[:, 0], loss=lambda o, t: F.l1_loss(o, t)), "targets of shape (16)", "the same shape", "targets.unsqueeze(1)"),
    Mistake("shapes that do not broadcast", lambda: regress(targets=torch.zeros(16, 5), model=model(outputs=3)), "(16, 3) and the targets (16, 5)", "equal shapes", "change the last layer"),
    Mistake("MSE of classes", lambda: classify(loss=nn.MSELoss()), "(16, 3) and the targets (16,)", "equal shapes", "loss=torch.nn.functional.cross_entropy"),
    Mistake("BCE of logits", lambda: regress(loss=nn.BCELoss(), targets=torch.ones(16, 1)), "outputs: float32 of shape (16, 1)", "probabilities from 0 to 1", "binary_cross_entropy_with_logits"),
    Mistake("BCE of (N, 1) and (N,)", lambda: regress(loss=nn.BCEWithLogitsLoss(), targets=torch.ones(16)), "(16, 1) and the targets (16,)", "equal shapes", "outputs.squeeze(1)"),
    Mistake("BCE of integers", lambda: regress(loss=nn.BCEWithLogitsLoss(), targets=torch.ones(16, 1, dtype=torch.long)), "targets: int64 of shape (16, 1)", "one dtype", "targets.float()"),
    Mistake("NLL of logits", lambda: classify(loss=nn.NLLLoss()), "the outputs of shape (16, 3) are those of a layer", "takes log-probabilities", "loss=torch.nn.functional.cross_entropy"),
    Mistake("a tuple of outputs", lambda: classify(model=Pair()), "outputs: tuple of 2", "the loss takes one tensor", "outputs[0]", listed=True),
    Mistake("a dict of outputs", lambda: classify(model=Dict()), "outputs: dict {'logits': float32 of shape (16, 3)}", "The model returned a dict", "outputs['logits']"),
    Mistake("a forward without return", lambda: classify(model=Forgets()), "outputs: None", "the loss takes a tensor", "Write a return statement"),
    Mistake("a detached loss", lambda: classify(loss=lambda o, t: F.cross_entropy(o, t).detach()), "The loss has no gradient", "computed from the model's outputs", "without .detach()", listed=True),
    Mistake("a loss.item()", lambda: classify(loss=lambda o, t: F.cross_entropy(o, t).item()), "returned float", "a scalar tensor", "without .item()"),
    Mistake("a vector as loss", lambda: classify(loss=nn.CrossEntropyLoss(reduction="none")), "shape (16,)", "a scalar", "reduction='mean'"),
    Mistake("a loss without return", lambda: classify(loss=lambda o, t: None), "returned NoneType", "a scalar tensor", "return loss"),
    Mistake("several losses in a list", lambda: classify(loss=lambda o, t: [o.sum(), o.sum()]), "returned list", "a scalar tensor", "{'a': a, 'b': b}"),
    Mistake("a loss cut off and set to require gradients", lambda: classify(loss=lambda o, t: F.cross_entropy(o, t).detach().requires_grad_()), "was not computed from parameters", "computed from the model's outputs", "without .detach()"),
    Mistake("a loss made a new tensor", lambda: classify(loss=lambda o, t: 2 * torch.tensor(F.cross_entropy(o, t).item(), requires_grad=True)), "was not computed from parameters", "computed from the model's outputs", "torch.tensor(loss)"),
    Mistake("outputs cut off", lambda: classify(model=Cut()), "was not computed from parameters", "computed from the model's outputs", "without .detach()"),
    Mistake("a model with its own loss and loss=", lambda: classify(model=Own()), "outputs: dict {'loss': float32 of shape ()}", "The model returned its own loss", "Omit loss="),
    Mistake("a model that returns a scalar loss", lambda: classify(model=Scalar()), "outputs: float32 of shape ()", "its own loss, a scalar", "omit loss="),
    Mistake("a model that returns loss and logits", lambda: classify(model=Both()), "outputs: tuple of 2", "its own loss, a scalar", "Return {'loss': loss, 'logits': logits}"),
    Mistake("a scalar loss without loss=", lambda: classify(model=Scalar(), loss=None), "returned Tensor without a loss", "Pass loss=", "return {'loss': loss}"),
    Mistake("argmax in the model", lambda: classify(model=Classes()), "The outputs are int64 of shape (16,)", "takes the scores", "Remove argmax"),
    Mistake("NumPy outputs", lambda: classify(model=Array()), "returned ndarray of numpy", "Return the tensor", "remove .detach(), .numpy()"),
    Mistake("NumPy outputs in MSE", lambda: regress(model=Array()), "returned ndarray of numpy", "Return the tensor", "remove .detach(), .numpy()"),
    Mistake("outputs of a list", lambda: classify(model=Listed()), "a list of numbers", "Return the tensor", "remove .tolist()"),
    Mistake("KLDivLoss of labels", lambda: classify(loss=nn.KLDivLoss(reduction="batchmean")), "these targets are int64 of shape (16,)", "takes log-probabilities", "loss=torch.nn.functional.cross_entropy"),
    Mistake("kl_div of logits", lambda: classify(loss=lambda o, t: F.kl_div(o, F.one_hot(t, 3).float(), reduction="batchmean")), "the outputs of shape (16, 3) are those of a layer", "takes log-probabilities", "log_softmax(1)"),
    Mistake("nll_loss of logits in a lambda", lambda: classify(loss=lambda o, t: F.nll_loss(o, t)), "the outputs of shape (16, 3) are those of a layer", "takes log-probabilities", "loss=torch.nn.functional.cross_entropy"),
    Mistake("nll_loss of a softmax", lambda: classify(model=nn.Sequential(model(), nn.Softmax(1)), loss=nn.NLLLoss()), "those of a softmax", "takes log-probabilities", "torch.nn.LogSoftmax(dim=1)"),
    Mistake("a loss of (targets, outputs)", lambda: classify(loss=lambda t, o: F.cross_entropy(o, t)), "targets: int64 of shape (16,)", "(outputs, targets)", "loss=lambda outputs, targets:"),
    Mistake("a loss of one argument", lambda: classify(loss=lambda outputs: outputs.mean()), "outputs: float32 of shape (16, 3)", "(outputs, targets)", "def loss(outputs, targets)"),
    Mistake("backward in the loss", lambda: classify(loss=backward), "inputs: float32 of shape (16, 4); targets: int64", "a tensor of an earlier batch or step", "return the loss only"),
    Mistake("loss='crossentropi'", lambda: trainer(loss="crossentropi"), "loss='crossentropi'", "one of these names", "'cross_entropy'"),
    Mistake("loss='focal'", lambda: trainer(loss="focal"), "loss='focal'", "one of these names", "loss=torch.nn.functional.cross_entropy"),
    Mistake("loss=[…]", lambda: trainer(loss=[nn.MSELoss()]), "loss=", "a function of (outputs, targets)", "loss=torch.nn.functional.cross_entropy"),
    Mistake("a loss class with arguments", lambda: trainer(loss=nn.AdaptiveLogSoftmaxWithLoss), "AdaptiveLogSoftmaxWithLoss is a class", "its arguments in_features", "loss=AdaptiveLogSoftmaxWithLoss(…)", listed=True),
    Mistake("a loss called too early", lambda: trainer(loss=F.cross_entropy(model()(INPUTS), LABELS)), "loss=a tensor", "a function of (outputs, targets)", "loss=torch.nn.functional.cross_entropy"),
    Mistake("loss_reduction='none'", lambda: trainer(loss_reduction="none"), "'none'", "'mean' nor 'sum'", "Give one of them"),
    # metrics
    Mistake("metrics='f1'", lambda: evaluated(metrics="f1"), "metrics='f1'", "accuracy, mae, mse", "torchmetrics.classification", listed=True),
    Mistake("metrics=['auroc']", lambda: evaluated(metrics=["auroc"]), "metrics='auroc'", "accuracy, mae, mse", "torchmetrics.classification"),
    Mistake("a metric class with arguments", lambda: evaluated(metrics=Needs), "Needs is a class", "its arguments num_classes", "metrics=Needs(…)", listed=True),
    Mistake("a metric without compute", lambda: evaluated(metrics={"mean": Metric()}), "'mean' (Metric) has no compute()", "update, compute and reset", "such as torchmetrics"),
    Mistake("a function as metric", lambda: evaluated(metrics={"accuracy": lambda o, t: 0.0}), "'accuracy' is a function", "a metric of torchmetrics", "metrics='accuracy'"),
    Mistake("a list of two metrics of a class", lambda: evaluated(metrics=["accuracy", "acc"]), "accuracy, accuracy", "Name each", "metrics={'first': …"),
    Mistake("accuracy of regression", lambda: regress(eval_data=[(INPUTS, NUMBERS[:, 0])], model=model(outputs=3), metrics="mae", loss=lambda o, t: o.mean()), "(16, 3) and targets of shape (16,)", "one shape", "outputs.squeeze(1)"),
    Mistake("accuracy of several labels", lambda: evaluate((INPUTS, torch.ones(16, 3)), loss=lambda o, t: F.mse_loss(o, t)), "a sample has several labels", "logits or probabilities", "MultilabelAccuracy(3, average='micro')"),
    Mistake("accuracy of ignored labels", lambda: evaluate((INPUTS, LABELS - 1), loss=lambda o, t: F.cross_entropy(o, t, ignore_index=-1)), "neither a class of the outputs", "nor -100, which is ignored", "CrossEntropyLoss(ignore_index=…)"),
    Mistake("an accuracy among losses", lambda: classify(loss=with_accuracy), "'accuracy' has no gradient", "added up", "call the loss 'total'"),
    Mistake("an accuracy among losses of an evaluation", lambda: evaluate((INPUTS, LABELS), loss=with_accuracy), "'accuracy' is not a loss", "added up", "call the loss 'total'"),
    Mistake("a weight of NaN", lambda: classify(loss=lambda o, t: (F.cross_entropy(o, t), torch.tensor(torch.nan))), "the weight nan for 16 samples", "the number of elements in the mean", "metrics='accuracy'"),
    Mistake("a metric that returns a list", lambda: evaluated(metrics={"a": Returns([1, 2])}), "returned [1, 2]", "a number, a vector, or numbers by name", "{'first': …"),
    Mistake("a metric that returns None", lambda: evaluated(metrics={"a": Returns(None)}), "returned None", "a number, a vector, or numbers by name", "return"),
    Mistake("a metric that returns a matrix", lambda: evaluated(metrics={"a": Returns(torch.eye(3))}), "returned a tensor of shape (3, 3)", "a number, a vector, or numbers by name", "{'first': …"),
    Mistake("a metric for other classes", lambda: evaluated(metrics={"a": torchmetrics.MulticlassAccuracy(5)}), "float32 of shape (8, 3)", "for 5 classes", "MulticlassAccuracy(3)"),
    Mistake("a binary metric", lambda: evaluated(metrics={"a": torchmetrics.BinaryAccuracy()}), "float32 of shape (8, 3)", "of 3 classes", "MulticlassAccuracy(3)"),
    Mistake("(N, 1) and (N,) in MSE of an evaluation", lambda: trainer(model=model(outputs=1), loss=nn.MSELoss()).evaluate([(INPUTS, NUMBERS[:, 0])]), "outputs of shape (16, 1) and targets of shape (16)", "the same shape", "outputs.squeeze(1)"),
    Mistake("an evaluation set 'train'", lambda: trainer().evaluate({"train": loader()}), "labelled 'train'", "another label", "{'train-set': …}"),
    Mistake("an evaluation set without a name", lambda: trainer().evaluate({"": loader()}), "a set without a label", "Name it", "={'test': …}"),
]  # fmt: skip

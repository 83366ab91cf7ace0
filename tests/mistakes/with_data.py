"""Data that does not consist of batches, and batches that do not fit the model."""

from __future__ import annotations

from collections.abc import Iterator
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
    trainer,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket


def data(name: str, value: Any, given: str, allowed: str, write: str, listed: bool = False) -> Mistake:
    """Training data that is not an iterable of batches."""
    return Mistake(name, lambda: fit(train_data=value), given, allowed, write, listed)


def batches() -> Iterator[Any]:
    """A function of a generator."""
    yield INPUTS, LABELS


class Two(Module):
    def forward(self, first: Tensor, second: Tensor) -> Any:
        return self.layer(first + second)


class Normed(Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs: Tensor) -> Any:
        return self.norm(self.layer(inputs))


class Mask(Module):
    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs) + torch.zeros(3, device="meta")


class Named(nn.Module):
    """A model that has a column's name in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = model()

    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs)


def samples(*given: Any) -> Any:
    """Train on a batch that default_collate makes of samples."""
    return fit(train_data=DataLoader([*given], len(given)))


class Image:
    """An image of PIL, which is not needed here."""


Image.__module__, Image.__qualname__ = "PIL.Image", "Image"
IMAGES = torch.rand(8, 32, 32, 3)
CLASSES = LABELS[:8]
CNN = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
FLAT = nn.Linear(784, 3)
FRAME = of_library("pandas.core.frame", "DataFrame", columns=["a"], __iter__=lambda self: iter(["a"]))

MISTAKES = [
    data("(X, Y)", (INPUTS, LABELS), "a tuple of 2 tensors", "list of batches", "DataLoader(TensorDataset(inputs, targets)", listed=True),
    data("[X, Y]", [INPUTS, LABELS], "a list of 2 tensors", "list of batches", "DataLoader(TensorDataset(inputs, targets)", listed=True),
    data("a Dataset", TensorDataset(INPUTS, LABELS), "a data set (TensorDataset)", "batches", "DataLoader(data, batch_size=32)", listed=True),
    data("a tensor", INPUTS, "one Tensor", "batches", "DataLoader(TensorDataset(inputs, targets)"),
    data("arrays", (INPUTS.numpy(), LABELS.numpy()), "a tuple of 2 tensors or arrays", "list of batches", "DataLoader(TensorDataset(inputs, targets)"),
    data("one array", INPUTS.numpy(), "one ndarray", "batches", "DataLoader(TensorDataset(inputs, targets)"),
    data("a DataFrame", FRAME(), "a table (DataFrame)", "batches", "DataLoader(TensorDataset(inputs, targets)"),
    data("a path", "data/train.csv", "a str 'data/train.csv'", "an iterable of batches", "DataLoader(dataset, batch_size=32)"),
    data("a dict of loaders", {"train": loader()}, "a dict of loaders", "an iterable of batches", "hocket.data.Several({"),
    data("a generator function", batches, "the function batches", "an iterable of batches", "train_data=list(batches(…))"),
    data("a Dataset class", TensorDataset, "the class TensorDataset", "an iterable of batches", "train_data="),
    data("a list of samples", [(x, y) for x, y in zip(INPUTS, LABELS, strict=True)], "a list of samples", "Wrap it in a loader", "DataLoader(data, batch_size=32)"),
    data("an empty loader", [], "yielded no batch", "Check", "yielded no batch"),
    data("a Lightning DataModule", of_library("lightning.pytorch.core.datamodule", "LightningDataModule", train_dataloader=nothing)(), "LightningDataModule", "an iterable of batches", "train_data=module.train_dataloader()"),
    data("fastai DataLoaders", of_library("fastai.data.core", "DataLoaders", train=None, valid=None)(), "DataLoaders", "an iterable of batches", "eval_data=data.valid"),
    data("a Hugging Face data set", of_library("datasets.arrow_dataset", "Dataset", __iter__=nothing, __getitem__=nothing)(), "Dataset of Hugging Face", "batches", "DataLoader(data, batch_size=32)", listed=True),
    data("samples without a batch", [INPUTS[0]], "float32 of shape (4,)", "batches (inputs, targets)", "Give batches (inputs, targets)"),
    Mistake("a generator for several epochs", lambda: fit(train_data=batches(), duration="3ep"), "an iterator", "once", "such as the list or the DataLoader"),
    Mistake("eval_data without labels", lambda: trainer(eval_data=[INPUTS]).evaluate(), "float32 of shape (16, 4)", "batches (inputs, targets)", "trainer.predict(data)", listed=True),
    Mistake("eval_data of one-tuples", lambda: trainer(eval_data=[(INPUTS,)]).evaluate(), "float32 of shape (16, 4)", "batches (inputs, targets)", "trainer.predict(data)", listed=True),
    Mistake("eval_data=tensors", lambda: trainer(eval_data=(INPUTS, LABELS)), "eval_data is a tuple of 2 tensors", "list of batches", "eval_data=DataLoader(TensorDataset("),
    Mistake("evaluate(tensor)", lambda: trainer().evaluate(INPUTS), "one Tensor", "batches", "DataLoader(TensorDataset("),
    Mistake("predict(tensor)", lambda: trainer().predict(INPUTS), "predict(data) is one Tensor", "batches", "DataLoader("),
    Mistake("predict(dataset)", lambda: trainer().predict(TensorDataset(INPUTS)), "a data set (TensorDataset)", "batches", "DataLoader(data, batch_size=32)"),
    Mistake("labels only in training data", lambda: fit(train_data=[(INPUTS,)]), "float32 of shape (16, 4)", "batches (inputs, targets)", "targets="),
    # batches that do not fit
    Mistake("the wrong width", lambda: classify(model=model(width=5)), "float32 of shape (16, 4)", "takes 5 features", "torch.nn.Linear(4, …)", listed=True),
    Mistake("uint8 inputs", lambda: classify((INPUTS * 10).to(torch.uint8)), "uint8 of shape (16, 4)", "the model's weights float32", "inputs.float() / 255", listed=True),
    Mistake("float64 inputs", lambda: classify(INPUTS.double()), "float64 of shape (16, 4)", "the model's weights float32", "inputs.to(torch.float32)", listed=True),
    Mistake("integer inputs", lambda: classify(torch.ones(16, 4, dtype=torch.long)), "int64 of shape (16, 4)", "the model's weights float32", "inputs.to(torch.float32)"),
    Mistake("half inputs", lambda: classify(INPUTS.half()), "float16 of shape (16, 4)", "the model's weights float32", "inputs.to(torch.float32)"),
    Mistake("dict batches to a plain model", lambda: fit(train_data=[{"image": INPUTS, "label": LABELS}]), "'image', 'label'", "by name", "Trainer(inputs='image', targets='label')", listed=True),
    Mistake("a dict batch whose loss gets it", lambda: fit(model=Named(), train_data=[{"inputs": INPUTS}]), "dict {'inputs': float32 of shape (16, 4)}", "The loss takes targets, and the batch, a dict, has none", "targets= a name or function"),
    Mistake("a model with two inputs", lambda: fit(model=Two(), train_data=[(INPUTS, INPUTS, LABELS)]), "float32 of shape (16, 4)", "The model gets batch[0] alone", "def forward(self, batch)".replace("def ", ""), listed=True),
    Mistake("a wrong name in inputs=", lambda: fit(train_data=[{"image": INPUTS, "label": LABELS}], inputs="images", targets="label"), "'images'", "['image', 'label']", "inputs='image'"),
    Mistake("images, channels last", lambda: classify(IMAGES, CLASSES, model=CNN), "float32 of shape (8, 32, 32, 3)", "(samples, channels, height, width)", "images.permute(0, 3, 1, 2)"),
    Mistake("grey images for three channels", lambda: classify(torch.rand(8, 1, 32, 32), CLASSES, model=CNN), "float32 of shape (8, 1, 32, 32)", "takes 3 channels", "torch.nn.Conv2d(1, …)"),
    Mistake("images without channels", lambda: classify(torch.rand(8, 32), CLASSES, model=CNN), "float32 of shape (8, 32)", "(samples, channels, height, width)", "images.unsqueeze(1)"),
    Mistake("images to a Linear", lambda: classify(torch.rand(8, 1, 28, 28), CLASSES, model=FLAT), "float32 of shape (8, 1, 28, 28)", "takes 784 features", "torch.nn.Flatten()"),
    Mistake("uint8 images", lambda: classify(torch.zeros(8, 3, 32, 32, dtype=torch.uint8), CLASSES, model=CNN), "uint8 of shape (8, 3, 32, 32)", "the model's weights float32", "inputs.float() / 255"),
    Mistake("texts", lambda: fit(train_data=[(["a", "b"], LABELS[:2])]), "inputs: list of 2", "take tensors", "torch.tensor(token_ids)"),
    Mistake("token ids beyond the vocabulary", lambda: classify(torch.full((16, 2), 50), model=nn.Sequential(nn.Embedding(10, 2), nn.Flatten(), nn.Linear(4, 3))), "int64 of shape (16, 2)", "from 0 to 9", "torch.nn.Embedding(51, …)"),
    Mistake("a last batch of one sample", lambda: classify(INPUTS[:1], LABELS[:1], model=Normed()), "float32 of shape (1, 4)", "more than one sample", "drop_last=True"),
    Mistake("a tensor on another device", lambda: classify(model=Mask()), "float32 of shape (16, 4)", "are moved to the device", "device=inputs.device"),
    Mistake("samples that cannot be counted", lambda: fit(train_data=[(torch.zeros(4, 4), torch.zeros(5))]), "sizes [4, 5]", "agree on the size of dimension 0", "define count(batch)"),
    Mistake("predict on batches of dicts", lambda: trainer().predict([{"image": INPUTS}]), "'image'", "by name", "Trainer(inputs='image'"),
    Mistake("a loader of labels first", lambda: fit(train_data=loader(LABELS, INPUTS)), "int64 of shape (8,)", "the targets are float32 of shape (8, 4)", "inputs=1, targets=0"),
    Mistake("inputs= and targets= swapped", lambda: fit(inputs=1, targets=0), "int64 of shape (8,)", "the targets are float32 of shape (8, 4)", "inputs=0, targets=1"),
    Mistake("a loader of numbers first", lambda: fit(train_data=loader(NUMBERS, INPUTS), model=model(outputs=1), loss=nn.MSELoss()), "float32 of shape (8, 1)", "the targets are float32 of shape (8, 4)", "inputs=1, targets=0"),
    Mistake("numbers before tokens", lambda: classify(NUMBERS, torch.ones(16, 3, dtype=torch.long), model=nn.Embedding(10, 2)), "float32 of shape (16, 1)", "the targets are int64 of shape (16, 3)", "inputs=1, targets=0"),
    Mistake("the inputs as targets", lambda: fit(targets=0), "targets: float32 of shape (8, 4)", "what the model gets as its inputs", "targets=1"),
    Mistake("names for a list", lambda: fit(inputs="x", targets="y"), "has nothing at 'x'", "indices from 0 to 1", "inputs=0, targets=1"),
    Mistake("a wrong name in targets=", lambda: fit(train_data=[{"x": INPUTS, "y": LABELS, "name": "a"}], inputs="x", targets="label"), "'label'", "['x', 'y', 'name']", "targets='y'"),
    Mistake("a misspelt name in targets=", lambda: fit(train_data=[{"x": INPUTS, "klass": LABELS, "id": LABELS}], inputs="x", targets="class"), "'class'", "['x', 'klass', 'id']", "targets='klass'"),
    Mistake("an index beyond the batch", lambda: fit(targets=2), "has nothing at 2", "indices from 0 to 1", "targets=1."),
    Mistake("a name for a tensor", lambda: fit(train_data=[INPUTS], inputs="x"), "has nothing at 'x'", "The batch is one Tensor", "omit inputs="),
    Mistake("outputs= of a model that returns a tensor", lambda: fit(outputs="logits"), "'logits'", "returns one Tensor", "omit outputs="),
    Mistake("a list of inputs", lambda: trainer(inputs=["a", "b"]), "inputs=['a', 'b'] is a list", "one name, one index or a function", "inputs=lambda batch: (batch['a'], batch['b'])"),
    Mistake("grey images without channels", lambda: classify(torch.rand(8, 32, 32), CLASSES, model=CNN), "float32 of shape (8, 32, 32)", "no dimension of channels", "images.unsqueeze(1)"),
    Mistake("series without channels", lambda: classify(model=nn.Conv1d(1, 2, 3)), "float32 of shape (16, 4)", "(samples, channels, length)", "inputs.unsqueeze(1)"),
    Mistake("series, channels last", lambda: classify(torch.rand(8, 32, 3), CLASSES, model=nn.Conv1d(3, 2, 3)), "float32 of shape (8, 32, 3)", "(samples, channels, length)", "inputs.transpose(1, 2)"),
    Mistake("volumes without channels", lambda: classify(torch.rand(8, 9, 9, 9), CLASSES, model=nn.Conv3d(1, 2, 3)), "float32 of shape (8, 9, 9, 9)", "no dimension of channels", "inputs.unsqueeze(1)"),
    Mistake("a layer without a shape", lambda: trainer(model=nn.Sequential(nn.LazyLinear(3))), "Sequential.0.weight has no shape", "an optimizer needs parameters", "model(next(iter(loader))[0])"),
    Mistake("single samples", lambda: fit(train_data=DataLoader(TensorDataset(INPUTS, LABELS), batch_size=None)), "batch_size=None", "items are batches", "batch_size=32"),
    Mistake("a collate_fn without return", lambda: fit(train_data=DataLoader(TensorDataset(INPUTS), 8, collate_fn=nothing)), "A batch is None", "collate_fn", "Write a return statement"),
    Mistake("an evaluation of None", lambda: trainer().evaluate([None]), "inputs: None", "The data yielded None", "Write a return statement"),
    # samples that make no batch
    Mistake("images of PIL", lambda: samples(Image(), 1), "PIL", "a batch is made of tensors", "transform=torchvision.transforms.ToTensor()"),
    Mistake("samples of several lengths", lambda: samples(INPUTS[0], INPUTS[0, :2]), "got [4] at entry 0 and [2] at entry 1", "different shapes", "torch.nn.utils.rnn.pad_sequence"),
    Mistake("lists of several lengths", lambda: trainer().evaluate(DataLoader([[[1, 2]], [[1]]], 2)), "equal size", "different shapes", "pad_sequence"),
    Mistake("samples of None", lambda: trainer().predict(DataLoader([None, None], 2)), "NoneType", "is None", "Write a return statement"),
    Mistake("samples with other keys", lambda: samples({"x": 1, "y": 2}, {"x": 1}), "'y'", "different keys", "Return the same keys"),
    Mistake("samples of objects", lambda: samples(object(), object()), "object", "tensors, arrays, numbers, texts", "torch.tensor(…)"),
    Mistake("a model given as data to evaluate", lambda: trainer().evaluate(model()), "a model (Linear)", "an iterable of batches", "torch.utils.data.DataLoader(dataset"),
    Mistake("a Runtime's data", lambda: hocket.Runtime(device="cpu").setup_data(TensorDataset(INPUTS)), "a data set (TensorDataset)", "batches", "DataLoader(data, batch_size=32)"),
    Mistake("a nested loader", lambda: fit(train_data=[DataLoader(TensorDataset(INPUTS), 8)]), "a list of 1 loaders", "one iterable of batches", "eval_data={'first': loader"),
]  # fmt: skip

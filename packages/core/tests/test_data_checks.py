"""What is not batches is refused by name wherever data is given, and data that ends early is not taken for an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hocket

X, Y = torch.rand(16, 4), torch.arange(16) % 2


class Computed(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.rand(4, 4), torch.zeros(4, dtype=torch.long)


class Indexed:
    """A data set that does not say so: iterated by its indices, it would never end."""

    def __getitem__(self, index: int) -> Any:
        return X[0], Y[0]


def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame({"a": [1.0], "b": [2.0]})


REFUSED = {
    "a TensorDataset": lambda: TensorDataset(X, Y),
    "a data set": Computed,
    "indices only": Indexed,
    "(X, Y)": lambda: (X, Y),
    "[X, Y]": lambda: [X, Y],
    "equal tensors": lambda: [X, X],
    "scalars": lambda: list(Y),
    "a tensor": lambda: X,
    "an array": lambda: np.zeros((4, 4)),
    "arrays": lambda: [np.zeros((4, 4)), np.zeros(4)],
    "a table": frame,
    "text": lambda: "train.csv",
    "samples": lambda: [(X[0], 1), (X[1], 0)],
    "samples with scalar tensors": lambda: list(TensorDataset(X, Y)),
    "a number": lambda: 3,
    "a function": lambda: lambda: [(X, Y)],
}


def trainer(**arguments: Any) -> hocket.Trainer:
    return hocket.Trainer(
        model=nn.Linear(4, 2), loss=nn.functional.cross_entropy, optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        **arguments,
    )  # fmt: skip


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_samples_are_not_taken_for_batches(make) -> None:
    given, legal = make(), trainer(train_data=[(X, Y)])
    places = {
        "train_data": lambda: trainer(train_data=given),
        r"train_data ": lambda: legal.fit(train_data=given),
        "eval_data": lambda: trainer(eval_data=given),
        r"eval_data\['test'\]": lambda: trainer(eval_data={"test": hocket.EvalSet(given)}),
        "eval_data is": lambda: legal.evaluate(given),
    }
    if isinstance(given, str):
        del places["eval_data is"]  # evaluate(text) is about a checkpoint
    for place, refuse in places.items():
        with pytest.raises(TypeError, match=rf"^{place}.*(DataLoader|iterable of batches)"):
            refuse()
    if not (isinstance(given, list) and given[0] is given[-1]):  # equal tensors are two batches to predict
        with pytest.raises(TypeError, match=r"^predict\(data\)"):
            trainer().predict(given)


def test_a_dict_of_tensors_is_not_batches() -> None:
    with pytest.raises(TypeError, match="train_data is a dict"):
        trainer(train_data={"x": X, "y": Y})
    with pytest.raises(TypeError, match=r"eval_data\['x'\] is one Tensor"):
        trainer(eval_data={"x": X, "y": Y})


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from [(X, Y)] * 2


@pytest.mark.parametrize(
    "batches",
    [[(X, Y)] * 2, ((X, Y), (X, Y)), deque([(X, Y)] * 2), Stream(), DataLoader(TensorDataset(X, Y), 8)],
    ids=["list", "tuple", "deque", "stream", "loader"],
)
def test_batches_are_batches(batches) -> None:
    assert trainer(train_data=batches, eval_data=batches).fit().timestamp.batch == 2
    assert len(trainer().predict([X, X])) == 2


# --- data that ends early


class Broken(Dataset):
    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            next(iter(()))
        return X[0], Y[0]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("bad", "after"), [(13, 1), (31, 3)])
def test_stop_iteration_in_a_data_set_is_no_end_of_an_epoch(workers, bad, after) -> None:
    loader = DataLoader(Broken(bad), 8, num_workers=workers)
    with pytest.raises(ValueError, match=f"ended after {after} batches.*4 in all.*Broken raised StopIteration"):
        trainer(train_data=loader).fit()
    with pytest.raises(ValueError, match=f"ended after {after} batches"):
        trainer(eval_data=loader).evaluate()
    assert trainer(train_data=loader, limit_train=after).fit().timestamp.batch == after
    assert trainer(train_data=DataLoader(Broken(-1), 8, num_workers=workers)).fit().timestamp.batch == 4

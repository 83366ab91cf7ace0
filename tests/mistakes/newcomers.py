"""A newcomer's mistake, the grade of the answer, and the small run in which it is made.

An answer has three parts: what was given, what is allowed, and what to type. Its grade is the number of parts that it has. A
mistake whose meaning is plain may also be accepted: then the run equals the one that is spelled out, which counts 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(3, (16,), generator=torch.Generator().manual_seed(2))
NUMBERS = INPUTS.sum(1, keepdim=True)


@dataclass(frozen=True)
class Mistake:
    """A mistake that is answered by an error, whose message and notes have these texts; None for a part that is missing."""

    name: str
    make: Callable[[], Any]
    given: str | None
    allowed: str | None
    write: str | None
    #: Whether the list of 102 mistakes of the first review has it.
    listed: bool = False

    @property
    def grade(self) -> int:
        return sum(part is not None for part in (self.given, self.allowed, self.write))

    def answer(self) -> str:
        """The message of the error and its notes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = self.make()
            except Exception as error:
                return "\n".join([str(error), *getattr(error, "__notes__", ())])
        raise AssertionError(f"{self.name}: nothing was raised; it gave {made!r}")


@dataclass(frozen=True)
class Accepted:
    """A mistake that is understood: it trains, and its weights and metrics equal those of the explicit spelling."""

    name: str
    make: Callable[[], hocket.Trainer]
    explicit: Callable[[], hocket.Trainer]
    #: A text of the warning, for a guess; empty where nothing is guessed.
    said: str = ""
    listed: bool = False
    grade: int = 3


def model(width: int = 4, outputs: int = 3) -> nn.Module:
    """The same linear model each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(width, outputs)


def loader(inputs: Any = INPUTS, targets: Any = LABELS, batch_size: int = 8) -> DataLoader[Any]:
    """Batches of (inputs, targets)."""
    return DataLoader(TensorDataset(inputs, targets), batch_size)


def trainer(**changes: Any) -> hocket.Trainer:
    """A Trainer that works, but for the changes."""
    given: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": "sgd(lr=0.1)", "duration": "1ep", "device": "cpu"}
    given |= changes
    if "model" not in given:
        given["model"] = model()
    if "train_data" not in given:
        given["train_data"] = loader()
    return hocket.Trainer(**given)


def fit(**changes: Any) -> Any:
    """Train a Trainer that works, but for the changes."""
    return trainer(**changes).fit()


def classify(inputs: Any = INPUTS, targets: Any = LABELS, **changes: Any) -> Any:
    """Train on other inputs and targets of classes."""
    return fit(train_data=[(inputs, targets)], **changes)


def regress(inputs: Any = INPUTS, targets: Any = NUMBERS, **changes: Any) -> Any:
    """Train on other inputs and targets of one number."""
    return fit(train_data=[(inputs, targets)], **{"loss": nn.MSELoss(), "model": model(outputs=1), **changes})


class Module(nn.Module):
    """A model with one layer and the forward that a subclass defines."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = model()


def of_library(module: str, name: str, *bases: type, **members: Any) -> Any:
    """A class as another library defines it, which is not installed here."""
    return type(name, bases or (object,), {"__module__": module, **members})


def nothing(*args: Any, **kwargs: Any) -> None:
    """A method of such a class."""

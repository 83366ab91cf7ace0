"""Tools that read the data of a run beside it leave the order of its samples, and so its weights, as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
import hocket_tools

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class Seen(hocket.Callback):
    """Note the samples of training and evaluation, while it is on."""

    def __init__(self) -> None:
        self.on, self.samples = True, []

    def batch_start(self, state: hocket.State) -> None:
        if self.on:
            self.samples.append(state.batch[0][:, 0].tolist())

    def eval_batch_start(self, state: hocket.State) -> None:
        self.batch_start(state)


def loader(seed: int) -> DataLoader[Any]:
    """Return batches of 10 samples, shuffled by a generator of their own; a sample's first number is its name."""
    samples = TensorDataset(torch.arange(10.0).view(10, 1) / 10 + torch.zeros(10, 4), torch.arange(10) % 3)
    return DataLoader(samples, 4, shuffle=True, generator=torch.Generator().manual_seed(seed))


def trained(between: Callable[[hocket.Trainer], Any], **changes: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train two epochs, and between them use a tool; return the samples of both, and the final weights."""
    torch.manual_seed(0)
    seen = Seen()
    trainer = hocket.Trainer(
        **{
            "model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), "loss": "cross_entropy", "seed": 1,
            "train_data": loader(1), "eval_data": {"test": loader(2)}, "metrics": ["accuracy"], "optimizer": "sgd(lr=0.1)",
            "device": "cpu", **changes, "callbacks": [seen, *changes.get("callbacks", ())],
        }
    )  # fmt: skip
    trainer.fit("1ep")
    seen.on = False
    between(trainer)
    seen.on = True
    trainer.fit("1ep")
    return seen.samples, trainer.model_state_dict()


def nothing(trainer: hocket.Trainer) -> None:
    pass


def compare(trainer: hocket.Trainer) -> None:
    hocket_tools.compare_compressed(trainer, {}, repeats=1, resamples=0)


EXPORT = [{"export": {"to": "safetensors", "every": "1ba"}}]


@pytest.mark.filterwarnings("ignore:.*draws samples in random order")
@pytest.mark.parametrize(
    ("between", "changes"),
    [
        pytest.param(nothing, {"callbacks": EXPORT}, id="export callback"),
        pytest.param(nothing, {"callbacks": EXPORT, "eval_data": None, "metrics": None}, id="export of training data"),
        pytest.param(lambda trainer: hocket_tools.export(trainer, "safetensors", "a"), {}, id="export"),
        pytest.param(
            lambda trainer: hocket_tools.export(trainer, "safetensors", "a", data=trainer.state.eval_sets["test"].data),
            {}, id="export with data",
        ),
        pytest.param(compare, {}, id="compare_compressed"),
        pytest.param(compare, {"limit_eval": 1}, id="compare_compressed of a part"),
        pytest.param(lambda trainer: hocket_tools.judge(trainer, "test"), {}, id="judge"),
        pytest.param(lambda trainer: hocket_tools.tune(trainer, "lr", steps=20, run_steps=0), {}, id="tune"),
        pytest.param(nothing, {"callbacks": [{"journal": {"every": "1ba"}}]}, id="journal"),
    ],
)  # fmt: skip
def test_a_tool_leaves_the_order_of_samples(between: Any, changes: Any, tmp_path: Path) -> None:
    samples, weights = trained(between, **changes)
    expected, plain = trained(nothing, **{name: value for name, value in changes.items() if name != "callbacks"})
    assert samples == expected
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert len({str(each) for each in expected}) > 3, "the loaders shuffle"

"""Arguments that differ from rank to rank are refused by name, before anything is trained or anybody waits."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.run.same_on_ranks import text
from hocket.schedules import Cosine
from hocket_testkit.ranks import run_ranks

DATA = TensorDataset(torch.randn(16, 8), torch.randint(3, (16,)))


def sgd(rate):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def trainer(folder, **changes):
    arguments = {
        "model": nn.Linear(8, 3), "train_data": DataLoader(DATA, batch_size=4), "duration": "1ep", "optimizer": sgd(0.1),
        "strategy": "ddp", "device": "cpu", "folder": folder, "run_name": "run", "loss": F.cross_entropy, **changes,
    }  # fmt: skip
    return hocket.Trainer(**arguments)


#: Arguments of rank 0 and of rank 1, and what the message says.
DIFFERENT = {
    "clip": ({}, {"clip_gradients": 0.05}, "clip_gradients: 0.05 instead of None"),
    "global batch": ({"global_batch": 8}, {"global_batch": 16}, "global_batch: 16 instead of 8"),
    "duration": ({}, {"duration": "2ep"}, "duration: '2ep' instead of '1ep'"),
    "seed": ({"seed": 1}, {"seed": 2}, "seed: 2 instead of 1"),
    "interval": ({}, {"log_every": hocket.Interval("3ba")}, "log_every: .*3ba.* instead of '10ba'"),
    "limit": ({"limit_train": 2}, {}, "limit_train: None instead of 2"),
    "schedule": ({"schedule": Cosine()}, {"schedule": Cosine(t_max="2ep")}, "schedule: .*instead of"),
    "shape": ({}, {"model": nn.Linear(8, 4)}, r"weight \(4, 8\) torch.float32.* instead of .*weight \(3, 8\)"),
    "frozen": ({}, {"model": nn.Linear(8, 3).requires_grad_(False)}, "weight .* frozen"),
    "settings": ({}, {"optimizer": sgd(0.2)}, "optimizer: SGD of 2 parameters, .*lr: 0.2.* instead of"),
    "labels": ({"eval_data": {"a": [1]}}, {"eval_data": {"b": [1]}}, "eval_data: 'b' .* instead of 'a'"),
    "no data": ({}, {"train_data": None}, "train_data: nothing instead of given"),
    "resume": ({}, {"resume": "auto"}, "resume: given instead of nothing"),
    "plug-ins": ({}, {"callbacks": ["lr-monitor"]}, "different plug-ins from rank 0: .*lr-monitor"),
}
SAME = {"microbatch": ({"microbatch": 1}, {"microbatch": 2}), "weights": ({}, {"model": nn.Linear(8, 3)})}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")

    def rank_main(rank):
        said = {}
        for name, each in {**DIFFERENT, **SAME}.items():
            try:
                trainer(folder, **each[rank]).fit()
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
        one = trainer(folder, eval_data=DataLoader(DATA, batch_size=4))
        for name, act in {
            "fit": lambda: one.fit("2ep" if rank else "1ep"),
            "evaluate": lambda: one.evaluate({"other": DataLoader(DATA)} if rank else None),
        }.items():
            try:
                act()
            except ValueError as error:
                said[name] = str(error)
        return said

    return run_ranks(rank_main, 2, timeout=120)


@pytest.mark.filterwarnings("ignore:Every rank reads")
@pytest.mark.parametrize("name", DIFFERENT)
def test_what_has_to_be_equal_is_compared(found, name):
    for said in found:
        assert "Rank 1 " in said[name] and re.search(DIFFERENT[name][2], said[name]), said[name]


def test_what_may_differ_may(found):
    for said in found:
        assert not SAME.keys() & said.keys(), said


def test_what_a_fit_or_an_evaluation_is_asked_for_is_compared(found):
    for said in found:
        assert "fit(duration): '2ep' instead of '1ep'" in said["fit"]
        assert "evaluate(data): 'other'" in said["evaluate"] and "instead of 'eval'" in said["evaluate"]


def test_descriptions_are_those_of_any_process():
    class Own:
        pass

    def function():
        pass

    assert text([Own(), function, nn.Linear(1, 1), {"a": 1.5}]) == text([Own(), function, nn.Linear(1, 1), {"a": 1.5}])
    assert " at 0x" not in text([Own(), function, iter(())])

"""The best checkpoint on several ranks: one answer, and its weights evaluated, in shards too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_data, make_model, make_trainer, same
from torch.nn import functional as F

import hocket
from hocket.basics.dtensors import local
from hocket.checkpoints import read_weights
from hocket_testkit.ranks import run_ranks


def _train(strategy: Any, algorithms: list[Any], mode: Any, folder: Path) -> list[Any]:
    """``mode`` is the one by which the best is not the last."""

    def rank_main(rank: int) -> Any:
        trainer = make_trainer(
            device="cpu", strategy=strategy, global_batch=28, algorithms=algorithms, duration="4ep", seed=1, folder=folder,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5), eval_every="2ba",
            eval_data={"test": make_data(40, shuffle=False)},
            checkpoints=hocket.Checkpoints(folder / "a", every=None, best=("test/loss", mode, 1)),
        )  # fmt: skip
        result = trainer.fit()
        before = [local(each).detach().clone() for each in trainer.state.task.parameters()]
        evaluated = trainer.evaluate("best")
        kept = same([local(each).detach() for each in trainer.state.task.parameters()], before)
        return result.best, result.metrics, evaluated, kept, trainer.evaluate()["test/loss"]

    return run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp", pytest.param("tensor-parallel", marks=pytest.mark.long), {"local-sgd": {"every": 4}}],
    ids=str,
)
def test_every_rank_evaluates_the_best(strategy: Any, tmp_path: Path) -> None:
    if strategy == "tensor-parallel":
        strategy = {"tensor-parallel": {"plan": {"0": "colwise", "3": "rowwise"}}}
    ranks = _train(strategy, [], "max", tmp_path)
    best, metrics, evaluated, _, _ = ranks[0]
    assert all(each[0] == best and each[2] == evaluated and each[3] for each in ranks)
    assert evaluated["test/loss"] == pytest.approx(best.value, rel=1e-6) and best.value > metrics["test/loss"]
    assert all(each[4] == pytest.approx(metrics["test/loss"], rel=1e-6) for each in ranks)
    model = make_model()
    model.load_state_dict(read_weights(best.path))
    inputs, targets = map(torch.cat, zip(*make_data(40, shuffle=False), strict=True))
    with torch.no_grad():
        assert F.cross_entropy(model(inputs), targets).item() == pytest.approx(best.value, rel=1e-5)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_with_averages(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("hocket_general")
    for best, metrics, evaluated, kept, again in _train(strategy, [{"ema": {"half_life": "2ba"}}], "min", tmp_path):
        assert evaluated["test/loss"] == pytest.approx(best.value, rel=1e-6) and kept
        assert again == pytest.approx(metrics["test/loss"], rel=1e-6)
        assert best.value != pytest.approx(metrics["test/loss"], rel=1e-4), "the test would not see the difference"

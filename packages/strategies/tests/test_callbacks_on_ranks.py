"""Every installed callback on two ranks: no rank waits for another, no weight changes, and values have the usual names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import callback_config, installed_callbacks, make_data, make_model, make_trainer, momentum, same, weights
from torch import Tensor

from hocket.loggers.memory import MemoryLogger
from hocket_testkit.ranks import run_ranks


def train(folder: Path, callbacks: list[Any], **changes: Any) -> tuple[list[str], list[Tensor]]:
    """Train 6 batches, of which the last of an epoch has samples for one rank; return the names of values, and weights."""
    logger = MemoryLogger()
    trainer = make_trainer(
        model=make_model(dropout=0.5), train_data=make_data(57, 14), global_batch=28, eval_data=make_data(25),
        eval_every="2ba", optimizer=momentum, schedule="linear", log_every="1ba", seed=1, device="cpu", folder=folder,
        loggers=[logger, "jsonl", "console"], callbacks=callbacks, **changes,
    )  # fmt: skip
    with trainer:
        trainer.fit()
    kinds = (logger.metrics, logger.images, logger.tables, logger.texts, logger.histograms)
    return sorted(name for kind in kinds for name in kind), weights(trainer)


def train_on_ranks(folder: Path, *callbacks: Any) -> list[tuple[list[str], list[Tensor]]]:
    return run_ranks(lambda rank: train(folder, list(callbacks), strategy="ddp"), 2, timeout=30.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    [(_, first), (_, second)] = train_on_ranks(tmp_path_factory.mktemp("plain"))
    assert same(first, second)
    return first


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:energy-monitor")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(installed_callbacks(), id="all"),
        *(pytest.param([name], id=name, marks=pytest.mark.long) for name in installed_callbacks()),
    ],
)
def test_callbacks_train_on_two_ranks(names: list[str], plain: list[Tensor], tmp_path: Path) -> None:
    configs = [{name: callback_config(name, 2)} for name in names]
    [(logged, first), (by_other, second)] = train_on_ranks(tmp_path / "ranks", *configs)
    assert same(first, plain) and same(second, plain)
    assert logged == train(tmp_path / "one", configs)[0] and by_other == []

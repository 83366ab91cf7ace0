"""Two runs in one place, by accident, in any order: nothing that the first has written is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.checkpoints import CheckpointError
from hocket_checkpoints.storage.locks import InUse

pytestmark = pytest.mark.filterwarnings(
    "ignore:callback 'at'.left changed in training"
)  # it counts batches of the process
BATCHES = [(torch.full((2, 3), float(number)), torch.zeros(2, 1)) for number in range(3)]


def make(place: str, duration: int = 4, run_name: str | None = "run", **changes: Any) -> hocket.Trainer:
    """Rows and checkpoints of every batch."""
    policy = {"every": "1ba", "keep": None, **changes.pop("policy", {})}
    arguments = {
        "model": nn.Linear(3, 1), "loss": nn.functional.mse_loss, "train_data": BATCHES, "optimizer": "sgd(lr=0.01)",
        "duration": f"{duration}ba", "log_every": "1ba", "loggers": ["jsonl"], "device": "cpu", "seed": 1,
        "run_name": run_name, "checkpoints": hocket.Checkpoints(place, **policy),
    }  # fmt: skip
    return hocket.Trainer(**{**arguments, **changes})


def written(place: str) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Every file of every checkpoint, and the rows without clocks."""
    if "://" in place:
        fsspec = pytest.importorskip("fsspec")
        fs, root = fsspec.url_to_fs(place, use_listings_cache=False, skip_instance_cache=True)
        files = {path: fs.cat_file(path) for path in fs.find(root) if "/ep" in path}
    else:
        files = {str(path): path.read_bytes() for path in Path(place).glob("ep*/*")}
    rows = [json.loads(line) for path in Path("runs").glob("*/*.jsonl") for line in path.read_text().splitlines()]
    return files, [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


class At(hocket.Callback):
    """Acts once, so many batches after the fit began."""

    def __init__(self, batches: int, act: Any) -> None:
        self.left, self.act = batches, act

    def batch_end(self, state: hocket.State) -> None:
        self.left -= 1
        if not self.left:
            self.act()


def fresh(place: str, there: bool, duration: int) -> None:
    """A new run that would keep one checkpoint only."""
    if not there:
        make(place, duration).fit()
        return
    with pytest.raises(
        CheckpointError, match=r"has checkpoints of run 'run'.*resume='auto'.*another folder.*overwrite=True"
    ):
        make(place, duration, policy={"keep": 1})
    with pytest.raises(ValueError, match=r"files of another run.*another run_name than 'run'"):
        make(place, duration, checkpoints=None)


def resume(place: str, there: bool, duration: int) -> None:
    make(place, duration, resume="auto").fit()


def fast_dev_run(place: str, there: bool, duration: int) -> None:
    result = make(place, duration, resume="auto", fast_dev_run=2, policy={"keep": 1}).fit("9ep")
    assert result.timestamp.batch == 2 and not result.checkpoints
    make(place, duration, resume="auto", overfit=1, policy={"keep": 1}).fit()


def killed(place: str, there: bool, duration: int) -> None:
    def run() -> None:
        make(place, duration, resume="auto", callbacks=[At(2, lambda: os.kill(os.getpid(), signal.SIGKILL))]).fit()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def two_at_once(place: str, there: bool, duration: int) -> None:
    def second() -> None:
        with pytest.raises(InUse, match=r"in use: run 'run' \(process \d+ on .*another folder"):
            make(place, duration, resume="auto", run_name=None).fit()
        refused.append(True)

    refused: list[bool] = []
    make(place, duration, resume="auto", callbacks=[At(2, second)]).fit()
    assert refused


ACTIONS = [fresh, resume, fast_dev_run, killed, two_at_once]


@pytest.mark.long
@pytest.mark.parametrize("first", range(5))
def test_nothing_of_the_first_is_lost(first: int) -> None:
    check_order("checkpoints", [ACTIONS[(first + step * (first % 4 + 1)) % 5] for step in range(6)])
    assert not Path("checkpoints/.lock").exists() or first == 3


def check_order(place: str, actions: list[Any], batches: int = 4) -> None:
    before = written(place)
    for number, act in enumerate(actions, 1):
        act(place, bool(before[0]), batches * number)
        files, rows = written(place)
        assert before[0].items() <= files.items() and rows[: len(before[1])] == before[1], act
        if act is fast_dev_run:
            assert (files, rows) == before
        before = files, rows
    logged = [row["batch"] for row in rows if "batch" in row]
    assert logged == sorted(logged) and set(logged) == set(range(1, logged[-1] + 1))


@pytest.fixture
def bucket() -> Iterator[str]:
    """A folder in a bucket of a server here."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}", "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for key, value in variables.items():
            patch.setenv(key, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket/run"
    server.stop()


@pytest.mark.long
def test_nothing_of_the_first_is_lost_on_s3(bucket: str) -> None:
    check_order(bucket, [killed, fresh, resume, two_at_once, fast_dev_run], batches=2)

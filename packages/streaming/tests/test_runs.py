"""Runs on streams: the same global batches on any number of ranks and workers, in every format, and the rest after a kill."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
import pytest
import torch
from data_sets import KINDS, SAMPLES
from stand_in import Rule, StandIn

import hocket
import hocket_streaming
from hocket_testkit import RankError, run_ranks

BATCH = 24


def tensors(sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
    number = data_sets.numbers(sample)
    return torch.tensor([number / SAMPLES]), torch.tensor(number)


class Watch(hocket.Callback):
    """Append the samples of each batch, over all ranks, to a file; end the process in some batch."""

    def __init__(self, file: Path, kill_at: int | None = None) -> None:
        self.file, self.kill_at = file, kill_at

    def batch_end(self, state: hocket.State) -> None:
        mine = state.batch[1].tolist() if state.rank_samples else []
        samples = [number for each in state.bus.all_gather_object(mine) for number in each]
        if state.strategy.rank == 0:
            with self.file.open("a") as out:
                out.write(json.dumps([state.timestamp.batch, samples]) + "\n")
        if self.kill_at is not None and state.timestamp.batch >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(
    file: Path, path: str, *, kill_at: int | None = None, epochs: int = 1, folder: Path | None = None, **stream: Any
) -> None:
    loader = hocket_streaming.stream(path, transform=tensors, window=2, lanes=4, **stream)
    saving = (
        {} if folder is None else {"checkpoints": {"every": "1ba", "folder": str(folder), "keep": 3}, "resume": "auto"}
    )
    hocket.Trainer(
        model=torch.nn.Linear(1, 1), loss=lambda outputs, batch: outputs.float().square().mean(), inputs=0, targets=1,
        optimizer="sgd(lr=0.01)", train_data=loader, global_batch=BATCH, duration=f"{epochs}ep", seed=7,
        callbacks=[Watch(file, kill_at)], device="cpu", **saving,
    ).fit()  # fmt: skip


def read(file: Path) -> list[list[int]]:
    """The samples of each batch; of a batch that was done again after a kill, those of the last time."""
    return [samples for _, samples in sorted(dict(json.loads(line) for line in file.read_text().splitlines()).items())]


def on(ranks: int, *arguments: Any, **options: Any) -> None:
    run_ranks(lambda rank: fit(*arguments, **options), ranks, timeout=120)


#: Formats that go through other code on the way from files to samples; the order does not see the format.
QUICK = ("mds", "webdataset")


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
)
def test_global_batches_are_the_same_on_any_number_of_ranks_and_workers(kind: str, tmp_path: Path) -> None:
    path, options = data_sets.write(kind, tmp_path / "data")
    quick = kind in QUICK
    cases = [(1, 0), (2, 0)] if quick else [(1, 2), (2, 0), (3, 2), (4, 0)]
    if "STREAMING_PYTHONS" in os.environ:  # in nox -s streaming
        cases = [(ranks, workers) for ranks in (1, 2, 3, 4) for workers in (0, 2)]
    found = []
    for ranks, workers in cases:
        file = tmp_path / f"{ranks}-{workers}"
        on(ranks, file, path, options=options, num_workers=workers)
        found.append(read(file))
    assert sorted(sum(found[0], start=[])) == list(range(SAMPLES))  # noqa: RUF017
    assert len(found[0]) == SAMPLES // BATCH and all(each == found[0] for each in found)


@pytest.mark.long
def test_spawned_workers_read_the_same(tmp_path: Path) -> None:
    path, options = data_sets.write("mds", tmp_path / "data")
    how = {"options": options, "transform": None, "batch_size": BATCH, "seed": 7, "collate_fn": list}
    alone = list(hocket_streaming.stream(path, **how))
    spawned = hocket_streaming.stream(path, **how, num_workers=2, multiprocessing_context="spawn")
    assert list(spawned) == alone and sorted(each["number"] for batch in alone for each in batch) == list(
        range(SAMPLES)
    )


def upload(folder: str, server: StandIn) -> None:
    root = Path(folder)
    for file in root.rglob("*"):
        if file.is_file():
            server.files[f"bucket/data/{file.relative_to(root)}"] = file.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", 2))))
def test_killed_runs_go_on_elsewhere_as_if_nothing_had_happened(seed: int, tmp_path: Path) -> None:
    """4 → 2 → 1 → 4 ranks over two epochs, a store with faults, a cache of less than the data; SEEDS=20 tries more."""
    drawn = random.Random(seed)
    path, _ = data_sets.write("mds", tmp_path / "data", chunk=4)
    whole = tmp_path / "whole"
    on(1, whole, path, epochs=2)
    largest = max(file.stat().st_size for file in Path(path).glob("*.mds"))
    server = StandIn(latency=0.002)
    try:
        upload(path, server)
        rules = [Rule(".mds", 500, 3), Rule(".mds", "cut", 2), Rule(".mds", "slow", 2, 0.1), Rule(".mds", 503, 2)]
        kills = sorted(drawn.sample(range(1, 2 * SAMPLES // BATCH), 3))
        cache, limit = tmp_path / "cache", 20 * (largest + 64)
        watched = Peak(cache)
        for ranks, kill_at in zip((4, 2, 1, 4), (*kills, None), strict=True):
            server.rules[:] = drawn.sample(rules, 2)
            how = {"cache": str(cache), "cache_limit": limit, "storage_options": server.options()}
            arguments = {
                "epochs": 2,
                "kill_at": kill_at,
                "folder": tmp_path / "checkpoints",
                "num_workers": drawn.choice([0, 2]),
            }
            with watched:
                if kill_at is None:
                    on(ranks, tmp_path / "killed", "s3://bucket/data", **arguments, **how)
                else:
                    with pytest.raises(RankError, match="SIGKILL"):
                        on(ranks, tmp_path / "killed", "s3://bucket/data", **arguments, **how)
    finally:
        server.close()
    expected = read(whole)
    assert read(tmp_path / "killed") == expected
    for epoch in (expected[: len(expected) // 2], expected[len(expected) // 2 :]):
        assert sorted(number for batch in epoch for number in batch) == list(range(SAMPLES))
    assert watched.peak <= limit + 12 * (largest + 64)
    assert not list(cache.glob("*.part"))


class Peak:
    """The most bytes that a folder had while a block ran, looked at every few milliseconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.peak = folder, 0

    def __enter__(self) -> None:
        import threading

        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            try:
                sizes = [entry.stat().st_size for entry in os.scandir(self.folder) if not entry.name.startswith(".")]
            except FileNotFoundError:
                continue
            self.peak = max(self.peak, sum(sizes))


def test_a_resumed_epoch_fetches_nothing_that_only_past_batches_used(tmp_path: Path) -> None:
    path, _ = data_sets.write("mds", tmp_path / "data", samples=960, chunk=24)
    server = StandIn()
    try:
        upload(path, server)
        loader = hocket_streaming.stream(
            "s3://bucket/data",
            batch_size=24,
            seed=1,
            lanes=4,
            window=2,
            cache=str(tmp_path / "cache"),
            storage_options=server.options(),
        )
        order, dataset = loader.batch_sampler, loader.streams[0]
        starts = np.cumsum(dataset.sizes)
        lists = list(order.after(36)[0])
        for samples in lists:
            dataset.__getitems__(samples)
        needed = {int(np.searchsorted(starts, sample, "right")) for samples in lists for sample in samples}
        fetched = {entry[1] for entry in server.log if entry[0] == "GET" and entry[1].endswith(".mds")}
        assert len(needed) < 40 and len(fetched) == len(needed)
    finally:
        server.close()


def test_a_mixture_is_trained_on(tmp_path: Path) -> None:
    paths = {name: data_sets.write("npy", tmp_path / name, samples=size) for name, size in (("web", 96), ("code", 48))}
    streams = {
        name: hocket_streaming.stream(path, options=options, transform=tensors)
        for name, (path, options) in paths.items()
    }
    loader = hocket_streaming.mix(streams, repeats={"web": 1, "code": 2}, lanes=4, window=2)
    watch = Watch(tmp_path / "seen")
    hocket.Trainer(
        model=torch.nn.Linear(1, 1), loss=lambda outputs, batch: outputs.square().mean(), inputs=0, targets=1,
        optimizer="sgd(lr=0.01)", train_data=loader, global_batch=24, duration="1ep", seed=7, callbacks=[watch], device="cpu",
    ).fit()  # fmt: skip
    counts = np.bincount(sum(read(tmp_path / "seen"), start=[]), minlength=96)  # noqa: RUF017
    assert (counts[:48] == 3).all() and (counts[48:] == 1).all()


@pytest.mark.long
def test_streams_are_data_like_any_other(tmp_path: Path) -> None:
    """Evaluation in the order of the data, on two ranks; a stream beside a loader; a data module."""
    path, options = data_sets.write("mds", tmp_path / "data")

    def part(number: int) -> Any:
        return lambda batch: (batch["stream"] if isinstance(batch, dict) else batch)[number]

    class Numbers(hocket.Callback):
        def __init__(self) -> None:
            self.evaluated: list[int] = []

        def eval_batch_end(self, state: hocket.State) -> None:
            mine = state.batch[1].tolist()
            self.evaluated += [number for each in state.bus.all_gather_object(mine) for number in each]

    def stream(**more: Any) -> Any:
        return hocket_streaming.stream(path, transform=tensors, options=options, batch_size=8, **more)

    class Data(hocket.data.DataModule):
        def train(self) -> Any:
            beside = torch.utils.data.DataLoader([tensors({"number": 1})] * 240, batch_size=8)
            return hocket.data.Several({"stream": stream(), "beside": beside}, "shortest")

        def eval(self) -> Any:
            return stream(shuffle=False)

    def rank_main(rank: int) -> list[int]:
        numbers = Numbers()
        trainer = hocket.Trainer(
            model=torch.nn.Linear(1, 1), loss=lambda outputs, batch: outputs.square().mean(), data=Data(), device="cpu",
            optimizer="sgd(lr=0.1)", inputs=part(0), targets=part(1), duration="1ep", callbacks=[numbers],
            batch_transform=lambda batch: batch,
        )  # fmt: skip
        trainer.fit()
        numbers.evaluated.clear()
        trainer.evaluate()
        return numbers.evaluated

    for ranks in (1, 2):
        for evaluated in run_ranks(rank_main, ranks):
            assert evaluated == list(range(SAMPLES))


def noisy(sample: Any) -> torch.Tensor:
    return tensors(sample)[0] + torch.rand(1)


@pytest.mark.long
def test_augmentation_is_that_of_the_sample_in_any_process(tmp_path: Path) -> None:
    path, options = data_sets.write("npy", tmp_path / "data")
    how = {"transform": noisy, "options": options, "batch_size": BATCH, "seed": 1, "seeded": True}
    here = torch.cat(list(hocket_streaming.stream(path, **how)))
    workers = hocket_streaming.stream(path, **how, num_workers=2)
    assert torch.equal(torch.cat(list(workers)), here) and len(here.unique()) == SAMPLES
    workers.dataset.set_epoch(1)
    assert not torch.equal(torch.cat(list(workers)), here)

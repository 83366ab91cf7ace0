"""Checkpoints of a model and its AdamW state against torch.save and plain torch.distributed.checkpoint; resuming late (8).

Everything is written to one disk, and flushed to it before a save counts as done, except where a row says otherwise. What was
there before is removed between the measurements. Each load is in a new process (a fork), into a new model and optimizer, as
after a restart; DCP and torch.save load in the way that torch documents. Files are read from the system's cache. hocket checks
the SHA-256 of what it reads, which the others do not have.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import Series, table
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_strategies.launching import forks

WIDTH, WORDS = 768, 32768


class Weights(hocket.Task):
    """The weights of a transformer, whose layers see a few sequences, and all of whose weights have gradients."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, batch_first=True) for _ in range(layers)
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Means of the outputs; as much to compute as a small batch of training."""
        outputs = self.embed(batch)
        for layer in self.layers:
            outputs = layer(outputs)
        return outputs.square().mean()

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """The output."""
        return outputs


class Timed(hocket.Checkpoints):
    """Measures how long training is held up: by the call, and by the wait for copies before the optimizer's next step."""

    held_up = 0.0

    def batch_checkpoint(self, state: hocket.State) -> None:
        """As always."""
        begin = time.perf_counter()
        super().batch_checkpoint(state)
        self.held_up += time.perf_counter() - begin

    @hocket.hookimpl(wrapper=True)
    def _then_wait_for_the_copy(self) -> Generator[None, bool, bool]:
        """As always."""
        computed = yield
        begin = time.perf_counter()
        self._writer.settle()
        self.held_up += time.perf_counter() - begin
        return computed


def run(repeats: int, layers: int, steps: int) -> dict[str, Any]:
    """Seconds of saving, of holding up training and of loading; milliseconds until a resumed epoch's next batch."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("HOCKET_BENCH_DISK")) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        torch.set_num_threads(1)  # as in the other sections: copies of several would wait for one that is held up
        size, values = _files(Path(folder), repeats, layers)
    names = list(dict.fromkeys(name for name, _ in values))
    head = [f"{size / 1e6:,.0f} MB of weights and AdamW's state", "save, s", "holds up training, s", "load, s"]
    rows = [[name, *(str(values.get((name, what), "")) for what in ("save", "block", "load"))] for name in names]
    ratios = {
        "a save, of DCP's": _ratio(values["hocket", "save"], values["DCP", "save"]),
        "held up by an asynchronous save, of a save": _ratio(values["hocket, asynchronous", "block"], values["hocket", "save"]),
        "load, of DCP's": _ratio(values["hocket", "load"], values["DCP", "load"]),
    }  # fmt: skip
    late = {step: Series(each) for step, each in _resume(repeats, steps).items()}
    pages = [
        table([head, *rows]),
        table([["", "ratio"], *([name, str(each)] for name, each in ratios.items())]),
        table(
            [[f"shuffled epoch of {steps + 100:,} steps", "resumed, until its next batch, ms"]]
            + [[f"at step {step:,}", str(each)] for step, each in late.items()]
        ),
    ]
    return {
        "seconds": {f"{name}: {what}": each.values for (name, what), each in values.items()},
        "ratio": {name: each.values for name, each in ratios.items()},
        "resume_ms": {str(step): each.values for step, each in late.items()},
        "table": "\n\n".join(pages),
    }


def _ratio(one: Series, other: Series) -> Series:
    return Series([a / b for a, b in zip(one.values, other.values, strict=True)])


def _files(folder: Path, repeats: int, layers: int) -> tuple[int, dict[tuple[str, str], Series]]:
    """Bytes of a checkpoint; seconds by contender and what it did. The first round, in which all is cold, is left out."""
    trainers = {asynchronous: _trainer(folder, Weights(layers), asynchronous) for asynchronous in (False, True)}
    for trainer in trainers.values():
        trainer.fit("1ba")
    model = Weights(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    stager = DefaultStager(StagingOptions(False, False, False, False))
    values: dict[tuple[str, str], Series] = {}

    def timed(name: str, what: str, function: Callable[[], Any]) -> Any:
        os.sync()
        begin = time.perf_counter()
        result = function()
        values.setdefault((name, what), Series()).values.append(time.perf_counter() - begin)
        return result

    def load(name: str, prepare: Callable[[], Callable[[], Any]]) -> None:
        def child(rank: int) -> float:
            function = prepare()
            begin = time.perf_counter()
            function()
            return time.perf_counter() - begin

        values.setdefault((name, "load"), Series()).values += forks.fork(child, 1, variables={}, timeout=300)

    def ours() -> Callable[[], Any]:
        model = Weights(layers)
        return lambda: _trainer(folder, model, False, resume="auto")

    def torchs() -> Callable[[], Any]:
        model = Weights(layers)
        return lambda: _torch_load(model, folder / "torch.pt")

    def dcps() -> Callable[[], Any]:
        model = Weights(layers)
        return lambda: _dcp_load(model, folder / "dcp")

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    named = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}

    def writer(flush: bool = True) -> FileSystemWriter:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        return FileSystemWriter(folder / "dcp", sync_files=flush)

    for _ in range(repeats + 1):
        for asynchronous, trainer in trainers.items():
            shutil.rmtree(folder / str(asynchronous), ignore_errors=True)
            os.sync()
            trainer.settings.checkpoints.held_up = 0.0
            trainer.fit(
                "2ba"
            )  # a checkpoint after the first; before the optimizer's step in the second its copy is over
            name, what = ("hocket, asynchronous", "block") if asynchronous else ("hocket", "save")
            values.setdefault((name, what), Series()).values.append(trainer.settings.checkpoints.held_up)
        load("hocket", ours)
        (folder / "torch.pt").unlink(missing_ok=True)
        timed("torch.save", "save", lambda: _torch_save(state, folder / "torch.pt"))
        load("torch.save", torchs)
        for flush, name in ((True, "DCP"), (False, "DCP, not flushed")):
            to = writer(flush)
            timed(name, "save", lambda to=to: dcp.save(named, storage_writer=to, no_dist=True))
        load("DCP", dcps)
        to = writer()
        started = timed("DCP, asynchronous", "block", lambda to=to: _dcp_async(state, to, stager))
        started.result()
    for each in values.values():
        del each.values[0]
    return sum(file.stat().st_size for file in (folder / "dcp").iterdir()), values


def _trainer(folder: Path, model: Weights, asynchronous: bool, **options: Any) -> Any:
    checkpoints = Timed(folder / str(asynchronous), every="2ba", keep=None, asynchronous=asynchronous)
    data = [torch.randint(WORDS, (2, 64))] * 1000
    return hocket.Trainer(
        model=model, train_data=data, duration="1000ba", device="cpu", checkpoints=checkpoints,
        optimizer=torch.optim.AdamW, folder=folder, run_name=f"checkpoints-{asynchronous}", **options,
    )  # fmt: skip


def _torch_load(model: nn.Module, path: Path) -> None:
    loaded = torch.load(path, weights_only=True)
    model.load_state_dict(loaded["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(loaded["optimizer"])


def _dcp_load(model: nn.Module, path: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _torch_save(state: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _dcp_async(state: Any, writer: FileSystemWriter, stager: DefaultStager) -> Any:
    response = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
    return getattr(response, "upload_completion", response)


class _Watch(hocket.Callback):
    """Takes the state after some steps, or tells when the first batch was there."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.trees = steps, {}
        self.first: float | None = None

    def before_train_batch(self, state: hocket.State) -> None:
        """A batch is there."""
        self.first = self.first or time.perf_counter()

    def batch_checkpoint(self, state: hocket.State, trainer: Any = None) -> None:
        """The state of a few batches is kept."""
        if state.timestamp.batch in self.steps:
            self.trees[state.timestamp.batch] = self.take()

    take: Callable[[], Any]


def _resume(repeats: int, last: int) -> dict[int, list[float]]:
    watch = _Watch(10, last)
    trainer = _shuffled(watch, last)
    watch.take = trainer.state_dict
    trainer.fit(f"{last}ba")
    trees = watch.trees
    found: dict[int, list[float]] = {step: [] for step in trees}
    for _ in range(repeats + 1):
        for step, tree in trees.items():
            watch = _Watch()
            trainer = _shuffled(watch, last)
            begin = time.perf_counter()
            trainer.load_state_dict(tree)
            trainer.fit("1ba")
            assert watch.first is not None
            found[step].append((watch.first - begin) * 1e3)
    return {step: values[1:] for step, values in found.items()}


def _shuffled(watch: _Watch, last: int) -> hocket.Trainer:
    samples = TensorDataset(torch.zeros(4 * (last + 100), 4), torch.zeros(4 * (last + 100), 2))
    return hocket.Trainer(
        model=nn.Linear(4, 2), loss=nn.functional.mse_loss, train_data=DataLoader(samples, 4, shuffle=True), device="cpu",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), duration="1ep", callbacks=[watch],
    )  # fmt: skip


if __name__ == "__main__":
    print(run(5, 14, 50_000)["table"])

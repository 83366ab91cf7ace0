"""After a search everything is bitwise as before: memory, random numbers, the position in the data, and the disk."""

from __future__ import annotations

import collections
import hashlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from support import make_data, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hocket
import hocket_tools

pytestmark = [
    pytest.mark.usefixtures("in_an_empty_folder"),
    pytest.mark.filterwarnings(
        "ignore:.* changed in training, and no checkpoint holds", "ignore:The training data has no length"
    ),
]

QUICK: dict[str, Any] = {"low": 1e-5, "high": 100.0, "steps": 24, "run_steps": 5}
CALLS = {"forward": 0}
TOTAL = 0


class Net(nn.Module):
    """Remembers in every way that checkpoints do not know, and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.3),
            nn.Linear(16, 3),
        )
        self.register_buffer("sums", torch.zeros(16), persistent=False)
        self.cache: Tensor | None = None
        self.times, self.generator = 0, np.random.default_rng(3)
        self.at: Callable[[int], None] = lambda times: None

    def forward(self, inputs: Tensor) -> Tensor:
        global TOTAL
        self.times += 1
        CALLS["forward"] += 1
        TOTAL += 1
        self.at(self.times)
        noise = self.generator.normal() + random.random() + np.random.rand() + torch.rand(1).item()
        hidden = self.norm(self.first(inputs))
        self.sums += hidden.detach().sum(0)
        self.cache = hidden.detach() + noise
        return self.last(self.drop(hidden.relu() * (1 + 1e-3 * noise)))


class Drift(hocket.Algorithm):
    """Draws from its own generator, and has no state_dict."""

    events = {hocket.Event.BATCH_END}

    def __init__(self) -> None:
        self.values: collections.deque[float] = collections.deque(maxlen=3)

    def apply(self, event: hocket.Event, state: hocket.State) -> None:
        self.values.append(torch.rand(1, generator=state.generator(self)).item())
        state.model.last.bias.data.add_(self.values[-1] * 1e-3)


class Writer(hocket.Callback):
    """Collects losses and writes."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def batch_end(self, state: hocket.State) -> None:
        self.losses.append(float(state.loss))
        Path("written.txt").write_text(repr(self.losses))


def trainer(**changes: Any) -> hocket.Trainer:
    arguments = {
        "model": Net(),
        "optimizer": "sgd(lr=0.05, momentum=0.9)",
        "schedule": "cosine(warmup=0.1dur)",
        "duration": "4ep",
        "seed": 3,
        "algorithms": ["ema", Drift(), "sam"],
        "callbacks": [Writer(), "lr-monitor", {"early-stopping": {"monitor": "test/loss", "patience": 9}}],
        "loggers": ["jsonl"],
        "run_name": "a",
        "checkpoints": "checkpoints",
        "device": "cpu",
        "eval_data": {"test": make_data()},
        "metrics": ["accuracy"],
        "train_metrics": ["accuracy"],
    }
    return make_trainer(**{**arguments, **changes})


def on_disk() -> dict[str, str]:
    files = (path for path in Path().rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def everything(of: hocket.Trainer) -> dict[str, Any]:
    """Copies of what a checkpoint holds, and of what it does not."""
    net = of.state.model
    parameters = [*net.parameters()]
    return {
        "checkpoint": torch.utils._pytree.tree_map(
            lambda each: each.clone() if isinstance(each, Tensor) else each, of.state_dict()
        ),
        "optimizer": [(id(each), len(each.state), rates(each)) for each in of.state.optimizers],
        "parameters": [(id(each), each.data_ptr(), each.requires_grad, each.detach().clone()) for each in parameters],
        "grads": [None if each.grad is None else (id(each.grad), each.grad.clone()) for each in parameters],
        "buffers": [each.clone() for each in net.buffers()],
        "modes": [module.training for module in net.modules()],
        "hidden": (net.times, None if net.cache is None else net.cache.clone(), net.generator.bit_generator.state),
        "globals": (dict(CALLS), TOTAL),
        "plug-ins": [(id(each.obj), len(vars(each.obj))) for each in of.state.bus.attachments],
        "values": [list(each.obj.values) for each in of.state.bus.attachments if isinstance(each.obj, Drift)],
        "losses": [list(each.obj.losses) for each in of.state.bus.attachments if isinstance(each.obj, Writer)],
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),
        "schedules": [id(each) for each in of.state.schedules],
        "metrics": dict(of.state.metrics),
        "history": of.state.history.state_dict(),
        "disk": on_disk(),
    }  # fmt: skip


def check_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    different = [name for name in before if not equal(before[name], after[name])]
    assert not different


def search(of: hocket.Trainer) -> None:
    hocket_tools.tune(of, "lr", **QUICK)
    hocket_tools.tune(of, "batch_size", limit=40)


LONG = pytest.mark.long  # Adam imports compilers


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.05, momentum=0.9)", pytest.param("adamw(lr=0.01)", marks=LONG)])
def test_a_run_with_searches_between_is_the_run_without(optimizer: str, seed: int | None) -> None:
    """Before the first fit, within an epoch, between epochs and at the end."""
    results = []
    for name in ("without", "with"):
        os.mkdir(name)
        os.chdir(name)
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        CALLS["forward"] = 0
        run = trainer(seed=seed, optimizer=optimizer)
        for duration in ("2ba", "2ep", "5ba", None):
            if name == "with":
                before = everything(run)
                search(run)
                check_same(before, everything(run))
            if duration is not None:
                run.fit(duration=duration)
        weights = [each.detach().clone() for each in run.state.model.parameters()]
        results.append((everything(run), weights, run.evaluate(), random.random(), CALLS["forward"], len(on_disk())))
        os.chdir("..")
    (one, *others_of_one), (other, *others) = results
    for ids in (
        "optimizer",
        "parameters",
        "grads",
        "plug-ins",
        "schedules",
        "disk",
        "checkpoint",
        "history",
        "globals",
    ):
        one.pop(ids), other.pop(ids)  # identities and times
    check_same(one, other)
    assert equal(others_of_one, others)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("at", [1, 9, 61])
def test_an_exception_in_the_middle(error: BaseException, at: int) -> None:
    run = trainer(algorithms=["ema", Drift()])
    run.fit("2ba")
    before = everything(run)
    base = run.state.model.times

    def fail(times: int) -> None:
        if times == base + at:
            raise error

    run.state.model.at = fail
    with pytest.raises(type(error)) as raised:
        hocket_tools.tune(run, "lr", low=1e-5, high=1.0, steps=60, run_steps=20)
    assert raised.value is error
    check_same(before, everything(run))
    run.state.model.at = lambda times: None
    run.fit("2ba")


def test_control_c_stops_after_the_batch_and_restores() -> None:
    run = trainer()
    before = everything(run)
    run.state.model.at = lambda times: os.kill(os.getpid(), signal.SIGINT) if times == 7 else None
    with pytest.raises(KeyboardInterrupt):
        hocket_tools.tune(run, "lr", **QUICK)
    check_same(before, everything(run))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.long
def test_killed_in_the_middle_nothing_on_disk_has_changed() -> None:
    """SIGKILL leaves no time to restore anything, so nothing may ever be written."""
    Path("search.py").write_text(
        textwrap.dedent("""
        import sys, time
        sys.path[:0] = sys.argv[1:]
        from test_tune_leaves_no_trace import on_disk, trainer
        import hocket_tools

        run = trainer(microbatch="auto")
        run.fit("5ba")
        print(sorted(on_disk().items()), flush=True)

        def at(times):
            print("step", flush=True)
            time.sleep(0.02)

        run.state.model.at = at
        hocket_tools.tune(run, "lr", steps=1000)
        """)
    )
    folders = [str(Path(__file__).parent), str(Path(support.__file__).parent)]
    command = [sys.executable, "-B", "-W", "ignore", "search.py", *folders]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        before = next(line for line in process.stdout if line.startswith("["))
        for _ in range(25):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert repr(sorted(on_disk().items())) == before.strip()


def test_nothing_is_written_before_the_first_fit() -> None:
    run = trainer(microbatch="auto")
    search(run)
    assert not list(Path().iterdir())
    run.fit("1ba")
    assert Path("runs/microbatch.json").exists(), "the cache of microbatch='auto' is still in use"


class Counting(IterableDataset[Any]):
    """Counts, in an attribute, what it has read in this process, and goes on there."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Any:
        for _ in range(40):
            self.read += 1
            generator = torch.Generator().manual_seed(self.read)
            yield torch.randn(8, generator=generator), torch.randint(3, (), generator=generator)


@pytest.mark.parametrize("kind", ["workers", "iterable", "list", "stateful"])
def test_the_position_in_the_data(kind: str) -> None:
    """The batches after a search within an epoch are those that a run without it sees."""

    def data() -> Any:
        if kind == "workers":
            generator = torch.Generator().manual_seed(4)
            dataset = make_data().dataset
            return DataLoader(dataset, 8, shuffle=True, num_workers=1, persistent_workers=True, generator=generator)
        return {"iterable": DataLoader(Counting(), 8), "list": [*make_data(batch_size=8)], "stateful": Endless()}[kind]

    seen: dict[bool, list[list[float]]] = {}
    for searches in (False, True):
        batches: list[list[float]] = []
        run = make_trainer(train_data=data(), callbacks=[Batches(batches)], device="cpu")
        run.fit("3ba")
        if searches:
            hocket_tools.tune(run, "lr", **QUICK)
        run.fit("9ba")
        run.close()
        seen[searches] = batches
    assert len(seen[True]) == 12 and seen[True] == seen[False]


class Endless:
    """Batches of a stream, with a state."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Any:
        while True:
            self.number += 1
            generator = torch.Generator().manual_seed(self.number)
            yield torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Batches(hocket.Callback):
    """Notes the first number of each batch."""

    def __init__(self, batches: list[list[float]]) -> None:
        self.batches = batches

    def batch_start(self, state: hocket.State) -> None:
        self.batches.append(state.batch[0][0].tolist())


def test_data_that_can_be_read_once_is_refused_and_keeps_all_batches() -> None:
    batches = iter([*make_data(batch_size=8)])
    run = make_trainer(train_data=batches, device="cpu", duration="4ba")
    with pytest.raises(ValueError, match=r"is an iterator, which would lose the batches that the search reads\. Pass"):
        hocket_tools.tune(run, "lr", **QUICK)
    assert len([*batches]) == 11


def test_during_a_fit_it_is_refused() -> None:
    class Tunes(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            hocket_tools.tune(run, "lr")

    run = make_trainer(callbacks=[Tunes()], device="cpu")
    with pytest.raises(RuntimeError, match=r"A search cannot run during a fit\. Call tune\(trainer, …\) before fit"):
        run.fit()


def test_speed() -> None:
    """A snapshot of a run costs little."""
    run = trainer()
    run.fit("1ba")
    begin = time.perf_counter()
    from hocket_tools.tuning.snapshot import Snapshot

    Snapshot([run]).restore()
    assert time.perf_counter() - begin < 1

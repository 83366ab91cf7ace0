"""Checkpoints that are copied in a thread while the next batch is computed: each is of the moment at which it was due."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.basics import control_c
from hocket.checkpoints import CheckpointError
from hocket_checkpoints.storage import snapshot
from hocket_checkpoints.storage.store import Store
from hocket_testkit import run_ranks

#: Models here count batches in an attribute, to write to weights in some.
pytestmark = pytest.mark.filterwarnings("ignore:.* changed in training, and no checkpoint holds")
BATCHES = 8


class Network(nn.Module):
    """Parameters, running statistics, and a forward that may write to a weight: ``writes(self, batches seen)``."""

    def __init__(self, writes: Callable[[Network, int], Any] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.writes, self.seen = writes, 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self.writes is not None:
            self.writes(self, self.seen)
        self.seen += self.training
        return self.last(self.norm(self.first(inputs)).relu())


def run(folder: Path, asynchronous: bool, writes: Any = None, **changes: Any) -> hocket.Trainer:
    policy = {"every": "1ba", "keep": None, **changes.pop("policy", {})}
    trainer = hocket.Trainer(
        **{
            "model": Network(writes), "loss": nn.functional.mse_loss, "train_data": _data(), "duration": "2ep", "device": "cpu",
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01), "seed": 7, "folder": folder / "runs",
            "checkpoints": hocket.Checkpoints(folder / "kept", asynchronous=asynchronous, **policy), **changes,
        }
    )  # fmt: skip
    trainer.fit()
    return trainer


def _data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(6 * BATCHES, 4, generator=generator), torch.randn(6 * BATCHES, 1, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), 6)


def contents(folder: Path) -> dict[str, Any]:
    """Of every checkpoint: what only the same moment of the same run has."""
    store = Store(folder / "kept")
    kinds = ["model", "optimizers", "plugins"]
    return {name: _plain({key: store.read(name).get(key) for key in kinds}) for name in store.names()}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each copy in a thread was of. They are made late, so that a loop that does not wait is found out."""
    made: list[int] = []

    monkeypatch.setattr(snapshot, "_copy", _late(made))
    return made


def _late(made: list[int], copy: Any = snapshot._copy) -> Any:
    def late(pairs: list[Any]) -> None:
        if pairs and threading.current_thread().name == "hocket-checkpoint":
            made.append(len(pairs))
            time.sleep(0.02)
        copy(pairs)

    return late


@pytest.mark.parametrize("algorithms", [[], ["ema(half_life=3ba)"]], ids=["plain", "ema"])
@pytest.mark.parametrize("every", ["1ba", pytest.param("3ba", marks=pytest.mark.long)])
def test_each_is_what_a_save_at_once_is(tmp_path: Path, copies: list[int], every: str, algorithms: Any) -> None:
    changes = {"algorithms": algorithms, "policy": {"every": every}, "clip_gradients": 1.0, "microbatch": 4}
    run(tmp_path / "at once", False, **changes)
    assert not copies
    run(tmp_path / "later", True, **changes)
    expected, found = contents(tmp_path / "at once"), contents(tmp_path / "later")
    assert len(copies) >= len(expected) // 2
    assert set(copies) == {24}  # 6 parameters, and of each two averages and the number of steps
    assert found == expected


def _norm(network: Network, seen: int) -> None:
    """As `nn.Embedding(max_norm=…)` does."""
    with torch.no_grad():
        network.first.weight.clamp_(-0.2, 0.2)


def _hidden(network: Network, seen: int) -> None:
    """Without a version that would tell."""
    network.first.weight.data.mul_(0.9)


def _sometimes(network: Network, seen: int) -> None:
    """As target networks and dead codes are."""
    if seen % 5 == 4:
        torch._foreach_mul_([each.data for each in network.parameters()], 0.9)
        network.last.bias.detach().copy_(network.last.bias.detach() + 1)


def _out(network: Network, seen: int) -> None:
    torch.mul(network.first.weight.data, 0.9, out=network.first.weight.data)


class Perturbed(Network):
    """Computes with other weights and puts them back, as adversarial training and weight noise do."""

    def forward(self, inputs: Tensor) -> Tensor:
        weight, kept = self.first.weight, self.first.weight.detach().clone()
        weight.data.add_(torch.ones_like(kept))
        outputs = super().forward(inputs)
        weight.data.copy_(kept)
        time.sleep(0.01)
        return outputs


@pytest.mark.long
@pytest.mark.parametrize(
    "writes", [*(pytest.param(each, marks=pytest.mark.long) for each in (_norm, _hidden)), _sometimes, _out, Perturbed]
)
def test_a_forward_that_writes_to_weights_waits(tmp_path: Path, copies: list[int], writes: Any) -> None:
    for asynchronous in (False, True):
        model = Perturbed() if writes is Perturbed else Network(writes)
        run(tmp_path / str(asynchronous), asynchronous, model=model)
    assert copies
    assert contents(tmp_path / "True") == contents(tmp_path / "False")


class Decays(hocket.Callback):
    """A plug-in that writes to weights, every other time that it hears of an event."""

    def __init__(self) -> None:
        self.heard = 0

    def act(self, state: hocket.State) -> None:
        self.heard += 1
        if self.heard % 2:
            for parameter in state.model.parameters():
                parameter.data.mul_(0.5)


@pytest.mark.long
@pytest.mark.parametrize(
    "event",
    [
        "batch_start",
        "after_backward",
        "eval_start",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("epoch_start", "fit_end", "batch_checkpoint")),
    ],
)
def test_plug_ins_that_write_to_weights_wait(tmp_path: Path, copies: list[int], event: str) -> None:
    kind = type("Acts", (Decays,), {event: lambda self, state: self.act(state)})
    for asynchronous in (False, True):
        run(tmp_path / str(asynchronous), asynchronous, callbacks=[kind()], eval_data=_data(), duration="13ba")
    assert copies
    assert contents(tmp_path / "True") == contents(tmp_path / "False")


def test_what_optimizers_keep_may_have_any_form(tmp_path: Path) -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["calls"] = self.state.get("calls", 0) + 1
            self.state["last"] = torch.tensor([float(self.state["calls"])])
            return super().step(closure)

    for asynchronous in (False, True):
        optimizer = lambda parameters: Counts(parameters, lr=0.1, momentum=0.9)  # noqa: E731
        run(tmp_path / str(asynchronous), asynchronous, optimizer=optimizer)
    assert contents(tmp_path / "True") == contents(tmp_path / "False") != {}


@pytest.mark.parametrize("lacks", ["memory", "thread"])
def test_where_nothing_can_be_started_on_error_says_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise MemoryError("no room") if lacks == "memory" else RuntimeError("can't start new thread")

    if lacks == "memory":
        monkeypatch.setattr(snapshot.Staging, "copy", fail)
    else:
        start = threading.Thread.start
        monkeypatch.setattr(
            threading.Thread, "start", lambda self: fail() if self.name == "hocket-checkpoint" else start(self)
        )
    with pytest.raises(CheckpointError, match=r"could not be written to .*(no room|new thread)"):
        run(tmp_path / "stops", True)
    with pytest.warns(RuntimeWarning, match=r"could not be written to .*(no room|new thread).*continues without it"):
        run(tmp_path / "goes on", True, policy={"on_error": "warn"})


def test_a_failed_write_is_told_though_the_next_batch_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: list[int]
) -> None:
    def breaks(network: Network, seen: int) -> None:
        if seen == 4:
            monkeypatch.setattr(Store, "save", full)
            raise ZeroDivisionError

    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    with pytest.raises(ZeroDivisionError), pytest.warns(RuntimeWarning, match=r"could not be written.*No space left"):
        run(tmp_path, True, breaks)


def test_a_batch_that_fails_while_it_is_copied_leaves_it_whole(tmp_path: Path, copies: list[int]) -> None:
    class Broken(Exception):
        pass

    def breaks(network: Network, seen: int) -> None:
        if seen == 5:
            raise Broken

    with pytest.raises(Broken):
        run(tmp_path / "True", True, breaks)
    run(tmp_path / "False", False)
    expected = contents(tmp_path / "False")
    assert contents(tmp_path / "True") == {name: expected[name] for name in [f"ep0-ba{n}" for n in range(1, 6)]}
    assert copies


def _ranked(rank: int, folder: str, strategy: str, model: Callable[[], nn.Module], **changes: Any) -> int:
    made: list[int] = []
    snapshot._copy = _late(made)  # of this process alone, which ends
    for asynchronous in (False, True):
        run(Path(folder) / str(asynchronous), asynchronous, strategy=strategy, model=model(), **changes)
    return len(made)


def _flat() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_ranks(tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("hocket_strategies")
    made = run_ranks(lambda rank: _ranked(rank, str(tmp_path), strategy, _flat, policy={"every": "3ba"}), 2)
    assert made == ([3, 3] if strategy == "fsdp" else [3, 0])
    assert contents(tmp_path / "True") == contents(tmp_path / "False")


class Shrinks(hocket.Task):
    """Writes to its weights in its fourth loss, outside of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.seen = nn.Linear(4, 1), 0

    def forward(self, batch: Any) -> Tensor:
        return self.body(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.seen += 1
        if self.seen == 4:
            with torch.no_grad():
                self.body.weight.mul_(0.9)
        return nn.functional.mse_loss(outputs, batch[1])


@pytest.mark.long
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_ranks_whose_weights_are_written_to(tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("hocket_strategies")

    run_ranks(lambda rank: _ranked(rank, str(tmp_path), strategy, Shrinks, loss=None), 2)
    assert contents(tmp_path / "True") == contents(tmp_path / "False")


@pytest.mark.long
def test_control_c_while_the_step_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight has changed, so the next fit continues with that batch, and the run ends as without an interrupt."""
    monkeypatch.setattr(control_c, "_DUPLICATE", -1.0)
    computed, copy = threading.Event(), snapshot._copy

    class Computed(hocket.Callback):
        def after_train_batch(self, state: hocket.State) -> None:
            computed.set()

        def batch_end(self, state: hocket.State) -> None:
            computed.clear()

    def trainer(folder: str) -> hocket.Trainer:
        return hocket.Trainer(
            model=_flat(), loss=nn.functional.mse_loss, train_data=_data(), duration="2ep", device="cpu", seed=7,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01), callbacks=[Computed()],
            checkpoints=hocket.Checkpoints(tmp_path / folder / "kept", every="1ba", keep=None, asynchronous=True),
        )  # fmt: skip

    interrupted = trainer("interrupted")

    def interrupts(pairs: list[Any]) -> None:
        if pairs and threading.current_thread().name == "hocket-checkpoint" and interrupted.state.timestamp.batch == 4:
            assert computed.wait(60)
            for _ in range(2):
                time.sleep(0.3)  # the main thread waits for this copy
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        copy(pairs)

    monkeypatch.setattr(snapshot, "_copy", interrupts)
    with pytest.raises(KeyboardInterrupt):
        interrupted.fit()
    assert interrupted.state.timestamp.batch == 4
    with pytest.warns(
        UserWarning, match=r"in batch 4, before the optimizer stepped\. Training continues with that batch"
    ):
        interrupted.fit()
    trainer("whole").fit()
    assert contents(tmp_path / "interrupted") == contents(tmp_path / "whole")

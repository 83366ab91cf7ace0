"""Checkpoints that are copied in a thread while the next batch is computed: each is of the moment at which it was due."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.checkpoints import snapshot
from hocket.checkpoints.store import Store
from hocket.testkit import run_ranks

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
            time.sleep(0.05)
        copy(pairs)

    return late


@pytest.mark.parametrize("algorithms", [[], ["ema(half_life=3ba)"]], ids=["plain", "ema"])
@pytest.mark.parametrize("every", ["1ba", "3ba"])
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
    with torch.no_grad():
        network.first.weight.clamp_(-0.2, 0.2)


def _hidden(network: Network, seen: int) -> None:
    network.first.weight.data.mul_(0.9)


@pytest.mark.parametrize("writes", [_norm, _hidden])
def test_a_forward_that_writes_to_weights_is_noticed(tmp_path: Path, copies: list[int], writes: Any) -> None:
    """As `nn.Embedding(max_norm=…)` does; `.data` hides it from the versions of tensors."""
    for asynchronous in (False, True):
        run(tmp_path / str(asynchronous), asynchronous, writes)
    assert not copies
    assert contents(tmp_path / "True") == contents(tmp_path / "False")


def test_one_that_begins_to_later_loses_that_checkpoint_and_says_so(tmp_path: Path, copies: list[int]) -> None:
    def writes(network: Network, seen: int) -> None:
        if seen >= 5:
            _norm(network, seen)

    run(tmp_path / "False", False, writes)
    with pytest.warns(
        RuntimeWarning, match=r"weights were written to .* next ones are copied at once.*goes on without it"
    ):
        run(tmp_path / "True", True, writes)
    expected, found = contents(tmp_path / "False"), contents(tmp_path / "True")
    assert expected.keys() - found.keys() == {"ep0-ba5"}
    assert found == {name: each for name, each in expected.items() if name in found}


class Decays(hocket.Callback):
    """A plug-in that writes to weights before the optimizer does, every other batch."""

    def batch_start(self, state: hocket.State) -> None:
        if state.timestamp.batch % 2:
            for parameter in state.model.parameters():
                parameter.data.mul_(0.5)


def test_where_plug_ins_may_write_before_the_step_nothing_waits(tmp_path: Path, copies: list[int]) -> None:
    for asynchronous in (False, True):
        run(tmp_path / str(asynchronous), asynchronous, callbacks=[Decays()])
    assert not copies
    assert contents(tmp_path / "True") == contents(tmp_path / "False")


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
    assert len(copies) == 4


def _ranked(rank: int, folder: str, strategy: str, model: Callable[[], nn.Module], **changes: Any) -> int:
    made: list[int] = []
    snapshot._copy = _late(made)  # of this process alone, which ends
    for asynchronous in (False, True):
        run(Path(folder) / str(asynchronous), asynchronous, strategy=strategy, model=model(), **changes)
    return len(made)


def _flat() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_ranks(tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("hocket_strategies")
    made = run_ranks(lambda rank: _ranked(rank, str(tmp_path), strategy, _flat, policy={"every": "3ba"}), 2)
    assert made == ([2, 2] if strategy == "fsdp" else [2, 0])  # after batches 6 and 8; what follows batch 3 is watched
    assert contents(tmp_path / "True") == contents(tmp_path / "False")


class Shrinks(hocket.Task):
    """Writes to its weights in its fourth loss, outside of the forward pass: of shards only the whole has a version."""

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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_that_change_on_ranks(tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("hocket_strategies")

    def job(rank: int) -> None:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            _ranked(rank, str(tmp_path), strategy, Shrinks, loss=None)
        assert sum("weights were written to" in str(each.message) for each in told) == 1

    run_ranks(job, 2)
    expected, found = contents(tmp_path / "False"), contents(tmp_path / "True")
    assert expected.keys() - found.keys() == {"ep0-ba3"}
    assert found == {name: each for name, each in expected.items() if name in found}

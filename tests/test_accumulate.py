"""``accumulate="4ba"``: a window of the loader's batches is one batch of training, as in a plain loop over larger batches."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import make_data, make_model, make_trainer, same, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hocket
from hocket.data import Window
from hocket_testkit.ranks import run_ranks


def plain(
    batches: Callable[[], Any], window: int, epochs: int, loss: Callable[..., Any] = F.cross_entropy
) -> nn.Module:
    """A plain loop that takes one step for each `window` batches: of one large batch of all their samples."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        read = list(batches())
        for start in range(0, len(read), window):
            inputs, targets = (torch.cat(each) for each in zip(*read[start : start + window], strict=True))
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
    return model


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def close(one: Any, other: Any) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(one), weights(other), strict=True))


@pytest.mark.filterwarnings("ignore:accumulate='20ba' is more than")
@pytest.mark.parametrize("window", [2, 4, 20])
@pytest.mark.parametrize("microbatch", [None, 3, "auto"])
def test_a_window_is_one_batch_of_all_its_samples(window: int, microbatch: Any, tmp_path: Path) -> None:
    """84 samples in batches of 10: nine batches, of which the last has 4 samples, so every last window is short."""
    read = make_data(batch_size=10)
    expected = plain(lambda: read, window, 2)
    trainer = make_trainer(
        train_data=make_data(batch_size=10), optimizer=momentum, accumulate=f"{window}ba", microbatch=microbatch,
        folder=tmp_path,
    )  # fmt: skip
    assert trainer.state.epoch_length == -(-9 // window)
    result = trainer.fit()
    assert close(trainer, expected)
    assert (result.timestamp.batch, result.timestamp.sample) == (2 * -(-9 // window), 2 * 84)


def test_the_gradient_is_not_the_mean_of_means() -> None:
    """The plain loop that divides each loss by the number of batches is another one; so the comparison above can fail."""
    wrong = make_model()
    optimizer = momentum(wrong.parameters())
    read = list(make_data(batch_size=10))
    for start in range(0, 9, 4):
        optimizer.zero_grad()
        for inputs, targets in read[start : start + 4]:
            (F.cross_entropy(wrong(inputs), targets) / 4).backward()
        optimizer.step()
    trainer = make_trainer(train_data=make_data(batch_size=10), optimizer=momentum, accumulate="4ba", duration="1ep")
    trainer.fit()
    assert not close(trainer, wrong)
    assert close(trainer, plain(lambda: read, 4, 1))


def test_weights_of_losses_are_summed_over_the_window() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Any:
        counted = targets != 0  # other numbers of them in each batch
        return F.cross_entropy(outputs[counted], targets[counted]), counted.sum()

    read = make_data(batch_size=10)
    expected = plain(lambda: read, 4, 2, lambda outputs, targets: loss(outputs, targets)[0])
    trainer = make_trainer(train_data=make_data(batch_size=10), optimizer=momentum, loss=loss, accumulate="4ba")
    trainer.fit()
    assert close(trainer, expected)


def test_events_counts_and_intervals_are_of_windows() -> None:
    class Seen(hocket.Callback):
        def __init__(self) -> None:
            self.events: list[str] = []
            self.logged: list[int] = []

        def before_dataloader(self, state: hocket.State) -> None:
            self.events.append("?")

        def after_dataloader(self, state: hocket.State) -> None:
            self.events.append(f"{len(state.batch[0])}")

        def batch_start(self, state: hocket.State) -> None:
            assert type(state.batch) is Window
            self.events.append("start")

        def before_forward(self, state: hocket.State) -> None:
            self.events.append(f"forward {len(state.batch[0])}")

        def after_train_batch(self, state: hocket.State) -> None:
            assert [len(each[0]) for each in state.batch.batches][-1] in (10, 4)

        def batch_end(self, state: hocket.State) -> None:
            self.events.append(f"end {state.batch_samples}")

    seen = Seen()
    evaluated: list[int] = []

    class Evaluated(hocket.Callback):
        def eval_end(self, state: hocket.State) -> None:
            evaluated.append(state.timestamp.batch)

    trainer = make_trainer(
        train_data=make_data(batch_size=10), accumulate="4ba", callbacks=[seen, Evaluated()], duration="5ba",
        eval_data=make_data(), eval_every="2ba", schedule="linear",
    )  # fmt: skip
    trainer.fit()
    assert evaluated == [2, 4, 5]
    four = ["?", "10"] * 4 + ["start"] + ["forward 10"] * 4 + ["end 40"]
    short = ["?", "4", "?", "start", "forward 4", "end 4", "?"]
    assert seen.events == four + four + short + four + four
    assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.0, "five steps were the duration of the schedule"
    assert "accumulate  4 batches of the data are one batch" in str(trainer.plan())


class Two(hocket.Task):
    """Two networks and two steps in a batch: the second network learns to follow the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = make_model(), make_model()

    def configure_optimizers(self) -> Any:
        return {"first": momentum(self.first.parameters()), "second": momentum(self.second.parameters())}

    def train_batch(self, batch: Any, step: Any) -> None:
        step(self.loss_of_first, batch, "first")
        step(self.loss_of_second, batch, "second")

    def loss_of_first(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.first(batch[0]), batch[1])

    def loss_of_second(self, batch: Any) -> Tensor:
        return F.mse_loss(self.second(batch[0]), self.first(batch[0]).detach())


def plain_two(batches: Any, window: int, epochs: int) -> nn.Module:
    task = Two()
    optimizers = task.configure_optimizers()
    for _ in range(epochs):
        read = list(batches)
        for start in range(0, len(read), window):
            batch = [torch.cat(each) for each in zip(*read[start : start + window], strict=True)]
            for name, loss in (("first", task.loss_of_first), ("second", task.loss_of_second)):
                optimizers[name].zero_grad()
                loss(batch).backward()
                optimizers[name].step()
    return task


@pytest.mark.parametrize("microbatch", [None, 3, 15])
def test_several_steps_get_the_window_as_one_batch_in_microbatches(microbatch: int | None) -> None:
    sizes: list[int] = []

    class Seen(Two):
        def loss_of_first(self, batch: Any) -> Tensor:
            sizes.append(len(batch[0]))
            return super().loss_of_first(batch)

    trainer = hocket.Trainer(
        model=Seen(), train_data=make_data(batch_size=10), accumulate="4ba", duration="2ep", microbatch=microbatch
    )
    trainer.fit()
    assert close(trainer, plain_two(make_data(batch_size=10), 4, 2))
    assert max(sizes) == (10 if microbatch is None else microbatch), "no forward pass is larger than without windows"


def test_batches_that_cannot_be_joined_are_refused_with_what_to_do() -> None:
    class Ragged(Two):
        def train_batch(self, batch: Any, step: Any) -> None:
            step(lambda batch: self.first(batch["x"]).square().mean(), batch)

    def fit(batches: list[Any], task: Any = Ragged) -> None:
        hocket.Trainer(model=task(), train_data=batches, accumulate="2ba", duration="1ep").fit()

    with pytest.raises(ValueError, match=r"cannot be joined.*belong to no sample.*Define join\(parts\) in Ragged"):
        fit([{"x": torch.ones(2, 8), "scale": 0.5}, {"x": torch.ones(2, 8), "scale": 0.1}])
    with pytest.raises(ValueError, match=r"cannot be joined.*RuntimeError: Sizes of tensors must match"):
        fit([{"x": torch.ones(2, 8)}, {"x": torch.ones(2, 9)}])
    fit([{"x": torch.ones(2, 8)}, {"x": torch.ones(3, 8)}])


@pytest.mark.parametrize("given", [4, "4", "0ba", "4ep", True, "4.5ba"])
def test_what_is_no_number_of_batches_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"accumulate=.* is not a number of batches.*Write accumulate='4ba'"):
        make_trainer(accumulate=given)


def test_one_batch_is_no_window() -> None:
    one, other = make_trainer(accumulate="1ba"), make_trainer()
    one.fit()
    other.fit()
    assert same(weights(one), weights(other))


def test_a_window_is_skipped_as_a_whole() -> None:
    class Skip(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            if state.timestamp.batch == 1:
                state.request(hocket.Decision.SKIP_BATCH)

    read = list(make_data(batch_size=10))
    trainer = make_trainer(train_data=read, optimizer=momentum, accumulate="4ba", duration="1ep", callbacks=[Skip()])
    trainer.fit()
    assert close(trainer, plain(lambda: [*read[:4], *read[8:]], 4, 1))


def test_limits_count_batches_of_the_data_and_durations_windows() -> None:
    trainer = make_trainer(train_data=make_data(batch_size=10), accumulate="4ba", limit_train=6, duration="1ep")
    assert trainer.fit().timestamp.batch == 2
    assert trainer.state.timestamp.sample == 60
    endless = make_trainer(train_data=iter(list(make_data(batch_size=10))), accumulate="4ba", duration="3ba")
    assert endless.fit().timestamp.sample == 84
    with pytest.raises(hocket.data.DataError, match="can be iterated once"):
        make_trainer(train_data=iter(list(make_data(batch_size=10))), accumulate="4ba", duration="4ba").fit()


# --- stopping within a window


class Stream(IterableDataset[Any]):
    """Batches without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from make_data(batch_size=10)


def shuffled() -> Any:
    return make_data(batch_size=10)


SOURCES = {
    "loader": shuffled,
    "stream": lambda: DataLoader(Stream(), batch_size=None),
    "generator of an iterable": Stream,
    "list": lambda: list(make_data(batch_size=10)),
    "iterator": lambda: iter(list(make_data(batch_size=10)) * 2),
    "workers": lambda: DataLoader(
        TensorDataset(torch.randn(84, 8, generator=torch.Generator().manual_seed(1)), torch.arange(84) % 3),
        10, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(5),
    ),
}  # fmt: skip


class Taken(hocket.Callback):
    """The state of a run after each batch."""

    trainer: hocket.Trainer

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}

    def batch_checkpoint(self, state: hocket.State) -> None:
        self.states[state.timestamp.batch] = copy.deepcopy(self.trainer.state_dict())


@pytest.mark.filterwarnings("ignore:.*has no position to save", "ignore:train_batch of Two called step")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("own_steps", [False, True])
@pytest.mark.long
def test_a_run_resumes_bitwise_after_every_window(source: str, own_steps: bool) -> None:
    def make(**options: Any) -> hocket.Trainer:
        model: Any = Two() if own_steps else make_model(dropout=0.3)
        more = {} if own_steps else {"loss": F.cross_entropy, "optimizer": momentum}
        duration = "5ba" if source == "iterator" else "2ep"
        return hocket.Trainer(
            model=model, train_data=SOURCES[source](), accumulate="4ba", duration=duration, seed=3, **more, **options
        )

    taken = Taken()
    whole = make(callbacks=[taken])
    taken.trainer = whole
    whole.fit()
    assert sorted(taken.states) == ([1, 2, 3, 4, 5] if source == "iterator" else [1, 2, 3, 4, 5, 6])
    for batch, state in taken.states.items():
        resumed = make()
        resumed.load_state_dict(state)
        resumed.fit()
        assert same(weights(resumed), weights(whole)), batch
        assert resumed.state.timestamp.batch == whole.state.timestamp.batch
        assert resumed.state.epoch_length == whole.state.epoch_length


@pytest.mark.parametrize("at", [2, 6, 9])
def test_an_exception_within_a_window_leaves_it_to_the_next_fit(at: int) -> None:
    class Fails(hocket.Callback):
        calls = 0

        def after_dataloader(self, state: hocket.State) -> None:
            self.calls += 1
            if self.calls == at:
                raise RuntimeError("planned")

    trainer = make_trainer(
        train_data=make_data(batch_size=10), optimizer=momentum, accumulate="4ba", callbacks=[Fails()]
    )
    with pytest.raises(RuntimeError, match="planned"):
        trainer.fit()
    with pytest.raises(RuntimeError, match="not complete in the middle of a batch"):
        trainer.state_dict()
    with pytest.warns(UserWarning, match="Training continues with that batch"):
        trainer.fit()
    read = make_data(batch_size=10)
    assert close(trainer, plain(lambda: read, 4, 2))
    assert trainer.state.timestamp.sample == 168


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import hocket
from support import make_data, make_model
from test_accumulate import momentum
import torch.nn.functional as F

class Kill(hocket.Callback):
    seen = 0
    def after_dataloader(self, state):
        Kill.seen += 1
        if Kill.seen == {at}:
            os.kill(os.getpid(), signal.SIGKILL)

trainer = hocket.Trainer(
    model=make_model(dropout=0.3), loss=F.cross_entropy, optimizer=momentum, train_data=make_data(batch_size=10),
    accumulate="4ba", duration="2ep", seed=3, callbacks=[Kill()], resume="auto", folder={folder!r},
    checkpoints=hocket.Checkpoints({folder!r} + "/checkpoints", every="1ba"),
)
trainer.fit()
"""


@pytest.mark.long
@pytest.mark.parametrize("at", [7, 15])
def test_a_run_killed_in_the_middle_of_a_window_resumes_bitwise(at: int, tmp_path: Path) -> None:
    """The third batch of the second window of each epoch: the window begins again."""

    def run(folder: Path, at: int) -> subprocess.CompletedProcess[str]:
        script = KILLED.format(tests=str(Path(__file__).parent), at=at, folder=str(folder))
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=os.environ
        )

    killed = run(tmp_path / "a", at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for folder in ("a", "b"):
        done = run(tmp_path / folder, 0)
        assert not done.returncode, done.stderr
    a, b = (hocket.checkpoints.read_weights(tmp_path / each / "checkpoints" / "ep1-ba6") for each in ("a", "b"))
    assert same(a, b)


# --- several ranks


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("microbatch", [None, 3])
def test_windows_of_two_ranks_are_one_batch_of_all(strategy: str, microbatch: int | None, tmp_path: Path) -> None:
    """Global batches of 10 of 84 samples; each rank has half of each, and of the last one 2."""
    options: Any = {"optimizer": momentum, "accumulate": "4ba", "microbatch": microbatch, "folder": tmp_path, "seed": 1}

    def rank_main(rank: int) -> Any:
        trainer = make_trainer(
            train_data=make_data(batch_size=10), global_batch=10, strategy=strategy, device="cpu", **options
        )
        trainer.fit()
        return trainer.model_state_dict(), trainer.state.timestamp.sample, trainer.state.timestamp.batch

    read = make_data(batch_size=10)
    expected = plain(lambda: read, 4, 2)
    for found, samples, batches in run_ranks(rank_main, 2):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found.values(), weights(expected), strict=True))
        assert (samples, batches) == (168, 6)


@pytest.mark.parametrize("own_steps", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_with_other_numbers_of_batches_in_the_last_window(strategy: str, own_steps: bool, tmp_path: Path) -> None:
    """Rank 0 reads seven batches, rank 1 two: in the second window of four rank 1 has none, in the first two."""
    generator = torch.Generator().manual_seed(2)
    data = [
        [(torch.randn(size, 8, generator=generator), torch.arange(size) % 3) for size in sizes]
        for sizes in ([5, 4, 5, 3, 5, 2, 1], [6, 3])
    ]

    def rank_main(rank: int) -> Any:
        model: Any = {"model": Two()} if own_steps else {"optimizer": momentum}
        make = (lambda **options: hocket.Trainer(**options)) if own_steps else make_trainer
        trainer = make(
            **model, train_data=data[rank], strategy={strategy: {"split_data": False}}, accumulate="4ba", duration="2ep",
            device="cpu", folder=tmp_path, seed=1,
        )  # fmt: skip
        trainer.fit()
        return trainer.model_state_dict(), trainer.state.timestamp.sample

    windows = [[*data[0][:4], *data[1]], data[0][4:]]
    joined = [tuple(torch.cat(each) for each in zip(*window, strict=True)) for window in windows]
    expected = plain_two(joined, 1, 2) if own_steps else plain(lambda: joined, 1, 2)
    for found, samples in run_ranks(rank_main, 2):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found.values(), weights(expected), strict=True))
        assert samples == 2 * 34


def test_two_ranks_resume_bitwise_after_every_window(tmp_path: Path) -> None:
    def rank_main(rank: int) -> Any:
        def make(**options: Any) -> hocket.Trainer:
            return make_trainer(
                model=make_model(dropout=0.3), train_data=make_data(batch_size=10), strategy="ddp", optimizer=momentum,
                accumulate="2ba", device="cpu", folder=tmp_path, seed=1, **options,
            )  # fmt: skip

        taken = Taken()
        whole = make(callbacks=[taken])
        taken.trainer = whole
        whole.fit()
        for state in taken.states.values():
            resumed = make()
            resumed.load_state_dict(state)
            resumed.fit()
            assert same(weights(resumed), weights(whole))
        return len(taken.states)

    assert run_ranks(rank_main, 2) == [6, 6]  # of five global batches of 20 an epoch


@pytest.mark.parametrize("microbatch", [None, 4])
def test_a_tasks_own_count_and_split_are_used_for_each_batch(microbatch: int | None) -> None:
    """Batches that only the task can count and split: all inputs in one tensor, and the sizes of the samples beside it."""

    class Packed(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def count(self, batch: Any) -> int:
            return len(batch["sizes"])

        def split(self, batch: Any, size: int) -> list[Any]:
            sizes, parts = batch["sizes"], []
            for start in range(0, len(sizes), size):
                rows = slice(int(sizes[:start].sum()), int(sizes[: start + size].sum()))
                parts.append(
                    {
                        "rows": batch["rows"][rows],
                        "sizes": sizes[start : start + size],
                        "targets": batch["targets"][start : start + size],
                    }
                )
            return parts

        def forward(self, batch: Any) -> Tensor:
            means = [rows.mean(0) for rows in batch["rows"].split(batch["sizes"].tolist())]
            seen.append(len(means))
            return self.net(torch.stack(means))

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return F.cross_entropy(outputs, batch["targets"])

    seen: list[int] = []
    generator = torch.Generator().manual_seed(4)
    batches = []
    for samples in (6, 5, 7, 3, 2):
        sizes = torch.randint(1, 4, (samples,), generator=generator)
        rows = torch.randn(int(sizes.sum()), 8, generator=generator)
        batches.append({"rows": rows, "sizes": sizes, "targets": torch.arange(samples) % 3})
    trainer = hocket.Trainer(
        model=Packed(), train_data=batches, optimizer=momentum, accumulate="3ba", microbatch=microbatch, duration="2ep"
    )
    trainer.fit()
    assert seen[:5] == ([6, 5, 7, 3, 2] if microbatch is None else [4, 2, 4, 1, 4])
    dense = [
        (torch.stack([rows.mean(0) for rows in each["rows"].split(each["sizes"].tolist())]), each["targets"])
        for each in batches
    ]
    assert close(trainer, plain(lambda: dense, 3, 2))

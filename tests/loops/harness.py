"""What every program of `examples/` has to pass: the weights of a loop written by hand, split, over ranks and after a kill.

A test file inherits `Loop`, names its example and defines `by_hand`: the same training in plain PyTorch, which takes the
networks from the example and nothing from hocket.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import hocket
from hocket_testkit.ranks import run_ranks

FOLDER = Path(__file__).parents[2] / "examples"
SEED = 3


def load(name: str) -> ModuleType:
    """Import `examples/<name>.py`."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(batch: Any, rank: int, ranks: int) -> Any:
    """Return a rank's slice of a batch: of each tensor in it, along dimension 0."""
    if isinstance(batch, Tensor):
        return batch[rank * len(batch) // ranks : (rank + 1) * len(batch) // ranks]
    if isinstance(batch, dict):
        return {key: rows(value, rank, ranks) for key, value in batch.items()}
    return type(batch)(rows(each, rank, ranks) for each in batch)


class Draw:
    """The random numbers that ranks draw, each for its slice, joined: ``draw(torch.randn, 64, 16)`` is of 64 samples.

    The numbers of rank r are those of a generator with the Trainer's seed plus r. ``arguments`` are those of the function
    before the shape, such as the limit of `torch.randint`.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.generators = [torch.Generator().manual_seed(SEED + rank) for rank in range(ranks)]

    def __call__(self, function: Callable[..., Tensor], samples: int, *shape: int, arguments: Any = ()) -> Tensor:
        size = (samples // self.ranks, *shape)
        return torch.cat([function(*arguments, size, generator=generator) for generator in self.generators])


class Kill(hocket.Callback):
    """SIGKILL this process after a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state: hocket.State) -> None:
        if state.timestamp.batch == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


class Count(hocket.Callback):
    """Count the batches of a run."""

    batches = 0

    def batch_end(self) -> None:
        self.batches += 1


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest difference between two models' weights."""
    assert a.keys() == b.keys()
    return float(torch.stack([(a[name].detach() - b[name].detach()).abs().max().double() for name in a]).max())


class Loop:
    """The checks of one example. Each takes its first `batches` batches."""

    example: str
    #: How many batches to train on, two or more. The run that is killed dies in the middle, before that batch's checkpoint.
    batches = 6
    #: Differences from the loop by hand: in one process; and where sums are added in another order.
    tolerance, rounding = 0.0, 1e-6
    #: Samples in a microbatch; None where the loss of a batch is not the mean of its microbatches' losses: say why.
    microbatch: int | None = 24

    @staticmethod
    def by_hand(example: Any, batches: list[Any], draw: Draw) -> dict[str, Tensor]:
        """Train on whole batches and return the model's `state_dict()`. Make the model first: the seed is set for it.

        Noise is drawn with ``draw``. A loop whose steps depend on the number of ranks reads ``draw.ranks``.
        """
        raise NotImplementedError

    @staticmethod
    def slice(batch: Any, rank: int, ranks: int) -> Any:
        """Return a rank's slice of a batch."""
        return rows(batch, rank, ranks)

    # --- running it

    @pytest.fixture
    def loop(self) -> ModuleType:
        return load(self.example)

    def first_batches(self, loop: Any) -> list[Any]:
        torch.manual_seed(SEED)
        return list(itertools.islice(loop.data(), self.batches))

    def trained(self, loop: Any, **changes: Any) -> dict[str, Tensor]:
        """Train the example for `batches` batches, and return its weights."""
        torch.manual_seed(SEED)
        options = {"duration": f"{self.batches}ba", "seed": SEED, "device": "cpu", "eval_data": None, "loggers": []}
        with loop.make_trainer(**{**options, **changes}) as trainer:
            trainer.fit()
            weights: dict[str, Tensor] = trainer.model_state_dict()
            return weights

    def expected(self, loop: Any, ranks: int = 1) -> dict[str, Tensor]:
        """Return the weights of the loop by hand."""
        batches = self.first_batches(loop)
        torch.manual_seed(SEED)
        return self.by_hand(loop, batches, Draw(ranks))

    # --- the checks

    def test_it_has_the_weights_of_the_loop_by_hand(self, loop: Any) -> None:
        expected = self.expected(loop)
        found = difference(self.trained(loop, train_data=self.first_batches(loop)), expected)
        assert found <= self.tolerance, f"weights differ by {found}"
        torch.manual_seed(SEED)
        with loop.make_trainer() as untrained:
            assert difference(untrained.model_state_dict(), expected) > 1e-3

    def test_it_trains_alike_in_microbatches(self, loop: Any) -> None:
        if self.microbatch is None:
            pytest.skip("the loss of a batch is not the mean of its microbatches' losses")
        weights = self.trained(loop, train_data=self.first_batches(loop), microbatch=self.microbatch)
        found = difference(weights, self.expected(loop))
        assert found <= self.rounding, f"weights differ by {found}"

    @pytest.mark.long
    def test_it_trains_alike_on_two_ranks(self, loop: Any) -> None:
        batches = self.first_batches(loop)

        def rank(number: int) -> dict[str, Tensor]:
            mine = [self.slice(batch, number, 2) for batch in batches]
            return self.trained(loop, train_data=mine, strategy={"ddp": {"split_data": False}})

        first, second = run_ranks(rank, 2)
        assert difference(first, second) == 0
        found = difference(first, self.expected(loop, ranks=2))
        assert found <= self.rounding, f"weights differ by {found}"

    @pytest.mark.filterwarnings("ignore:callback .* changed in training")
    def test_a_killed_run_resumes_bitwise(self, loop: Any, tmp_path: Path) -> None:
        store = hocket.Checkpoints(tmp_path / "checkpoints", every="1ba")
        child = os.fork()
        if not child:
            try:
                self.trained(loop, checkpoints=store, callbacks=[Kill(self.batches // 2 + 1)])
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        count = Count()
        resumed = self.trained(loop, checkpoints=store, resume="auto", callbacks=[count])
        assert 0 < count.batches < self.batches, "it began anew"
        assert difference(resumed, self.trained(loop)) == 0

    def test_it_runs_as_a_program(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """`python examples/<name>.py`, with five batches in place of the whole training."""
        monkeypatch.setattr(hocket.Trainer, "fit", functools.partialmethod(hocket.Trainer.fit, "5ba"))
        runpy.run_path(str(FOLDER / f"{self.example}.py"), run_name="__main__")
        assert capsys.readouterr().out.strip()

    def test_it_is_short(self) -> None:
        assert len((FOLDER / f"{self.example}.py").read_text().splitlines()) <= 80

"""`microbatch="auto"`: as few microbatches as fit, before the first step, and nobody notices that they were looked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import make_trainer
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.strategies.base import Strategy
from hocket_general.sam import SAM
from hocket_testkit import run_ranks
from hocket_testkit.ranks import RankError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class Seen:
    """What trials leave as it is: neither a collection nor a metric."""

    def __init__(self, limit: int) -> None:
        self.sizes: list[int] = []
        self.limit = limit


class Limited(nn.Module):
    """Runs out of memory above so many samples, and does what it does to each sample alone."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.seen = Seen(limit)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.head = nn.Linear(8, 3)

    @property
    def sizes(self) -> list[int]:
        return self.seen.sizes

    def forward(self, inputs: Tensor) -> Tensor:
        self.sizes.append(len(inputs))
        if len(inputs) > min(self.limit, self.seen.limit):
            raise torch.OutOfMemoryError(f"{len(inputs)} samples")
        return self.head(inputs)


class Remembering(Limited):
    """Has buffers that move and draws random numbers besides."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.dropout(self.norm(inputs)))


@pytest.fixture
def make() -> Any:
    def make(model: nn.Module, **changes: Any) -> hocket.Trainer:
        """Batches of 32, 32 and 20 samples."""
        arguments = {
            "model": model, "global_batch": 32, "seed": 3, "microbatch": "auto", "device": "cpu",
            "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        }  # fmt: skip
        return make_trainer(**{**arguments, **changes})

    return make


@pytest.mark.parametrize(
    "limit, size", [(2, 2), (5, 5), (7, 7), (13, 11), (15, 11), (16, 16), (31, 16), (32, 32), (100, 32)]
)
def test_as_few_as_fit_and_as_even(make, limit: int, size: int) -> None:
    """Weights, buffers and random numbers are bit for bit those of a run that was told the size."""
    found, told = make(Remembering(limit)), make(Remembering(limit), microbatch=size)
    found.fit()
    told.fit()
    assert found.state.microbatch == size
    assert limit >= 32 or any(each == limit + 1 for each in found.state.model.sizes), "one more did not fit"
    for name, value in found.model_state_dict().items():
        assert torch.equal(value, told.model_state_dict()[name]), name


def test_what_was_found_is_kept_for_the_next_run(make) -> None:
    first, second, other, third = (make(Limited(13)), make(Limited(13)), make(Remembering(7)), make(Limited(13)))
    first.fit("1ba")
    assert max(first.state.model.sizes) == 32, "it tried"
    assert list(json.loads(Path("runs/microbatch.json").read_text()).values()) == [11]
    second.fit("1ba")
    assert max(second.state.model.sizes) == 11, "it knew"
    other.fit("1ba")
    assert other.state.microbatch == 7, "of another model it knew nothing"
    Path("runs/microbatch.json").write_text("{not JSON")
    third.fit("1ba")
    assert third.state.microbatch == 11 and max(third.state.model.sizes) == 32


class Attention(nn.Module):
    """As models of transformers are: what is computed depends on plain attributes, of the module or of a configuration."""

    def __init__(self, kind: str = "sdpa", recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = SimpleNamespace(attention=kind), recompute
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def frozen() -> nn.Module:
    model = Attention()
    model.head.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw(lr=0.1)"}, {"optimizer": "sgd(lr=0.1, momentum=0.9)"}, {"optimizer": "sgd(lr=0.1, foreach=False)"},
        {"algorithms": ["ema"]}, {"algorithms": ["sam"]}, {"algorithms": [SAM(rho=0.1)]}, {"precision": "bf16"},
        {"compile": {"backend": "eager"}}, {"clip_gradients": 1.0}, {"model": Attention("eager")}, {"model": frozen()},
        {"model": Attention(recompute=True)}, {"model": Attention().double(), "precision": "fp64"},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, {"callbacks": [{"gradient-monitor": {"every": 1}}]},
        {"strategy": Strategy()}, {"global_batch": 24},
    ],
)  # fmt: skip
def test_what_changes_memory_is_looked_at_anew(make, changes: dict[str, Any]) -> None:
    def sizes() -> list[int]:
        return list(json.loads(Path("runs/microbatch.json").read_text()).values())

    if changes.get("precision") == "fp64":
        pytest.importorskip("hocket_strategies")
    base = {"model": Attention(), "optimizer": "sgd(lr=0.1)"}
    make(**base).fit("1ba")
    make(**{**base, "model": Attention(), "optimizer": "sgd(lr=0.2)", "seed": 4, "duration": "9ba"}).fit("1ba")
    assert len(sizes()) == 1, "what changes nothing in memory finds the stored size"
    make(**{**base, **changes}).fit("1ba")
    assert len(sizes()) == 2


def test_a_stored_size_that_no_longer_fits_is_found_anew_on_all_ranks(make) -> None:
    """Memory is less than in the run that stored it, on one of the ranks; the smaller size is stored in its place."""
    pytest.importorskip("hocket_strategies")

    def rank_main(rank: int) -> list[int]:
        found = []
        for limit in (8, 3 if rank else 8):
            model = Limited(8)
            model.seen.limit = limit  # which no key knows
            trainer = make(model, strategy="ddp")
            trainer.fit()
            found.append((trainer.state.microbatch, max(trainer.state.model.sizes)))
        return found

    assert [[size for size, _ in sizes] for sizes in run_ranks(rank_main, 2)] == [[8, 3], [8, 3]]
    assert list(json.loads(Path("runs/microbatch.json").read_text()).values()) == [3]


def test_batches_of_another_size_are_looked_at_anew(make) -> None:
    for global_batch, expected in ((32, 11), (20, 10), (32, 11)):  # in 3, 2 and 3 microbatches
        trainer = make(Limited(13), global_batch=global_batch)
        trainer.fit("1ba")
        assert trainer.state.microbatch == expected


def test_what_is_logged_meanwhile_is_forgotten(make) -> None:
    class Sizes(hocket.Callback):
        def after_loss(self, state: hocket.State) -> None:
            state.log({f"of {len(state.batch[0])}": 1.0})

    class Names(hocket.Logger):
        synchronous = True

        def __init__(self) -> None:
            self.names: set[str] = set()

        def log_metrics(self, state: hocket.State, metrics: dict[str, float]) -> None:
            self.names |= {name for name in metrics if name.startswith("of")}

    names = Names()
    make(Limited(13), callbacks=[Sizes()], loggers=[names]).fit()
    assert names.names == {"of 11", "of 10", "of 9"}, "32 and 20 samples; 8, 12 and 13 were tried"


def test_not_even_one_sample(make) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Not even one sample fits on cpu"):
        make(Limited(0)).fit()


def test_memory_that_runs_out_later_halves_it(make) -> None:
    """The batch is computed again; the result is that of the whole batch."""
    trainer, told = make(Limited(32)), make(Limited(32), microbatch=None)
    trainer.fit("1ba")
    trainer.state.model.limit = 9
    with pytest.warns(UserWarning, match="Out of memory with 32 samples at once; continuing with 16") as warned:
        trainer.fit()
    assert trainer.state.microbatch == 8 and len(warned) == 2
    told.fit()
    _close(trainer.model_state_dict(), told.model_state_dict())


class Counting:
    """A metric that counts samples."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.samples = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.samples += len(targets)

    def compute(self) -> float:
        return float(self.samples)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("passed", [0, 1, 2])
def test_metrics_see_each_sample_once_though_a_batch_is_begun_again(make, where: str, passed: int) -> None:
    """After so many microbatches of 11 that fitted; 5 does not divide 11."""

    class Late(Limited):
        left = 1000

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs)
            self.left -= 1
            if self.left == -1:
                if where == "forward":
                    raise torch.OutOfMemoryError("now")
                outputs.register_hook(_fail)
            return outputs

    trainer = make(Late(13), train_metrics={"n": Counting()}, duration="1ep")
    told = make(Late(100), microbatch=None, duration="1ep")
    trainer.fit("1ba")
    assert trainer.state.microbatch == 11
    trainer.state.model.left = passed
    with pytest.warns(UserWarning, match="with 11 samples at once; continuing with 5"):
        trainer.fit()
    told.fit("1ba")
    told.fit()
    assert trainer.state.metrics["train/n"] == 84
    _close(trainer.model_state_dict(), told.model_state_dict())


def _fail(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("now")


@pytest.mark.parametrize(
    "message, memory",
    [
        ("MPS backend out of memory (MPS allocated: 1 GB)", True),
        ("CUDA error: out of memory", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_memory_runs_out_below_torch_too(make, message: str, memory: bool) -> None:
    class Below(Limited):
        def forward(self, inputs: Tensor) -> Tensor:
            if len(inputs) > self.limit:
                raise RuntimeError(message)
            return self.head(inputs)

    trainer = make(Below(13))
    if not memory:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            trainer.fit("1ba")
        return
    trainer.fit("1ba")
    assert trainer.state.microbatch == 11


def test_the_trial_is_a_step_as_in_training_and_leaves_plug_ins_alone(make) -> None:
    """Plug-ins change what the loss sees, and so how much memory it takes; one that counts must not notice."""
    pytest.importorskip("hocket_strategies")
    seen: set[tuple[torch.dtype, int]] = set()

    class Counts(hocket.Algorithm):
        events = {hocket.Event.BEFORE_LOSS: "counts"}
        calls = 0

        def apply(self, event: hocket.Event, state: hocket.State) -> None:
            self.calls += 1
            torch.rand(3, generator=state.generator(self))
            state.log({"calls": self.calls})

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.calls = state_dict["calls"]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.add((outputs.dtype, len(outputs)))
        return F.cross_entropy(outputs, targets)

    found, told = Counts(), Counts()
    made = make(Limited(13), loss=loss, precision="bf16-true", algorithms=[found])
    other = make(Limited(13), loss=loss, precision="bf16-true", algorithms=[told], microbatch=11)
    made.fit("1ba")
    assert {dtype for dtype, _ in seen} == {torch.float32} and {8, 11, 13} & {size for _, size in seen}
    other.fit("1ba")
    assert found.calls == told.calls == 3
    for name, value in made.state.generators.state_dict().items():
        assert torch.equal(value, other.state.generators.state_dict()[name])


def test_nothing_of_a_failed_try_is_kept_while_the_cache_is_emptied(make, monkeypatch) -> None:
    import gc
    import weakref

    kept: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Activation:
        """What backward needs of a forward pass."""

    class Big(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            ctx.kept = Activation()
            kept.append(weakref.ref(ctx.kept))
            return inputs * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if len(gradient) > 13:
                raise torch.OutOfMemoryError("now")
            return gradient

    class Model(Limited):
        def forward(self, inputs: Tensor) -> Tensor:
            return Big.apply(super().forward(inputs))

    def empty() -> bool:  # asked before the cache is emptied
        alive.append(sum(each() is not None for each in kept))
        return False

    monkeypatch.setattr(torch.accelerator, "is_available", empty)
    gc.disable()
    try:
        make(Model(100)).fit("1ba")
    finally:
        gc.enable()
    assert len(alive) > 2 and not any(alive)


def test_ranks_agree_on_the_smallest(make) -> None:
    """Each has another limit, and none waits for the other. Of its 16 samples four times five fit, so four times four do."""
    pytest.importorskip("hocket_strategies")

    def rank_main(rank: int) -> Any:
        trainer = make(Limited(7 if rank else 5), strategy="ddp")
        trainer.fit()
        return trainer.state.microbatch, trainer.model_state_dict()

    alone = make(Limited(100))
    alone.fit()
    for microbatch, weights in run_ranks(rank_main, 2):
        assert microbatch == 4
        _close(weights, alone.model_state_dict())


def test_memory_that_runs_out_later_on_a_rank_stops_all(make) -> None:
    """The others may be in the middle of a collective, so nobody goes on with another size."""
    pytest.importorskip("hocket_strategies")

    def rank_main(rank: int) -> None:
        trainer = make(Limited(32), strategy="ddp")
        trainer.fit("1ba")
        trainer.state.model.limit = 4 if rank else 32
        trainer.fit()

    with pytest.raises(RankError, match=r"on rank 1\. Start again with microbatch=8, which") as raised:
        run_ranks(rank_main, 2)
    assert raised.value.rank == 1
    assert list(json.loads(Path("runs/microbatch.json").read_text()).values()) == [8], "for the next run"


def _close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-5)

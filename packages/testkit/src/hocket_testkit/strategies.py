"""The suite for strategies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.basics.plugin_errors import PlanError
from hocket.hookspecs import Event
from hocket.strategies import Strategy
from hocket_testkit.compare import difference
from hocket_testkit.conformance import Conformance, Planned, raiser, weights
from hocket_testkit.ranks import run_ranks

_SAMPLES, _BATCH = 13, 4


class StrategyConformance(Conformance):
    """The tests that every strategy must pass, on ``world_size`` processes of this machine. Define ``make``.

    Everything is computed in double precision and compared with plain PyTorch on the same global batches in one process.

    Example:
        >>> import hocket, hocket_strategies
        >>> class TestDDP(hocket.testkit.StrategyConformance):
        ...     world_size = 2
        ...     def make(self):
        ...         return hocket_strategies.DDP()
    """

    kind = "strategies"
    #: How many ranks to start; 1 for a single-process strategy.
    world_size: ClassVar[int] = 2
    #: The dtype of all computation; float32, with a wider `weight_tolerance`, for a backend that has no double precision.
    dtype: ClassVar[torch.dtype] = torch.float64
    #: Allowed distance of weights from those of one process, absolute and relative to the largest.
    weight_tolerance: ClassVar[float] = 1e-10

    def make(self) -> Strategy:
        """Return a new strategy; called in each rank."""
        strategy: Strategy = super().make()
        return strategy

    def run(self, function: Callable[..., Any]) -> list[Any]:
        """Call ``function(rank)`` in each rank; return the results by rank. By default ranks are forked and use gloo."""
        return run_ranks(function, self.world_size)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 3))

    def data(self) -> Any:
        """Return 13 samples of 5 numbers and a class, in batches of 4. `trainer` makes these the global batches; the last one
        has one sample, too few for two ranks."""
        return DataLoader(TensorDataset(torch.rand(_SAMPLES, 5).to(self.dtype), torch.randint(3, (_SAMPLES,))), _BATCH)

    def trainer(self, plugin: Any = None, **changes: Any) -> hocket.Trainer:
        """Return a Trainer as in every suite, but in `dtype`, and with the same global batches for any world size."""
        parts = {"model": self.seeded(self.model).to(self.dtype), "global_batch": _BATCH}
        return super().trainer(plugin, **(parts | changes))

    def reference(self, clip: float | None, epochs: int = 2) -> tuple[dict[str, Tensor], list[float]]:
        """Return the weights after training, and the loss of each batch, of a plain PyTorch loop over the global batches.

        Override it for a strategy that trains differently by design, and compute the same without the strategy.
        """
        model = self.seeded(self.model).to(self.dtype)
        optimizer = self.optimizer(model.parameters())
        losses = []
        for _ in range(epochs):
            for inputs, targets in self.seeded(self.data):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                losses.append(loss.item())
        return dict(model.state_dict()), losses

    # --- training

    @pytest.mark.parametrize("microbatch", [None, 1])
    @pytest.mark.parametrize("clip", [None, 0.1], ids=["", "clipped"])
    def test_trains_as_one_process_does(self, microbatch: int | None, clip: float | None) -> None:
        """After two epochs with an uneven last batch all ranks hold the weights, and count the samples, of one process."""

        def rank_main(rank: int) -> Any:
            losses = _Losses()
            trainer = self.trainer(self.make(), microbatch=microbatch, clip_gradients=clip, callbacks=[losses])
            timestamp = trainer.fit().timestamp
            return weights(trainer), losses.losses, (timestamp.epoch, timestamp.batch, timestamp.sample)

        expected, losses = self.reference(clip)
        by_rank = self.run(rank_main)
        for rank, (got, seen, counted) in enumerate(by_rank):
            found = difference(got, expected, self.weight_tolerance, at=f"the weights of rank {rank}")
            assert found is None, (
                f"Training on {self.world_size} ranks differs from training in one process on the same batches: {found}. "
                "Gradients are means over the samples of the global batch; ranks may have different numbers of them, or none."
            )
            found = difference(got, by_rank[0][0], at=f"the weights of rank {rank} against those of rank 0")
            assert found is None, f"Ranks hold different weights: {found}."
            found = difference(seen, losses, self.weight_tolerance, at="state.loss")
            assert found is None, f"The loss of a batch is not that of the global batch: {found}."
            batches = -(-_SAMPLES // _BATCH)
            assert counted == (2, 2 * batches, 2 * _SAMPLES), f"Rank {rank} counted epochs, batches, samples {counted}."

    def test_trains_a_task_of_two_steps(self) -> None:
        """Each step of a `hocket.Task` with two optimizers equals that of one process, or the plan refuses the task."""

        def rank_main(rank: int) -> Any:
            task = self.two_steps().to(self.dtype)
            try:
                trainer = self.trainer(self.make(), model=task, loss=None, optimizer=None, eval_data=None)
            except PlanError:
                return None
            trainer.fit()
            return weights(trainer)

        by_rank = self.run(rank_main)
        task = self.two_steps().to(self.dtype)
        optimizers = task.configure_optimizers()
        for _ in range(2):
            for batch in self.seeded(self.data):
                steps = [("first", task.loss_of_first), *[("second", task.loss_of_second)] * 2]
                for name, loss_of in steps:
                    task.zero_grad()
                    loss_of(batch).backward()
                    optimizers[name].step()
        expected = {name: value.detach() for name, value in task.state_dict().items()}
        for rank, got in enumerate(by_rank):
            found = (
                None
                if got is None
                else difference(got, expected, self.weight_tolerance, at=f"the weights of rank {rank}")
            )
            assert found is None, (
                f"A task that steps two optimizers in turn differs from one process: {found}. Define call_prepared, "
                "or remove hocket.Need.SEVERAL_STEPS from `offers`."
            )

    def test_a_batch_size_is_each_ranks_own(self) -> None:
        """Without ``global_batch`` each rank trains on a batch of the loader, and every sample of an epoch is used once."""

        def rank_main(rank: int) -> Any:
            trainer = self.trainer(self.make(), global_batch=None)
            timestamp = trainer.fit("1ep").timestamp
            return trainer.state.strategy.data_ranks, (timestamp.batch, timestamp.sample)

        for rank, (ranks, counted) in enumerate(self.run(rank_main)):
            assert counted == (-(-_SAMPLES // (ranks * _BATCH)), _SAMPLES), (
                f"Rank {rank} counted batches, samples {counted} in an epoch of {_SAMPLES} samples in batches of {_BATCH} on "
                f"each of {ranks} ranks."
            )

    def test_evaluation_counts_each_sample_once(self) -> None:
        """Loss and metrics of an evaluation are those over all samples, each seen by one rank."""

        def rank_main(rank: int) -> Any:
            trainer = self.trainer(self.make(), metrics={"sum": SumOfOutputs()})
            values = trainer.evaluate()
            predicted = trainer.predict(self.seeded(self.data))
            mine = sum(len(outputs) for outputs in predicted)
            return values["eval/loss"], values["eval/sum"], (trainer.state.strategy.data_rank, mine)

        inputs, targets = map(torch.cat, zip(*self.seeded(self.data), strict=True))
        outputs = self.seeded(self.model).to(self.dtype).eval()(inputs).detach()
        loss, total = nn.functional.cross_entropy(outputs, targets).item(), outputs.sum().item()
        by_rank = self.run(rank_main)
        for got_loss, got_total, _ in by_rank:
            assert abs(got_loss - loss) <= self.weight_tolerance, (
                f"The loss is {got_loss}, over all samples it is {loss}."
            )
            assert abs(got_total - total) <= self.weight_tolerance * _SAMPLES, (
                f"A metric that adds up outputs came to {got_total}, over every sample once it is {total}."
            )
        # Ranks with the same data predict the same.
        predicted = sum(number for _, number in {part for *_, part in by_rank})
        assert predicted == _SAMPLES, f"{predicted} outputs were predicted for {_SAMPLES} samples."

    def test_two_trainers_in_turns(self) -> None:
        """A second Trainer in the same processes, while the first one lives and after it was shut down."""

        def rank_main(rank: int) -> Any:
            first, second = self.trainer(self.make()), self.trainer(self.make())
            for trainer in (first, second, first, second):
                trainer.fit("1ep")
            both = weights(first), weights(second)
            for trainer in (first, second):
                trainer.close()
                trainer.state.strategy.shutdown()
                trainer.state.strategy.shutdown()
            third = self.trainer(self.make())
            third.fit()
            return *both, weights(third)

        expected, _ = self.reference(None)
        for by_trainer in self.run(rank_main):
            for number, got in enumerate(by_trainer, 1):
                found = difference(got, expected, self.weight_tolerance, at=f"the weights of Trainer {number}")
                assert found is None, f"Trainers in the same processes disturb each other: {found}."

    def test_an_exception_on_all_ranks_ends_the_fit(self) -> None:
        """The exception propagates unchanged, and the same ranks can train again."""

        def rank_main(rank: int) -> Any:
            trainer = self.trainer(self.make(), callbacks=[raiser(Event.AFTER_LOSS.value, after=2)])
            try:
                trainer.fit()
            except Planned:
                again = self.trainer(self.make())
                again.fit()
                return weights(again)
            return None

        expected, _ = self.reference(None)
        for got in self.run(rank_main):
            assert got is not None, "The exception did not leave fit()."
            found = difference(got, expected, self.weight_tolerance, at="weights")
            assert found is None, f"After an exception, training again differs: {found}."

    # --- state

    def test_model_state_has_plain_names(self) -> None:
        """Full weights under the names of the model itself, on every rank; they load back, and only if every key fits."""

        def rank_main(rank: int) -> Any:
            trainer = self.trainer(self.make())
            state, bus = trainer.state, trainer.state.bus
            full = bus.model_state(state.prepared)
            shapes = {name: tuple(value.shape) for name, value in full.items()}
            changed = {name: torch.full_like(value, 0.5) for name, value in full.items()}
            bus.load_model_state(state.prepared, changed)
            values = {float(value) for tensor in bus.model_state(state.prepared).values() for value in tensor.flatten()}
            refused = False
            try:
                bus.load_model_state(state.prepared, {**changed, "no_such_key": torch.zeros(())})
            except RuntimeError:
                refused = True
            return shapes, values, refused

        plain = self.seeded(self.model)
        task = {f"network.{name}": tuple(value.shape) for name, value in plain.state_dict().items()}
        for shapes, values, refused in self.run(rank_main):
            assert shapes == task, f"model_state has names and shapes {shapes}, expected {task}."
            assert values == {0.5}, "model_state does not return the state that load_model_state was given."
            assert refused, "load_model_state has to raise RuntimeError for a key that the model does not have."

    def test_training_goes_on_from_the_full_state(self) -> None:
        """Loading one Trainer's weights and optimizer state into another gives the same second epoch as one long run."""

        def rank_main(rank: int) -> Any:
            first, second = self.trainer(self.make()), self.trainer(self.make())
            first.fit("1ep")
            one, two = first.state, second.state
            model = copy.deepcopy(one.bus.model_state(one.prepared))
            optimizer = copy.deepcopy(one.bus.optimizer_state(one.prepared, one.optimizers[0]))
            two.bus.load_model_state(two.prepared, model)
            two.bus.load_optimizer_state(two.prepared, two.optimizers[0], optimizer)
            second.fit("1ep")
            return weights(second)

        expected, _ = self.reference(None)
        for got in self.run(rank_main):
            found = difference(got, expected, self.weight_tolerance, at="weights")
            assert found is None, f"Training does not continue from model_state and optimizer_state: {found}."

    # --- collectives

    def test_collectives(self) -> None:
        """Sum, mean, minimum and maximum, in several dtypes; objects of all ranks, rank 0's object; a barrier."""

        def rank_main(rank: int) -> Any:
            trainer = self.trainer(self.make())
            strategy, bus = trainer.state.strategy, trainer.state.bus
            results: dict[str, Any] = {"rank": (strategy.rank, strategy.world_size), "barrier": bus.barrier()}
            for dtype in (torch.float32, torch.float64, torch.int64):
                for op in ("sum", "mean", "min", "max"):
                    if op != "mean" or dtype.is_floating_point:
                        given = torch.tensor(
                            [[rank + 1, 10 - rank], [0, 2**20 + rank]], dtype=dtype, device=trainer.state.device
                        )
                        reduced = bus.all_reduce(given, op)
                        results[f"{op} of {dtype}"] = (reduced.dtype == dtype, reduced.tolist())
            results["gather"] = bus.all_gather_object({"rank": rank, "tensor": torch.tensor([rank])})
            results["broadcast"] = bus.broadcast_object(f"from {rank}")
            return results

        ranks = range(self.world_size)
        rows = torch.tensor([[[rank + 1, 10 - rank], [0, 2**20 + rank]] for rank in ranks], dtype=torch.float64)
        operations = {"sum": rows.sum(0), "mean": rows.mean(0), "min": rows.amin(0), "max": rows.amax(0)}
        for rank, got in enumerate(self.run(rank_main)):
            assert got.pop("rank") == (rank, self.world_size), (
                "strategy.rank and world_size are not those of the process."
            )
            assert got.pop("barrier") is not None, "barrier() has to return True."
            assert got.pop("broadcast") == "from 0", "broadcast_object has to return rank 0's object."
            gathered = [{"rank": other, "tensor": torch.tensor([other])} for other in ranks]
            assert difference(got.pop("gather"), gathered) is None, (
                "all_gather_object has to return every rank's, by rank."
            )
            for what, (same_dtype, values) in got.items():
                expected = operations[what.partition(" ")[0]].tolist()
                assert same_dtype and values == expected, (
                    f"all_reduce: {what} is {values}, expected {expected}, same dtype."
                )


class _Losses(hocket.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def batch_end(self, state: hocket.State) -> None:
        assert state.loss is not None
        self.losses.append(state.loss.item())


class SumOfOutputs:
    """A metric that missing or repeated samples make wrong; combined over ranks by ``merge_state``."""

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += outputs.double().sum().item()

    def compute(self) -> float:
        return self.total

    def reset(self) -> None:
        self.total = 0.0

    def merge_state(self, others: Any) -> None:
        self.total += sum(other.total for other in others)

"""Tests of a plug-in with microbatches, in bf16 and on several ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from hocket.basics.plugin_errors import PlanError
from hocket.errors import Mistake, NotFinite
from hocket.strategies import Strategy
from hocket.surgery import NoEffectWarning
from hocket_testkit.compare import difference
from hocket_testkit.conformance import Conformance, weights
from hocket_testkit.ranks import RankError, run_ranks


class WaysToRun(Conformance):
    """Test that a plug-in acts in the same way however the loop runs, or refuses by name."""

    def test_works_with_microbatches(self) -> None:
        """Training with microbatches equals training on full batches, up to rounding."""
        full, split = self.trainer(self.make()), self.trainer(self.make(), microbatch=3)
        full.fit()
        split.fit()
        found = difference(weights(split), weights(full), self.tolerance("test_works_with_microbatches", 1e-4))
        assert found is None, (
            f"With microbatch=3 the weights differ: {found}. Act on the full batch (Event.AFTER_DATALOADER, "
            "Event.AFTER_TRAIN_BATCH) or identically on every sample. If it is meant to differ, say why in `exempt`; if it is "
            "rounding, allow for it in `tolerances`."
        )

    def test_works_in_bf16(self) -> None:
        """A run with ``precision="bf16"`` trains near one in fp32, with weights of the same dtypes, or is refused by name."""
        try:
            trainer = self.trainer(self.make(), precision="bf16")
        except Mistake as refused:
            assert "bf16" in str(refused), f"precision='bf16' is refused without being named: {refused}"
            return
        exact = self.trainer(self.make())
        before = weights(exact)
        try:
            trainer.fit("1ep")
        except Exception as error:
            raise AssertionError(
                f"With precision='bf16' it raises {type(error).__name__}: {str(error).partition(chr(10))[0]} Activations, and "
                "outputs, are bfloat16 then: convert what needs float32, or refuse the precision by name in before_fit."
            ) from error
        exact.fit("1ep")
        got, wanted = weights(trainer), weights(exact)
        dtypes = [
            name for name in wanted if getattr(got.get(name), "dtype", None) != getattr(wanted[name], "dtype", None)
        ]
        assert not dtypes, f"With precision='bf16' the dtypes of {', '.join(dtypes)} change. Weights stay as they are."
        off, moved = _distance(got, wanted), _distance(wanted, before)
        bound = self.tolerance("test_works_in_bf16", 0.5)
        assert off <= bound * moved or not moved, (
            f"With precision='bf16' the weights end {off:.2g} from those in fp32, which moved by {moved:.2g}. Sums, norms and "
            "small differences need float32: convert to it, and back."
        )

    def test_works_in_every_combination(self) -> None:
        """It trains in bf16 with microbatches and with ``accumulate``, also on two ranks with ddp and fsdp, or is refused."""

        def train(make: Callable[[], Any], **changes: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)  # it may do nothing in a combination, and say so
                try:
                    trainer = self.trainer(make(), **changes)
                    trainer.fit("1ep")
                except NotFinite as error:
                    raise AssertionError(f"With {changes} training diverges: {error}") from None
                except Mistake:
                    return None  # refused by name: it does not claim this combination
            trainer.close()
            return weights(trainer)

        windows: dict[str, Any] = {"accumulate": "2ba"}
        for changes in ({"precision": "bf16", "microbatch": 3}, windows, windows | {"microbatch": 3}):
            got = train(self.make, **changes)
            bad = [name for name, value in (got or {}).items() if torch.is_tensor(value) and not value.isfinite().all()]
            assert not bad, f"With {changes} the weights {', '.join(bad)} are not finite."
        for strategy in ("ddp", "fsdp"):
            several = {"strategy": strategy, "precision": "bf16", "microbatch": 2}

            def on_ranks(name: str, make: Callable[[], Any], several: dict[str, Any] = several) -> list[Any]:
                return _on_two_ranks(lambda rank: train(make, **several, run_name=name))

            try:
                first, second = on_ranks(strategy, self.make)
            except RankError as error:
                try:
                    on_ranks(f"{strategy}-without", lambda: None)
                except RankError:
                    continue  # the model cannot train so without it either
                raise AssertionError(
                    f"With {several} two ranks do not train: {str(error).strip().splitlines()[-1]}"
                ) from None
            found = difference(second, first, at="weights")
            assert found is None, f"With {several} two ranks end with different weights: {found}."

    def test_does_not_depend_on_the_rank(self) -> None:
        """The second of two ranks with the same data and random numbers trains as the first, with the same state."""

        def rank_main(rank: int) -> Any:
            trained = []
            for number in range(2):
                plugin = self.make()
                trainer = self.trainer(plugin, strategy=_OneOfTwo(rank), run_name=f"rank-{rank}-{number}")
                trainer.fit()
                trainer.close()
                trained.append((weights(trainer), plugin.state_dict() if hasattr(plugin, "state_dict") else None))
            return trained

        self.make()  # skips the test here where something is not installed
        try:
            ((first, state), (_, again)), ((second, other), _) = _on_two_ranks(rank_main)  # with torch's ranks, too
        except RankError as error:
            raise AssertionError(f"On one of two ranks it fails: {str(error).strip().splitlines()[-1]}") from None
        found = difference(second, first, at="weights")
        if found is None and difference(again, state) is None:  # without times of a clock
            found = difference(other, state, at="state_dict()")
        assert found is None, (
            f"On rank 1 it acts otherwise than on rank 0, with the same data and random numbers: {found}. Let all ranks do the "
            "same, and only write files on rank 0; draw with state.generator(self, per_rank=True) where ranks should differ."
        )

    def test_works_on_two_ranks(self) -> None:
        """With ``strategy="ddp"`` both ranks end with the same weights, or the plan refuses it by name."""

        def rank_main(rank: int) -> Any:
            plugin = self.make()
            try:
                trainer = self.trainer(plugin, strategy="ddp")
            except PlanError:
                return None
            timestamp = trainer.fit().timestamp
            trainer.close()
            return weights(trainer), timestamp.batch

        self.make()  # skips the test here where something is not installed
        try:
            first, second = _on_two_ranks(rank_main)
        except RankError as error:
            lines = str(error).strip().splitlines()
            raise AssertionError(
                f"Two ranks do not train with it: {lines[0]} {lines[-1]}. All ranks have to call the same collectives, and to "
                "work with a slice of the batch."
            ) from None
        found = difference(second, first, at="(weights, batches)")
        assert found is None, (
            f"After a run on two ranks they differ: {found}. Change gradients and weights on all ranks in the same way: what "
            "depends on a rank's own batch has to be reduced, with state.bus.all_reduce(tensor, 'mean')."
        )


class _OneOfTwo(Strategy):
    """One of two ranks that compute the same in lockstep, without the other one."""

    world_size = 2
    data_rank = 0
    data_ranks = 1

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return tensor * 2 if op == "sum" else tensor.clone()

    def all_gather_object(self, item: object) -> list[Any]:
        return [item, item]


def _on_two_ranks(function: Callable[[int], Any]) -> list[Any]:
    """Return the result of each rank; the data of `data`, a list, are read by both, which is as wanted."""

    def rank_main(rank: int) -> Any:
        warnings.filterwarnings("ignore", "Every rank reads all of the list")
        return function(rank)

    return run_ranks(rank_main, 2)


def _distance(got: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the distance between two sets of weights."""
    pairs = [(got[name], expected[name]) for name in expected if isinstance(expected[name], torch.Tensor)]
    return sum(float((a.double() - b.double()).square().sum()) for a, b in pairs if a.shape == b.shape) ** 0.5

"""The columns of the matrix: what a run with an algorithm is compared with. Each returns what differs; nothing if it holds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import runs
from torch import Tensor

import hocket
from hocket_testkit import RankError, run_ranks


def rounding(name: str) -> float:
    """What sums in another order may make of the weights in six steps, with an algorithm that needs bf16 or not."""
    return 5e-2 if "precision" in runs.ARGUMENTS.get(name, {}) else 2e-5


def microbatches(name: str, folder: Path) -> list[str]:
    """Microbatches of 3 samples give the weights of full batches."""
    return runs.different(runs.trained(name, microbatch=3), runs.alone(name), rounding(name))


def bf16(name: str, folder: Path) -> list[str]:
    """Three steps in bf16 move the weights to where steps in fp32 move them, within 15 % of the way."""
    moved = {}
    for precision in ("fp32", "bf16"):
        trainer = runs.make(name, precision=precision, duration="3ba", eval_data=None)
        before = _flat(trainer)
        trainer.fit()
        moved[precision] = _flat(trainer) - before
    apart = float((moved["bf16"] - moved["fp32"]).norm() / moved["fp32"].norm())
    return [] if apart < 0.15 else [f"{apart:.2f} of the way apart"]


def _flat(trainer: hocket.Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten().float() for parameter in trainer.state.model.parameters()])


def compiled(name: str, folder: Path) -> list[str]:
    """A compiled model is trained to the same weights."""
    import torch._dynamo.backends.debugging
    import torch._inductor.lowering  # noqa: F401  (here once, and not in each fork, which would spend a second on it)

    # In a fork, because a compiler may leave threads of autograd behind, with which this process cannot be forked any more.
    def rank_main(rank: int) -> list[str]:
        compiled, plain = (
            runs.trained(name, duration="3ba", increments=("3ba",), eval_data=None, compile=how)
            for how in ({"backend": "aot_eager"}, False)
        )
        return runs.different(compiled, plain, rounding(name))

    (found,) = run_ranks(rank_main, 1, timeout=240)
    return found


def resume(name: str, folder: Path) -> list[str]:
    """A run that is killed in the middle of its second epoch and resumed has bitwise the weights of one that was not."""
    settings: dict[str, Any] = {"resume": "auto", "memory": not runs.is_text(name)}

    class Kill(hocket.Callback):
        def before_backward(self, state: hocket.State) -> None:
            if state.timestamp.batch == 4:
                os.kill(os.getpid(), signal.SIGKILL)

    def killed(rank: int) -> None:
        runs.make(
            name, checkpoints=hocket.Checkpoints(folder / "run", every="1ba"), callbacks=[Kill()], **settings
        ).fit()

    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(killed, 1)
    resumed = runs.make(name, checkpoints=hocket.Checkpoints(folder / "run", every="1ba"), **settings)
    begun = resumed.state.timestamp.batch
    resumed.fit()
    resumed.close()
    assert begun in (3, 4)
    whole = runs.trained(name, checkpoints=hocket.Checkpoints(folder / "whole", every="1ba"), **settings)
    return runs.different(runs.weights(resumed), whole)


def on_two_ranks(strategy: str, sets: Sequence[tuple[str, ...]]) -> list[dict[str, Tensor] | str]:
    """Return the weights that two ranks train to with each set of algorithms, or why it is refused.

    The ranks train with one set after the other, because starting them takes long.
    """

    def rank_main(rank: int) -> list[dict[str, Tensor] | str]:
        results: list[dict[str, Tensor] | str] = []
        for names in sets:
            half = any("precision" in runs.ARGUMENTS.get(name, {}) for name in names)
            # For batch norm, which some sets have; what fsdp gathers by default is tested with each algorithm alone.
            options = {"param_dtype": "fp32"} if half and strategy == "fsdp" and len(names) > 1 else {}
            try:
                results.append(runs.trained(*names, strategy={strategy: options}))
            except (hocket.plugins.PluginError, ValueError, TypeError) as error:
                results.append(f"refused: {error}")
        return results

    first, second = run_ranks(rank_main, 2, timeout=240)
    for names, one, other in zip(sets, first, second, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            assert one == other, (names, one, other)
        else:
            apart = runs.different(one, other)
            assert not apart, f"{names} on {strategy}: ranks hold different weights: {apart}"
    return first


COLUMNS: dict[str, Callable[[str, Path], list[str]]] = {
    "microbatches": microbatches,
    "bf16": bf16,
    "compile": compiled,
    "resume": resume,
}
STRATEGIES = ("ddp", "fsdp")

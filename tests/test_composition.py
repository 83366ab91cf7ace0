"""An engine that owns the whole batch, with the algorithms that act on actions and those that act between its parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket.loop.actions import finish_gradients


class Pieces(hocket.Strategy):
    """What a pipeline would be: it owns the whole batch and computes its gradients in two pieces without their events."""

    microbatch_events = False

    def gradients(self, state: hocket.State) -> bool:
        bus, batch = state.bus, state.batch
        bus.before_train_batch(state)
        bus.zero_grad(state)
        losses = []
        for piece in bus.split_batch(state, batch, 4):
            piece = bus.move_batch(state, piece)
            loss = bus.loss(state, bus.forward(state, piece), piece).value * (len(piece[0]) / state.rank_samples)
            bus.backward(state, loss)
            losses.append(loss.detach())
        state.loss = torch.stack(losses).sum()
        finish_gradients(state)
        return True


def test_an_algorithm_that_an_engine_would_not_call_is_refused() -> None:
    pytest.importorskip("hocket_general")
    with pytest.raises(
        hocket.plugins.PlanError, match=r"'label-smoothing' acts on before_loss.* but strategy 'pieces'"
    ):
        hocket.Trainer(
            model=nn.Linear(3, 1), loss=nn.functional.mse_loss, algorithms=["label-smoothing"], strategy=Pieces()
        )


@pytest.mark.parametrize("algorithms", [[], ["sam"], ["ema(half_life=2ba)"]], ids=str)
def test_an_engine_that_owns_the_batch_is_one_action(algorithms: list[str]) -> None:
    """Equal to core's own microbatches, closures of SAM included."""
    pytest.importorskip("hocket_general")
    data = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(4)]
    results = []
    for strategy in ("single", Pieces()):
        torch.manual_seed(0)
        trainer = hocket.Trainer(
            model=nn.Linear(3, 1), loss=nn.functional.mse_loss, train_data=data, duration="2ep", device="cpu",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), algorithms=algorithms,
            clip_gradients=0.5, strategy=strategy, microbatch=4,
        )  # fmt: skip
        trainer.fit()
        weights = torch.cat([value.flatten() for value in trainer.model_state_dict(evaluated=True).values()])
        results.append((weights, trainer.state.loss, trainer.state.gradient_norm))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)

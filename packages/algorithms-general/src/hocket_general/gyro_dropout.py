"""Gyro dropout: train a fixed number of subnetworks, each for a while, instead of a new one in every batch."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.algorithm import Algorithm, Phase
from hocket.hookspecs import Event
from hocket.surgery import NoEffectWarning, Policy, Replacement, preview, replace_modules
from hocket.training.step import count

if TYPE_CHECKING:
    from hocket.state import State


class GyroSchedule:
    """Which of ``sigma`` subnetworks are trained when: ``tau`` of them at once, each in one of ``ceil(sigma / tau)`` rounds.

    The rounds divide the training equally, so every subnetwork is trained for the same time (Lee et al. 2022, "Gyro Dropout",
    MLSys). The layers that :func:`gyro_dropout` makes share a schedule.

    Args:
        sigma: the number of subnetworks.
        tau: how many are trained at once, at most ``sigma``.
        seed: determines the masks, and the order of the subnetworks.

    Raises:
        ValueError: ``sigma`` or ``tau`` is less than 1, or ``tau`` larger than ``sigma``.

    Example:
        >>> from hocket_general.functional import GyroSchedule
        >>> schedule = GyroSchedule(sigma=4, tau=2, seed=0)
        >>> first = schedule.chosen()
        >>> schedule.elapsed = 0.5  # half of the training is over
        >>> sorted(first + schedule.chosen())
        [0, 1, 2, 3]
    """

    def __init__(self, sigma: int = 256, tau: int = 16, seed: int = 0) -> None:
        if not 1 <= tau <= sigma:
            raise ValueError(
                f"Gyro dropout was given sigma={sigma} and tau={tau}: sigma is the number of subnetworks, 1 or more, and "
                "tau how many of them are trained at once, from 1 to sigma."
            )
        self.sigma = sigma
        self.tau = tau
        self.seed = seed
        #: The completed fraction of the training, from 0 to 1.
        self.elapsed = 0.0
        #: Samples of the batch, of the current microbatch, and of the microbatches before it.
        self.total, self.samples, self.before = 1, 1, 0
        self._order: tuple[int | None, list[int]] = None, []
        #: By layer: what its masks depend on, and the masks. Not in the layers, where checkpoints would miss them.
        self._masks: dict[int, tuple[Any, Tensor]] = {}

    def chosen(self) -> list[int]:
        """Return the numbers of the subnetworks of the current round."""
        rounds = math.ceil(self.sigma / self.tau)
        start = min(int(self.elapsed * rounds + 1e-9), rounds - 1) * self.tau
        if self._order[0] != self.seed:
            self._order = self.seed, torch.randperm(self.sigma, generator=self._generator("order")).tolist()
        return [self._order[1][(start + place) % self.sigma] for place in range(self.tau)]

    def masks(self, layer: int, p: float, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the masks of a layer for the current round, ``(tau, *shape)``, bool: True for the units that are kept."""
        key = self.seed, tuple(self.chosen()), p, tuple(shape), torch.device(device)
        known, masks = self._masks.get(layer, (None, None))
        if masks is None or known != key:
            drawn = [torch.rand(tuple(shape), generator=self._generator(layer, each)) for each in self.chosen()]
            masks = (torch.stack(drawn) >= p).to(device, non_blocking=True)
            self._masks[layer] = key, masks
        return masks

    def rows(self, number: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the index of the mask for each of ``number`` rows: neighbouring samples of a batch share one.

        The rows are those of the current microbatch, whose number may be a multiple of its samples.
        """
        rows = torch.arange(number, device=device)
        places = (rows * self.samples + self.before * number) * self.tau // (max(self.total, 1) * number)
        return places.clamp_(max=self.tau - 1)

    def _generator(self, *of: Any) -> torch.Generator:
        digest = hashlib.blake2b(repr((self.seed, *of)).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest) % 2**63)


class GyroDropoutLayer(nn.Module):
    """Drop the units that the sample's subnetwork does not have, and multiply the others by ``1 / (1 - p)``; for training only.

    In inputs ``(N, length, F)`` a unit is one of the F features at all positions, otherwise one element of a sample.

    Args:
        schedule: chooses the subnetworks.
        p: the probability that a subnetwork lacks a unit, in (0, 1).
        layer: the number of the layer in its model, which determines its masks.
    """

    def __init__(self, schedule: GyroSchedule, p: float, layer: int) -> None:
        super().__init__()
        self.schedule, self.p, self.layer = schedule, p, layer

    def forward(self, x: Tensor) -> Tensor:
        """Apply the masks of the current round. Raises ValueError for an input without a dimension of units."""
        if not self.training:
            return x
        if x.dim() < 2:
            raise ValueError(
                f"Gyro dropout needs inputs of shape (N, ..., F), and was given {tuple(x.shape)}: samples are dimension 0."
            )
        shape = x.shape[-1:] if x.dim() == 3 else x.shape[1:]
        schedule = self.schedule
        masks = schedule.masks(self.layer, self.p, shape, x.device)
        masks = masks[:, None] if x.dim() == 3 else masks
        return x * masks[schedule.rows(len(x), x.device)].to(x.dtype) / (1 - self.p)

    def extra_repr(self) -> str:
        """Return the arguments."""
        return f"p={self.p}, sigma={self.schedule.sigma}, tau={self.schedule.tau}"


def gyro_dropout(
    model: nn.Module, schedule: GyroSchedule, p: float | None = None
) -> tuple[nn.Module, list[Replacement]]:
    """Replace every :class:`torch.nn.Dropout` of a model by a `GyroDropoutLayer`.

    Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys. In a training loop set
    ``schedule.elapsed`` to the completed fraction of the training before each batch. Samples of a batch are divided between
    the ``tau`` subnetworks of the round in order; a batch need not be a multiple of ``tau``.

    Args:
        model: changed in place.
        schedule: shared by all layers.
        p: the probability of dropping a unit, in (0, 1); None for each module's own. Then modules with 0 or 1 are left alone.

    Returns:
        The model, and the replacements.

    Raises:
        ValueError: ``p`` is outside (0, 1).

    Example:
        >>> import torch
        >>> from hocket_general.functional import GyroSchedule, gyro_dropout
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3))
        >>> model, changed = gyro_dropout(model, schedule := GyroSchedule(sigma=8, tau=2))
        >>> model[1]
        GyroDropoutLayer(p=0.3, sigma=8, tau=2)
        >>> for step in range(100):
        ...     schedule.elapsed = step / 100
        ...     outputs = model(torch.randn(6, 4))
    """
    _check_p(p)

    def build(module: nn.Dropout, index: int) -> nn.Module:
        return GyroDropoutLayer(schedule, module.p if p is None else p, index)

    return model, replace_modules(model, {nn.Dropout: Policy(build, _matches(p))})


class GyroDropout(Algorithm):
    """Replace dropout by masks of a fixed number of subnetworks, each of which is trained for a part of the run.

    Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys. ``sigma`` subnetworks are
    drawn in advance and trained ``tau`` at a time, each for the same fraction of the duration, whatever its unit. Each
    subnetwork trains on an equal part of each batch, with microbatches too. Masks follow from a seed, which checkpoints save.

    Args:
        p: the probability of dropping a unit, in (0, 1); None for that of each replaced module.
        sigma: the number of subnetworks.
        tau: how many are trained at once, at most ``sigma``.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> import hocket, hocket_general, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)), device="cpu",
        ...     loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="1ep",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10,
        ...     algorithms=[hocket_general.GyroDropout(sigma=8, tau=2)],
        ... )
        >>> result = trainer.fit()
    """

    events = {Event.INIT, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD}
    phase = Phase.MODEL

    def __init__(self, p: float | None = None, sigma: int = 256, tau: int = 16) -> None:
        _check_p(p)
        self.p = p
        self.schedule = GyroSchedule(sigma, tau)

    def touches(self, model: nn.Module) -> Sequence[str]:
        """See `hocket.Algorithm.touches`."""
        policy = Policy(lambda old, index: None, _matches(self.p))
        return [f"{name}: Dropout -> GyroDropoutLayer" for name in preview(model, {nn.Dropout: policy})]

    def apply(self, event: Event, state: State) -> None:
        """Replace the modules, or tell the schedule which samples the next forward pass has."""
        schedule = self.schedule
        if event is Event.INIT:
            schedule.seed = int(torch.randint(2**62, (), generator=state.generator(self)))
            _, changed = gyro_dropout(state.model, schedule, self.p)
            state.replacements += changed
            if not changed:
                warnings.warn(
                    f"gyro-dropout found no torch.nn.Dropout in {type(state.model).__name__} that drops anything, and does "
                    "nothing. Remove it, or give the model dropout.",
                    NoEffectWarning,
                    stacklevel=2,
                )
        elif event is Event.BEFORE_TRAIN_BATCH:
            schedule.elapsed = state.elapsed()
            schedule.total, schedule.samples, schedule.before = state.rank_samples, 0, 0
        else:
            schedule.before += schedule.samples
            schedule.samples = count(state, state.batch).samples

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the masks."""
        return {"seed": self.schedule.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the seed, and with it all masks."""
        if state_dict.keys() != {"seed"}:
            raise ValueError(f"GyroDropout's state has the key 'seed', but was given {sorted(state_dict)}")
        self.schedule.seed = state_dict["seed"]


def _check_p(p: float | None) -> None:
    if p is not None and not 0 < p < 1:
        raise ValueError(
            f"Gyro dropout was given p={p}, but it is the probability of dropping a unit: give a number between 0 and 1, such "
            "as 0.5, or None for that of each module."
        )


def _matches(p: float | None) -> Any:
    return lambda module: type(module) is nn.Dropout and (p is not None or 0 < module.p < 1)

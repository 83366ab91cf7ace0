"""Gyro dropout: train a fixed number of subnetworks, each for a while, instead of a new one in every batch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.state.step import count
from hocket.surgery import NoEffectWarning, Replacement
from hocket_general.module_substitution import Substitution, SurgeryAlgorithm

if TYPE_CHECKING:
    from hocket.state.state import State


#: The largest masks of a layer, in bytes; those of attention probabilities may be many times larger.
_LARGEST = 2**25


class GyroSchedule:
    """Which of ``sigma`` subnetworks are trained when: ``tau`` of them at once, each in one of ``ceil(sigma / tau)`` rounds.

    A round lasts ``tau / sigma`` of the training. If ``tau`` does not divide ``sigma``, the last round is shorter and has the
    remaining subnetworks, so that each is trained on the same number of samples (Lee et al. 2022, "Gyro Dropout", MLSys). The
    layers that :func:`gyro_dropout` makes share a schedule.

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
            raise WrongValue(
                f"Gyro dropout was given «sigma={sigma}» and «tau={tau}»: sigma is the number of subnetworks, 1 or more, and "
                "tau how many of them are trained at once, from 1 to sigma."
            )
        self.sigma = sigma
        self.tau = tau
        self._elapsed, self._division = 0.0, (1, 1, 0)
        #: Whether training follows this schedule. Otherwise its layers are ordinary dropout.
        self.active = True
        #: By layer: the probability of dropping a unit, and the masks. Not in the layers, where checkpoints would miss them.
        self._p: list[float] = []
        self._masks: dict[int, Tensor] = {}
        #: By device: samples of the batch, of the current microbatch, of those before it, and the number of subnetworks.
        self._positions: dict[torch.device, Tensor] = {}
        self.seed = seed

    @property
    def seed(self) -> int:
        """Determines the masks, and the order of the subnetworks."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        self._order = torch.randperm(self.sigma, generator=self.generator("order")).tolist()
        self._start()

    @property
    def elapsed(self) -> float:
        """The completed fraction of the training, from 0 to 1."""
        return self._elapsed

    @elapsed.setter
    def elapsed(self, elapsed: float) -> None:
        before, self._elapsed = self.chosen(), elapsed
        if self.chosen() != before:
            self._start()

    def chosen(self) -> list[int]:
        """Return the numbers of the subnetworks of the current round."""
        number = int(self._elapsed * self.sigma / self.tau + 1e-9)
        start = min(number, math.ceil(self.sigma / self.tau) - 1) * self.tau
        return self._order[start : start + self.tau]

    def divide(self, total: int, samples: int, before: int = 0) -> None:
        """Say which samples the next forward pass has: ``samples`` of a batch of ``total``, after ``before`` others."""
        if self._division != (total, samples, before):
            self._division = total, samples, before
            self._place()

    def add_layer(self, p: float) -> int:
        """Return the number of a new layer that drops units with this probability."""
        self._p.append(p)
        return len(self._p) - 1

    def masks(self, layer: int, shape: torch.Size, device: torch.device) -> Tensor:
        """Return the masks of a layer, ``(tau, *shape)``, bool: True for the units that are kept.

        They are the same tensor in every round, so that compiled code finds them, without rows if it were too large.
        """
        masks = self._masks.get(layer)
        if masks is None or masks.shape[1:] != shape or masks.device != device:
            masks = self._make(layer, shape, device)
        return masks

    def position(self, device: torch.device) -> Tensor:
        """Return the tensor on a device that says which samples the forward pass has, and how many subnetworks there are."""
        if device not in self._positions:
            with torch.inference_mode(False):
                self._positions[device] = torch.empty(4, dtype=torch.int64, device=device)
                self._place()
        return self._positions[device]

    def _make(self, layer: int, shape: torch.Size, device: torch.device) -> Tensor:
        rows, size = self.tau, self.tau * math.prod(shape)
        if size > _LARGEST:
            warn(
                f"gyro-dropout leaves ordinary dropout where inputs are (N, {', '.join(map(str, shape))}), as attention "
                f"probabilities may be: {rows} masks take {size / 2**20:.0f} MiB, more than {_LARGEST / 2**20:.0f}.",
                NoEffectWarning,
            )
            rows = 0
        with torch.inference_mode(False):
            self._masks[layer] = torch.empty((rows, *shape), dtype=torch.bool, device=device)
            self._draw(layer)
        return self._masks[layer]

    def _draw(self, layer: int) -> None:
        masks = self._masks[layer]
        for mask, each in zip(masks, self.chosen(), strict=False):
            drawn = torch.rand(mask.shape, generator=self.generator(layer, each))
            mask.copy_(drawn >= self._p[layer], non_blocking=True)

    def _start(self) -> None:
        for layer in self._masks:
            self._draw(layer)
        self._place()

    def _place(self) -> None:
        for position in self._positions.values():
            position.copy_(torch.tensor([*self._division, len(self.chosen())]), non_blocking=True)

    def generator(self, *of: Any) -> torch.Generator:
        """Return the random generator for a purpose."""
        digest = hashlib.blake2b(repr((self._seed, *of)).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest) % 2**63)


class GyroDropoutLayer(nn.Module):
    """Drop the units that the sample's subnetwork does not have, and multiply the others by ``1 / (1 - p)``; for training only.

    In inputs ``(N, length, F)`` a unit is one of the F features at all positions, otherwise one element of a sample. If the
    masks of the units would take more than 32 MiB, the layer is ordinary dropout, and a NoEffectWarning says so; it is too
    while its schedule is not ``active``, as after the fit of a Trainer.

    Args:
        schedule: chooses the subnetworks.
        p: the probability that a subnetwork lacks a unit, in (0, 1).
    """

    def __init__(self, schedule: GyroSchedule, p: float) -> None:
        super().__init__()
        self.schedule, self.p = schedule, p
        self._number = schedule.add_layer(p)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the masks of the current round. Raises ValueError for an input without a dimension of units."""
        if not self.training:
            return x
        if not self.schedule.active:
            return F.dropout(x, self.p)
        if x.dim() < 2:
            raise WrongValue(
                f"Gyro dropout needs inputs of shape (N, ..., F), and was given {tuple(x.shape)}: samples are dimension 0."
            )
        shape = x.shape[-1:] if x.dim() == 3 else x.shape[1:]
        masks = self.schedule.masks(self._number, shape, x.device)
        if not len(masks):
            return F.dropout(x, self.p)
        # Neighbouring samples of a batch share a mask. Rows are those of the microbatch, perhaps several for each sample.
        total, samples, before, subnetworks = self.schedule.position(x.device).unbind()
        rows = torch.arange(len(x), device=x.device)
        places = (rows * samples + before * len(x)) * subnetworks // (total.clamp(min=1) * len(x))
        kept = masks[torch.minimum(places, subnetworks - 1)]
        return x * (kept[:, None] if x.dim() == 3 else kept).to(x.dtype) / (1 - self.p)

    def extra_repr(self) -> str:
        """Return the arguments."""
        return f"p={self.p}, sigma={self.schedule.sigma}, tau={self.schedule.tau}"


@dataclass(frozen=True)
class _Rule(Substitution):
    schedule: GyroSchedule
    p: float | None

    method = "GyroDropout"
    becomes = "-> GyroDropoutLayer"
    nothing = "it has no torch.nn.Dropout that drops anything. Remove GyroDropout, or give the model dropout."

    def __post_init__(self) -> None:
        if self.p is not None and not 0 < self.p < 1:
            raise WrongValue(
                f"Gyro dropout was given «p={self.p}», but it is the probability of dropping a unit: give a number between 0 "
                "and 1, such as 0.5, or «None» for that of each module."
            )

    def wants(self, module: nn.Module) -> bool:
        return type(module) is nn.Dropout and (self.p is not None or 0 < module.p < 1)

    def obstacle(self, module: nn.Module) -> str:
        return ""

    def operate(self, model: nn.Module) -> list[Replacement]:
        if not self.choose(model) and any(isinstance(each, GyroDropoutLayer) for each in model.modules()):
            warn(
                f"GyroDropout was applied to this {type(model).__name__} before, and is not again: the layers of another "
                "Trainer are ordinary dropout now. Make the model anew, or remove GyroDropout.",
                NoEffectWarning,
            )
            return []
        return super().operate(model)

    def build(self, module: Any) -> nn.Module:
        return GyroDropoutLayer(self.schedule, module.p if self.p is None else self.p)


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
    return model, _Rule(schedule, p).operate(model)


class GyroDropout(SurgeryAlgorithm):
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

    events = {
        Event.INIT, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD, Event.FIT_END, Event.EXCEPTION,
    }  # fmt: skip

    def __init__(self, p: float | None = None, sigma: int = 256, tau: int = 16) -> None:
        self.schedule = GyroSchedule(sigma, tau)
        self.substitution = _Rule(self.schedule, p)
        #: Samples of the current microbatch, and of those before it in the batch.
        self._samples = self._before = 0

    def apply(self, event: Event, state: State) -> None:
        """Replace the modules, or tell the schedule which samples the next forward pass has."""
        if event is Event.INIT:
            self.schedule.seed = int(torch.randint(2**62, (), generator=state.generator(self)))
            super().apply(event, state)
        elif event in (Event.FIT_END, Event.EXCEPTION):
            self.schedule.active = False
        elif event is Event.BEFORE_TRAIN_BATCH:
            self.schedule.active = True
            self.schedule.elapsed = state.elapsed()
            self._samples = self._before = 0
        else:
            self._before += self._samples
            self._samples = count(state, state.batch).samples
            self.schedule.divide(state.rank_samples, self._samples, self._before)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the masks."""
        return {"seed": self.schedule.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the seed, and with it all masks."""
        if state_dict.keys() != {"seed"}:
            raise WrongValue(f"GyroDropout's state has the key 'seed', but was given {sorted(state_dict)}")
        self.schedule.seed = state_dict["seed"]

"""What MixUp and CutMix have in common: draws, and the loss of mixed samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hocket.basics.losses import Loss
from hocket.basics.time import Time
from hocket.data.batches import count, take_samples
from hocket.data.mixture import Mixture
from hocket.data.nesting import map_tensors
from hocket.errors import Unsupported, WrongValue
from hocket.help import warn
from hocket.hookspecs import Event, hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.loop.weighing import on_device
from hocket.state.batch_part import BatchPart
from hocket.state.span import Span
from hocket.state.task import SupervisedTask
from hocket.surgery import NoEffectWarning
from hocket_vision.memory_format import take_first

if TYPE_CHECKING:
    from hocket.state.state import State


def draw_share(alpha: float, generator: torch.Generator | None = None) -> float:
    """Draw the share of the first sample from ``Beta(alpha, alpha)``; 1 for ``alpha=0``, which mixes nothing."""
    if not alpha:
        return 1.0
    device = "cpu" if generator is None else generator.device
    share, _ = torch._sample_dirichlet(
        torch.full((2,), alpha, dtype=torch.float64, device=device), generator=generator
    ).tolist()
    return float(share)


def draw_partners(samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw the second sample of each mixture: a permutation of the batch."""
    return torch.randperm(samples, generator=generator, device="cpu" if generator is None else generator.device)


def take_partners(part: Any, partners: Tensor) -> Any:
    """Return copies of the samples with these indices: of a tensor, in its memory format, or of anything that holds samples."""
    if not isinstance(part, Tensor):
        return take_samples(part, partners.tolist(), count(part).samples)
    return take_first(part, partners.to(part.device, non_blocking=True))


def check_alpha(alpha: float) -> None:
    """Raise ValueError for a parameter of the Beta distribution that is negative or not finite."""
    if not (alpha >= 0 and math.isfinite(alpha)):
        raise WrongValue(
            f"alpha is the parameter of a Beta distribution and must be 0 or more, but is {alpha}. Try «alpha=0.2»."
        )


class Mixer(Algorithm):
    """Base of algorithms that mix each sample of a batch with another one: define :meth:`mix`.

    The batch of a rank is mixed on ``after_dataloader``, and both targets travel with the samples, in a
    `hocket.data.Mixture` in the place of the targets. The loss of a microbatch is that mixture of the losses for both. The
    model and metrics get the first targets.

    Args:
        alpha: parameter of the Beta distribution of the shares; see :func:`draw_share`.
        start, stop: see `hocket.Span`.
        input_key, target_key: see `hocket.data.BatchPart`.
    """

    events = {Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.EXCEPTION}
    phase = Phase.MIX
    #: The name for messages.
    called: ClassVar[str]

    def __init__(
        self, alpha: float, start: str | Time | None, stop: str | Time | None, input_key: Any, target_key: Any
    ) -> None:
        check_alpha(alpha)
        self.alpha = alpha
        self._span = Span(start, stop)
        self._inputs = BatchPart(self.called, "input", input_key)
        self._targets = BatchPart(self.called, "target", target_key)
        #: The targets of the current microbatch, from before_forward to after_loss.
        self._mixture: Mixture | None = None
        #: Whether a batch was mixed before.
        self._began = False
        #: The action without this implementation and wrappers.
        self._each_loss: Any = None

    def mix(self, inputs: Any, targets: Any, generator: torch.Generator) -> tuple[Any, Any]:
        """Return mixed inputs, and the targets or a `Mixture` of them. Changes neither."""
        raise Unsupported(f"{type(self).__name__} needs a mix(inputs, targets, generator).")

    def match(self, event: Event, state: State) -> bool:
        """Whether there is anything to do: on ``after_dataloader``, between ``start`` and ``stop``."""
        return event is not Event.AFTER_DATALOADER or self._span.includes(state)

    def apply(self, event: Event, state: State) -> None:
        """Mix the batch; give the model and metrics the first targets, and the loss both."""
        if event is Event.AFTER_DATALOADER:
            inputs, targets = self._inputs.of(state), self._targets.of(state)
            if isinstance(targets, Mixture):
                raise WrongValue(
                    f"{self.called} was given samples that another mixer has mixed already. Keep one of the two, or give them "
                    "start= and stop= that do not overlap."
                )
            mixed, targets = self.mix(inputs, targets, state.generator(self, per_rank=True))
            self._warn_of_one(inputs)
            state.batch = self._inputs.put(state, mixed)
            state.batch = self._targets.put(state, targets)
        elif event is Event.EXCEPTION:
            self._mixture = None
        elif event is Event.BEFORE_FORWARD:
            targets = self._targets.of(state)
            self._mixture = targets if isinstance(targets, Mixture) else None
            self._put(state, first=True)
        elif event is Event.BEFORE_LOSS:
            self._put(state, first=False)
        else:
            self._put(state, first=True)
            self._mixture = None

    def _warn_of_one(self, inputs: Any) -> None:
        """Warn if the first batch that is mixed has one sample; the last batch of an epoch may have."""
        if not self._began and count(inputs).samples == 1:
            warn(
                f"{self.called} mixes the samples of each rank's batch, and the first has one sample, so it mixes nothing. "
                "Use a larger batch_size in the DataLoader, with «microbatch=1» in the Trainer if memory is short, or remove "
                f"{self.called}.",
                NoEffectWarning,
            )
        self._began = True

    def _put(self, state: State, first: bool) -> None:
        if self._mixture is not None:
            state.batch = self._targets.put(state, self._mixture.first if first else self._mixture)

    @hookimpl
    def loss(self, state: State, outputs: Any, batch: Any) -> Loss | None:
        """Compute the loss of a microbatch for both targets."""
        if self._mixture is None:
            return None
        if isinstance(state.task, SupervisedTask) and state.task.loss_function is None:
            raise WrongValue(
                f"{type(state.model).__name__} computes its own loss, for one target of each sample, and {self.called} makes "
                f"samples with two. Pass «loss=» a function of outputs and targets, or remove {self.called}."
            )
        if self._each_loss is None:
            self._begin(state)
        mixture = self._targets.of(state)
        second, first = (self._loss_for(state, outputs, targets) for targets in (mixture.second, mixture.first))
        if second.value is first.value:
            raise WrongValue(
                f"The loss does not depend on the targets that {self.called} mixes, those at {self._targets.place(state)!r} in "
                "the batch. Pass target_key= to say where the loss finds its targets."
            )
        summed = (first.reduction or state.loss_reduction) == "sum"
        return interpolate(first, second, mixture.share, summed)

    def _loss_for(self, state: State, outputs: Any, targets: Any) -> Loss:
        """Return the loss for one of the targets, with its weight as a tensor if it is not the number of samples."""
        state.batch = self._targets.put(state, targets)
        views = map_tensors(lambda tensor: tensor.view_as(tensor) if _has_gradient(tensor) else tensor, outputs)
        loss: Loss = self._each_loss(state, views, state.batch)
        weight = loss.weight
        if weight is None:
            return loss
        weight = on_device(weight, loss.value)

        def gate(gradient: Tensor) -> Tensor:  # a mean over nothing is NaN, and so is its gradient
            return torch.where(weight != 0, gradient, 0)

        map_tensors(lambda view: _has_gradient(view) and view.register_hook(gate), views)
        return loss._replace(weight=weight)

    def _begin(self, state: State) -> None:
        """Find what computes a loss for targets that are not mixed."""
        bus = state.bus
        wrappers = set(bus.listeners("loss")) - set(bus.listeners("loss", wrappers=False))
        self._each_loss = bus.compiled("loss", without={*wrappers, state.attachment_of(self)})


def _has_gradient(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.requires_grad


def interpolate(first: Loss, second: Loss, share: float, summed: bool = False) -> Loss:
    """Return the loss of samples of which ``share`` is the first target and the rest the second.

    Of means with weights it is the weighted mean, and its weight the mixture of the weights. The total weights of both
    targets are the same in a batch that was mixed with a permutation of itself. So over microbatches and ranks
    this adds up to ``share`` of the mean for the first targets and ``1 - share`` of that for the second.
    """
    of_first, of_second = first.weight, second.weight
    weight: Any = None
    if of_first is not None and of_second is not None:
        weight = share * of_first + (1 - share) * of_second

    def mixed(a: Tensor, b: Tensor) -> Tensor:
        if of_first is None or of_second is None or summed:
            return share * a + (1 - share) * b
        sums = share * _sum(a, of_first) + (1 - share) * _sum(b, of_second)
        return sums / weight

    parts = {name: mixed(part, second.parts[name]) for name, part in first.parts.items() if name in second.parts}
    return first._replace(value=mixed(first.value, second.value), weight=weight, parts=parts)


def _sum(mean: Tensor, weight: float | Tensor) -> Tensor:
    return torch.where(torch.as_tensor(weight) != 0, mean * weight, 0)

"""Exponential moving average of the weights, used for evaluation and prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hocket.basics.dtensors import local
from hocket.basics.time import Time, Unit
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket_general.weight_averages import Averages, is_plain, positive

if TYPE_CHECKING:
    from hocket.state.state import State


def ema_smoothing(half_life: float, update_interval: float = 1) -> float:
    """Return the fraction of the old average that one update keeps, so that a weight's influence halves every ``half_life``.

    ``2 ** -(update_interval / half_life)``, both in the same unit (batches, epochs, samples, tokens).

    Raises:
        ValueError: ``half_life`` is not positive, or ``update_interval`` is negative.

    Example:
        >>> from hocket_general.functional import ema_smoothing
        >>> ema_smoothing(half_life=1), ema_smoothing(half_life=1, update_interval=2)
        (0.5, 0.25)
    """
    if not half_life > 0 or not update_interval >= 0:
        raise WrongValue(
            f"A half-life of {half_life} with an update every {update_interval} makes no average: give a positive "
            f"half-life and an interval in the same unit."
        )
    return float(2.0 ** -(update_interval / half_life))


def ema_update(averages: Sequence[Tensor], values: Iterable[Tensor], smoothing: float) -> None:
    """Move averages towards values in place: ``average = smoothing * average + (1 - smoothing) * value``.

    Floating-point and complex averages are moved with one fused operation per device and dtype; integer and boolean
    ones, for which a mean has no meaning, become copies of their values. An average may be wider than its value (keep
    averages of half-precision weights in float32: an update is mostly smaller than their rounding). Nothing waits for
    the device.

    Args:
        averages: tensors to change. They must not share memory with each other or with ``values``.
        values: tensors of the same shapes, in the same order; DTensors where the averages are, sharded identically.
        smoothing: the fraction of the old average that is kept, in [0, 1].

    Raises:
        ValueError: ``smoothing`` is outside [0, 1], or the sequences differ in length or in a shape.

    Example:
        >>> import torch
        >>> from hocket_general.functional import ema_update
        >>> model = torch.nn.Linear(1, 1)
        >>> averages = [torch.zeros_like(parameter) for parameter in model.parameters()]
        >>> ema_update(averages, [parameter.detach() for parameter in model.parameters()], smoothing=0.99)
    """
    if not 0 <= smoothing <= 1:
        raise WrongValue(
            f"smoothing is {smoothing}, but it is the fraction of the old average that is kept: give one in [0, 1]."
        )
    values = list(values)
    if len(averages) != len(values):
        raise WrongValue(
            f"There are {len(averages)} averages for {len(values)} values: pass as many of one as of the other."
        )
    with torch.no_grad():
        move = get_ema_multi_avg_fn(smoothing)  # a lerp: equal tensors stay bitwise equal
        means: list[Tensor] = []
        targets: list[Tensor] = []
        converted = 0
        for average, value in zip(averages, values, strict=True):
            if average.shape != value.shape:
                raise WrongValue(
                    f"An average of shape {tuple(average.shape)} cannot follow a value of shape {tuple(value.shape)}: "
                    f"pass averages and values in the same order."
                )
            average, value = local(average), local(value)  # elementwise, so shards need no communication
            if average.is_floating_point() or average.is_complex():
                means.append(average)
                targets.append(value.to(average.dtype))
                converted += average.nbytes if value.dtype != average.dtype else 0
                if converted >= _CONVERTED:
                    move(means, targets, 0)
                    means, targets, converted = [], [], 0
            else:
                average.copy_(value)
        if means:
            move(means, targets, 0)


#: Bytes of values that are converted to the dtype of their averages at a time: few operations, and little memory.
_CONVERTED = 1 << 26


class EMA(Averages):
    """Evaluate and predict with ``average = smoothing * average + (1 - smoothing) * weight`` (Polyak averaging).

    Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging", with exponential weights. Training is
    not affected. Trainable parameters and the buffers of the ``state_dict`` are averaged in at least float32; integer,
    sparse and quantized buffers, and masks with infinities, follow the model. For an evaluation or a
    prediction the averages are copied into the model's own tensors. The training weights are restored bitwise
    afterwards, even after a failure. Optimizers and wrappers of the model keep their references, and shards are averaged
    in place. Costs one more copy of the weights, and another one while evaluating. With several EMAs, evaluation uses the
    first that has started; :meth:`averaged` returns the others.

    Args:
        half_life: the time in which a weight's influence halves, in ba, ep, sp or tok; ``"1000ba"`` if neither it nor
            ``smoothing`` is given. Exact for batches of different sizes too.
        smoothing: instead of ``half_life``, the fraction of the old average that each update keeps, in [0, 1).
        start: the average starts as a copy of the weights at the first update at or after this time: a fraction of the
            duration such as ``"0.2dur"``, or a time such as ``"500ba"``. Before, the model itself is evaluated.
        update_interval: time between updates; by default ``"1ba"``, or one of the half-life's unit.

    Raises:
        ValueError: both ``half_life`` and ``smoothing`` are given, or one of the arguments is out of its range; later,
            if loaded averages do not fit the model.

    Example:
        >>> import hocket, hocket_general, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", duration="2ep", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10, algorithms=[hocket_general.EMA(half_life="5ba")],
        ... )
        >>> result = trainer.fit()
        >>> averages = trainer.model_state_dict(evaluated=True)
    """

    def __init__(
        self,
        half_life: str | Time | None = None,
        smoothing: float | None = None,
        start: str | Time = "0dur",
        update_interval: str | Time | None = None,
    ) -> None:
        if half_life is not None and smoothing is not None:
            raise WrongValue(
                f"EMA was given «half_life={str(half_life)!r}» and «smoothing={smoothing}», which set the same "
                f"quantity: give one of them. smoothing is 2 ** -(update_interval / half_life)."
            )
        if smoothing is not None and not 0 <= smoothing < 1:
            raise WrongValue(
                f"EMA was given «smoothing={smoothing}», but it is the fraction of the old average that an update keeps: "
                f"give a number in [0, 1), such as 0.999, or a half_life such as '1000ba'."
            )
        self.smoothing = smoothing
        self.half_life = None if smoothing is not None else positive(self, "half_life", half_life or "1000ba")
        default = "1ba" if self.half_life is None else Time(1, self.half_life.unit)
        super().__init__(start, update_interval or default)
        if self.half_life is not None and self.half_life.unit is not self.update_interval.unit:
            raise WrongValue(
                f"EMA was given «half_life='{self.half_life}'» and «update_interval='{self.update_interval}'», which "
                f"cannot be compared: give both in one unit."
            )

    def apply(self, event: Event, state: State) -> None:
        """Update the averages, or exchange them with the weights; warn of settings with which they are of little use."""
        if event is Event.FIT_START and self._updated is None:
            self._compare(state)
        super().apply(event, state)

    def _has_average(self, tensor: Tensor) -> bool:
        if not is_plain(tensor):  # the model's own is used
            return False
        return tensor.requires_grad or (not isinstance(tensor, nn.Parameter) and _is_finite(tensor))

    def _move(self, now: int) -> None:
        smoothing = self.smoothing
        if smoothing is None:
            assert self.half_life is not None and self._updated is not None
            smoothing = ema_smoothing(self.half_life.value, now - self._updated)
        ema_update([average for average, _ in self._pairs], [tensor for _, tensor in self._pairs], smoothing)

    def _compare(self, state: State) -> None:
        """Warn of several averages, and of a half-life longer than the run, with which they stay near the first weights."""
        several = [each.obj for each in state.bus.attachments if isinstance(each.obj, EMA)]
        if len(several) > 1 and several[0] is self:
            warn(
                f"There are {len(several)} EMA: evaluation uses the first that has started. Remove the others, or evaluate "
                "theirs with ema.averaged(model)."
            )
        half_life, duration = self.half_life, state.max_duration
        if half_life is None or duration is None or half_life.unit not in (Unit.BATCH, Unit.EPOCH, duration.unit):
            return
        length: float = duration.value
        if (half_life.unit, duration.unit) == (Unit.BATCH, Unit.EPOCH) and state.epoch_length:
            length *= state.epoch_length
        elif half_life.unit is not duration.unit:
            return
        if half_life.value > length:
            shorter = Time(max(1, int(length) // 10), half_life.unit)
            warn(
                f"EMA's half-life of {half_life} is longer than this run of {int(length)}{half_life.unit}, so that its "
                f"averages, which are evaluated, stay near the first weights. Write {{'ema': {{'half_life': '{shorter}'}}}}."
            )


def _is_finite(buffer: Tensor) -> bool:
    """Whether the buffer is finite, so that it has a mean; waits for the device."""
    return not buffer.is_floating_point() or bool(buffer.isfinite().all())

"""Label smoothing: targets that keep a little probability for every class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hocket.algorithm import Algorithm, Phase
from hocket.data.batches import get_item, set_item
from hocket.hookspecs import Event
from hocket_general.functional import smooth_labels

if TYPE_CHECKING:
    from hocket.state import State


class LabelSmoothing(Algorithm):
    """Trains on ``(1 - smoothing) * target + smoothing / K`` (Szegedy et al. 2016, section 7, arXiv 1512.00567).

    The targets of a microbatch are replaced while its loss is computed and are themselves again afterwards, so metrics
    and evaluation never see smoothed ones. The loss has to accept class probabilities of shape ``(N, K, ...)``, as
    :func:`torch.nn.functional.cross_entropy` does, and should reduce with a mean: where index targets hold
    ``ignore_index``, the other positions weigh more in turn, so that the mean over all positions is the mean over those
    that count. A loss that counts targets itself, or sums, calls :func:`hocket_general.functional.smooth_labels`
    instead.

    Args:
        smoothing: the mass given to the uniform distribution, in [0, 1].
        target_key: where in the batch the targets are: an index, a key, or an attribute.
        ignore_index: the class index of positions that are no targets.

    Raises:
        ValueError: ``smoothing`` is outside [0, 1]; later, targets that do not fit the outputs.
        TypeError: later, if the model's outputs are not a tensor of logits.
    """

    events = {Event.BEFORE_LOSS, Event.AFTER_LOSS}
    phase = Phase.LOSS

    def __init__(self, smoothing: float = 0.1, target_key: Any = 1, ignore_index: int = -100) -> None:
        if not 0 <= smoothing <= 1:
            raise ValueError(
                f"LabelSmoothing was given smoothing={smoothing}, but it is a share of the probability mass: give a "
                f"number in [0, 1], such as 0.1."
            )
        self.smoothing = smoothing
        self.target_key = target_key
        self.ignore_index = ignore_index
        self._targets: Tensor | None = None

    def apply(self, event: Event, state: State) -> None:
        """Smooth the targets before the loss, put the originals back after it."""
        if event is Event.BEFORE_LOSS:
            self._targets = get_item(state.batch, self.target_key)
            state.batch = set_item(state.batch, self.target_key, self._smoothed(state.outputs, self._targets))
        else:
            state.batch = set_item(state.batch, self.target_key, self._targets)
            self._targets = None

    def _smoothed(self, logits: Any, targets: Any) -> Tensor:
        if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
            raise TypeError(
                f"LabelSmoothing needs a model that returns a tensor of logits and a batch with a tensor of targets at "
                f"{self.target_key!r}, but found {type(logits).__name__} and {type(targets).__name__}. Set "
                f"target_key, or call hocket_general.functional.smooth_labels in the loss of a hocket.Task."
            )
        smooth = smooth_labels(logits, targets, self.smoothing, ignore_index=self.ignore_index)
        if targets.shape == logits.shape:
            return smooth
        # Without waiting for the device nobody knows whether a position is ignored; without one this multiplies by 1.0.
        return smooth.mul_(targets.numel() / (targets != self.ignore_index).sum())

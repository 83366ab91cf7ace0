"""Z-loss: keep the logarithm of the softmax's denominator near 0.

Sources: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", section 5, arXiv 2204.02311; de Brébisson and
Vincent 2016, "The Z-loss: a shift and scale invariant classification loss belonging to the Spherical Family", arXiv 1604.08859.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.basics.losses import Loss
from hocket.errors import WrongValue
from hocket.hookspecs import Event, hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.state.span import Span
from hocket_nlp.argument_checks import number
from hocket_nlp.fused_head import FusedHead, withheld_of
from hocket_nlp.linear_cross_entropy import mean_of
from hocket_nlp.logits_and_labels import Reading, reading_of

if TYPE_CHECKING:
    from hocket.basics.time import Time
    from hocket.state.state import State


def z_loss(
    logits: Tensor,
    labels: Tensor | None = None,
    coefficient: float = 1e-4,
    *,
    class_dim: int = -1,
    ignore_index: int = -100,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Return ``coefficient * mean(log² Z)``, where ``Z = sum_k exp(logits_k)`` is the denominator of the softmax.

    Chowdhery et al. 2022, section 5 (arXiv 2204.02311). The mean is over the labels that count. Computed in float32, or float64
    for such logits.

    Args:
        logits: floating point, ``(N, ..., K)``, or with the classes in another dimension ``class_dim``.
        labels: shaped like ``logits`` without the classes; None if all positions count. Only which ones are ignored matters,
            and their classes for ``class_weights``.
        coefficient: the weight beside the cross entropy.
        class_dim: the dimension of the classes.
        ignore_index: positions with this label do not count.
        class_weights: ``(K,)``, as of :class:`torch.nn.CrossEntropyLoss`: the mean is weighted by those of the labels.

    Returns:
        A scalar. The mean over no label at all is NaN, with gradients of zero.

    Raises:
        TypeError, ValueError: the coefficient is not a number above 0, or the labels have another shape.

    Example:
        >>> import torch
        >>> from hocket_nlp.functional import z_loss
        >>> z_loss(torch.zeros(2, 4), torch.tensor([3, -100]), coefficient=1.0)  # log(4) squared
        tensor(1.9218)
    """
    coefficient = number("z_loss", "coefficient", coefficient, 1e-4)
    with torch.autocast(logits.device.type, enabled=False):
        squares = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(class_dim).square()
        if labels is None:
            return coefficient * squares.mean()
        if labels.shape != squares.shape:
            raise WrongValue(
                f"Labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)} with the classes in "
                f"dimension {class_dim}: give labels of shape {tuple(squares.shape)}."
            )
        counted = labels != ignore_index
        weights = counted.to(squares.dtype)
        if class_weights is not None:
            weights = weights * class_weights.to(squares)[labels.where(counted, 0)]
        # Not a product with 0 for ignored positions, whose logits may be infinite.
        total = (squares.where(counted, 0) * weights).sum()
        return coefficient * mean_of(total, weights.sum())


class ZLoss(Algorithm):
    """Add ``coefficient * mean(log² Z)`` to the loss in training (Chowdhery et al. 2022, section 5, arXiv 2204.02311).

    ``Z`` is the denominator of the softmax, and the mean is over the labels that count in the loss, weighted over microbatches
    and ranks as the loss is. Logged as the part ``z-loss`` of the loss. Evaluation reports the loss alone.

    The loss must be a cross entropy: torch's, with class weights and ``ignore_index`` too; or one that a model or task computes
    itself, shifted (causal language models) or not (masked ones, sequence-to-sequence, classification). Which one it is, is
    found out in the first batch, by comparing values. With fused-cross-entropy the z-loss is computed in its chunks.

    Args:
        coefficient: the weight of the z-loss; PaLM's is 1e-4.
        start, stop: when to begin and to end, such as ``"0.1dur"``; see `hocket.Span`.

    Raises:
        ValueError: ``coefficient`` is not positive, or ``stop`` is not after ``start``; later, a task with ``train_batch``, or
            a loss that is not known as a cross entropy.

    Example:
        >>> import hocket, hocket_nlp, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 3), loss="cross_entropy", optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randint(3, (8,)))], algorithms=[hocket_nlp.ZLoss(1e-4)],
        ... )
        >>> result = trainer.fit()
        >>> list(trainer.state.loss_parts)
        ['z-loss']
    """

    events = {
        Event.INIT, Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.FIT_END, Event.EXCEPTION, Event.CLOSE,
    }  # fmt: skip
    phase = Phase.LOSS

    def __init__(
        self, coefficient: float = 1e-4, start: str | Time | None = None, stop: str | Time | None = None
    ) -> None:
        self.coefficient: float = number("ZLoss", "coefficient", coefficient, 1e-4)
        self._span = Span(start, stop)
        #: The fused output layers of the model.
        self._heads: list[FusedHead] = []
        #: How the loss is computed from outputs and batch; None until it is found out.
        self._reading: Reading | None = None
        #: The z-loss of the current microbatch, to be added to its loss.
        self._added: Tensor | None = None

    def apply(self, event: Event, state: State) -> None:
        """Give the coefficient to fused output layers before the forward pass; add the z-loss to other losses."""
        if event is Event.INIT:
            self._heads = [module for module in state.model.modules() if isinstance(module, FusedHead)]
        elif event is Event.BEFORE_LOSS:  # which tells the loop that this acts between outputs and loss
            self._added = None
        elif event is Event.AFTER_LOSS:
            if self._added is not None:
                assert state.loss is not None
                state.loss, self._added = state.loss + self._added.to(state.loss.dtype), None
        else:
            active = event is Event.BEFORE_FORWARD and self._span.includes(state)
            for head in self._heads:
                head.z_loss = self.coefficient if active else 0.0

    @hookimpl(wrapper=True)
    def loss(self, state: State, outputs: Any, batch: Any) -> Generator[None, Loss, Loss]:
        """Compute the z-loss of a microbatch and name it as a part. It is added once the loss has its weight."""
        loss = yield
        if state.eval_label is not None:
            return loss
        value = loss.value.new_zeros((), dtype=torch.float32)
        withheld = withheld_of(outputs)
        if withheld is not None:
            value = withheld.z_loss
        elif self._span.includes(state):
            if self._reading is None:
                self._reading = reading_of(state, loss, outputs, self._complete(state, batch))
            if self._reading is not None:
                value = self._added = self._of(self._reading, loss, state, outputs, batch)
        return loss._replace(parts={**loss.parts, "z-loss": value.detach()})

    def _complete(self, state: State, batch: Any) -> Any:
        """Return the batch with its labels, those that the task makes included."""
        complete: Callable[[Any], Any] | None = getattr(state.task, "with_labels", None)
        return batch if complete is None else complete(batch)

    def _of(self, reading: Reading, loss: Loss, state: State, outputs: Any, batch: Any) -> Tensor:
        logits, labels = reading.find(outputs, self._complete(state, batch))
        value = z_loss(
            logits, labels, self.coefficient, class_dim=reading.class_dim, ignore_index=reading.ignore_index,
            class_weights=reading.class_weights,
        )  # fmt: skip
        if (loss.reduction or state.loss_reduction) != "sum":
            return value
        return value * reading.weight(logits, labels)

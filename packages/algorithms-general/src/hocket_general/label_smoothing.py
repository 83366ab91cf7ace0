"""Label smoothing: targets with a small probability for every class."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.basics.losses import WHOLE, Loss
from hocket.data.mixture import Mixture
from hocket.errors import WrongType, WrongValue
from hocket.help import warn
from hocket.hookspecs import Event, hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.loop import inferred_weights
from hocket.state.batch_part import BatchPart
from hocket.state.span import Span
from hocket.state.step import count
from hocket.state.task import SupervisedTask

if TYPE_CHECKING:
    from hocket.basics.time import Time
    from hocket.state.state import State


def smooth_labels(logits: Tensor, targets: Tensor, smoothing: float = 0.1, *, ignore_index: int = -100) -> Tensor:
    """Mix targets with the uniform distribution: ``(1 - smoothing) * target + smoothing / K`` over K classes.

    Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7 (arXiv 1512.00567).

    Args:
        logits: floating point, ``(N, K)`` or ``(N, K, d1, ...)``; only its shape, dtype and device matter.
        targets: class indices, an integer tensor ``(N,)`` or ``(N, d1, ...)``, or probabilities shaped like ``logits``.
        smoothing: the mass given to the uniform distribution, in [0, 1].
        ignore_index: positions with this class index get a row of zeros, which adds nothing to a cross entropy. The
            mean of :func:`torch.nn.functional.cross_entropy` still divides by them; that of :func:`soft_cross_entropy`
            does not.

    Returns:
        A new tensor shaped like ``logits``, in its dtype, or in float32 if that is narrower.

    Raises:
        ValueError: ``smoothing`` is outside [0, 1], the shapes do not fit together, or (checked on the CPU; a device
            raises its own assertion) an index is neither a class nor ``ignore_index``.
        TypeError: ``logits`` are not floating point, or index targets are not integers.

    Example:
        >>> import torch
        >>> from hocket_general.functional import smooth_labels
        >>> smooth_labels(torch.zeros(1, 4), torch.tensor([2]), smoothing=0.2)
        tensor([[0.0500, 0.0500, 0.8500, 0.0500]])
    """
    if not 0 <= smoothing <= 1:
        raise WrongValue(
            f"smoothing is {smoothing}, but it is a fraction of the probability mass: give a number in [0, 1]."
        )
    if not logits.is_floating_point() or logits.ndim < 2:
        raise WrongType(
            f"smooth_labels needs floating-point logits of shape (N, K, ...) with the classes in dimension 1, and was "
            f"given {logits.dtype} of shape {tuple(logits.shape)}."
        )
    classes = logits.shape[1]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    with torch.no_grad():
        if targets.shape == logits.shape:
            return targets.to(dtype) * (1 - smoothing) + smoothing / classes
        if targets.shape != logits.shape[:1] + logits.shape[2:]:
            raise WrongValue(
                f"Targets of shape {tuple(targets.shape)} do not fit logits of shape {tuple(logits.shape)}: give class "
                f"indices of shape {tuple(logits.shape[:1] + logits.shape[2:])} or probabilities shaped like the "
                f"logits."
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise WrongType(
                f"Targets of shape {tuple(targets.shape)} are class indices for logits of shape "
                f"{tuple(logits.shape)}, but their dtype is {targets.dtype}: convert them with targets.long()."
            )
        ignored = targets == ignore_index
        indices = targets.masked_fill(ignored, 0).long().unsqueeze(1)
        smooth = torch.full(logits.shape, smoothing / classes, dtype=dtype, device=logits.device)
        try:
            smooth.scatter_(1, indices, 1 - smoothing + smoothing / classes)
        except RuntimeError as error:  # on the CPU; a device raises its own assertion, later
            raise WrongValue(
                f"Class indices must be in [0, {classes}) for {classes} classes, or be «ignore_index={ignore_index}», "
                f"but they range from {int(targets.min())} to {int(targets.max())}: pass the ignore_index that your "
                f"labels use."
            ) from error
        return smooth.masked_fill_(ignored.unsqueeze(1), 0)


def soft_cross_entropy(
    logits: Tensor, targets: Tensor, reduction: Literal["mean", "sum", "none"] = "mean", *, ignore_index: int = -100
) -> Tensor:
    """Return the cross entropy ``-sum_k t_k log softmax(logits)_k`` for class indices, or probabilities of any total mass.

    The mean divides by the total mass of the targets. With index targets that is the number of positions that are not
    ignored, as in :func:`torch.nn.functional.cross_entropy`; with the zero rows that :func:`smooth_labels` makes of
    ignored positions it is the same number.

    Args:
        logits: ``(N, K)`` or ``(N, K, d1, ...)``.
        targets: integer class indices ``(N,)`` or ``(N, d1, ...)``, or probabilities shaped like ``logits``.
        reduction: ``"mean"`` and ``"sum"`` give a scalar, ``"none"`` one loss per position, ``(N,)`` or ``(N, d1,
            ...)``.
        ignore_index: positions with this class index are ignored; does not apply to probabilities.

    Raises:
        ValueError: an unknown ``reduction``.

    Example:
        >>> import torch
        >>> from hocket_general.functional import smooth_labels, soft_cross_entropy
        >>> logits, targets = torch.zeros(2, 4), torch.tensor([2, -100])
        >>> soft_cross_entropy(logits, smooth_labels(logits, targets))  # log(4): the ignored position does not count
        tensor(1.3863)
    """
    if reduction not in ("mean", "sum", "none"):
        raise WrongValue(f"reduction is {reduction!r}: give 'mean', 'sum' or 'none'.")
    if targets.shape != logits.shape:
        return F.cross_entropy(logits, targets, reduction=reduction, ignore_index=ignore_index)
    losses = -(targets * F.log_softmax(logits, dim=1)).sum(1)
    if reduction == "none":
        return losses
    return losses.sum() / targets.sum() if reduction == "mean" else losses.sum()


class LabelSmoothing(Algorithm):
    """Train on ``(1 - smoothing) * target + smoothing / K`` (Szegedy et al. 2016, section 7, arXiv 1512.00567).

    If the loss is torch's cross entropy (:func:`torch.nn.functional.cross_entropy`, by name, as a function or a
    ``functools.partial`` of it, or :class:`torch.nn.CrossEntropyLoss`), its ``label_smoothing`` is set while the loss of a
    microbatch is computed. So class weights, ``ignore_index``, microbatches and ranks have the effect that they have in torch.

    Any other loss gets class probabilities of shape ``(N, K, ...)`` in the place of class indices, in the batch, while it is
    computed. It should be a mean over positions. Positions with ``ignore_index`` get a row of zeros, and the others more
    weight, so that the mean over all positions equals the mean over the positions that are not ignored. The number of the
    latter weights microbatches and ranks, unless the loss returns its own weight. A loss that counts labels itself, or sums,
    should call :func:`hocket_general.functional.smooth_labels` instead.

    Metrics and evaluation never see smoothed labels.

    Args:
        smoothing: the mass given to the uniform distribution, in [0, 1].
        target_key: where in the batch the targets are: an index, a key, or an attribute; None for the Trainer's ``targets``, or
            index 1.
        ignore_index: the class index of positions to ignore; None for that of torch's cross entropy, or -100.
        start, stop: when to begin and to end, such as ``"0.8dur"``; see `hocket.Span`.

    Raises:
        ValueError: ``smoothing`` is outside [0, 1], or ``stop`` is not after ``start``; later, targets that do not fit the
            outputs, or are not class probabilities, or a cross entropy with another ``ignore_index``.
        TypeError: later, if the loss is not torch's cross entropy, and takes class indices only, or the model's outputs are not
            a tensor of logits.
        KeyError: later, if a batch has nothing at ``target_key``.

    Example:
        >>> import hocket, hocket_general, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 3), loss=torch.nn.CrossEntropyLoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randint(3, (8,)))], algorithms=[hocket_general.LabelSmoothing(0.1)],
        ... )
        >>> result = trainer.fit("1ep")
    """

    events = {Event.FIT_START, Event.BEFORE_LOSS, Event.AFTER_LOSS}
    phase = Phase.LOSS

    def __init__(
        self,
        smoothing: float = 0.1,
        target_key: Any = None,
        ignore_index: int | None = None,
        start: str | Time | None = None,
        stop: str | Time | None = None,
    ) -> None:
        if not 0 <= smoothing <= 1:
            raise WrongValue(
                f"LabelSmoothing was given «smoothing={smoothing}», but it is a fraction of the probability mass: give a "
                f"number in [0, 1], such as 0.1."
            )
        self.smoothing = smoothing
        self._place = BatchPart("label-smoothing", "target", target_key)
        self.ignore_index = ignore_index
        self._span = Span(start, stop)
        #: The targets that the batch has outside the loss of the current microbatch; None for torch's cross entropy.
        self._targets: Any = None
        #: Whether dense targets were checked, and whether the loss was tried.
        self._checked = self._tried = False

    def match(self, event: Event, state: State) -> bool:
        """Whether there is anything to do: around the loss, between ``start`` and ``stop``."""
        return event is Event.FIT_START or self._span.includes(state)

    def apply(self, event: Event, state: State) -> None:
        """Smooth the targets before a loss that is not torch's cross entropy, restore the originals after it."""
        if event is Event.FIT_START:
            self._compare(state)
        elif _cross_entropy_of(state.task) is not None:
            if event is Event.BEFORE_LOSS and not self._checked:
                self._check(state.outputs, self._targets_of_loss(state))
        elif event is Event.BEFORE_LOSS:
            self._targets = self._place.of(state)
            state.batch = self._place.put(state, self._smoothed(state.outputs, self._targets))
        else:
            state.batch = self._place.put(state, self._targets)
            self._targets = None

    @hookimpl(wrapper=True)
    def loss(self, state: State, outputs: Any, batch: Any) -> Generator[None, Loss, Loss]:
        """Let torch's cross entropy smooth the labels; weight other losses by the labels that count."""
        if state.eval_label is not None or not self._span.includes(state):
            return (yield)
        if _cross_entropy_of(state.task) is not None:
            with _smoothing(state.task, self.smoothing):
                return (yield)
        try:
            loss = yield
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            self._explain(state, error)
            raise
        return self._weighted(state, loss)

    def _compare(self, state: State) -> None:
        """Warn of a loss that smooths labels already; raise ValueError for one that ignores another label."""
        loss = state.task.loss_function if isinstance(state.task, SupervisedTask) else None
        options = loss.keywords if isinstance(loss, functools.partial) else getattr(loss, "__dict__", {})
        if twice := options.get("label_smoothing"):
            own = f"and label-smoothing smooths by {self.smoothing} too"
            if _cross_entropy_of(state.task) is not None:
                own = f"in whose place label-smoothing puts {self.smoothing}"
            warn(f"The loss smooths labels by «label_smoothing={twice}», {own}. Remove one of the two.")
        ignored = options.get("ignore_index", -100)
        if self.ignore_index not in (None, ignored) and _cross_entropy_of(state.task) is not None:
            raise WrongValue(
                f"LabelSmoothing was given «ignore_index={self.ignore_index}», and the loss ignores {ignored}. Omit "
                "ignore_index of label-smoothing, and write "
                f"«loss=torch.nn.CrossEntropyLoss(ignore_index={self.ignore_index})» if that label should not count."
            )

    def _targets_of_loss(self, state: State) -> Any:
        """Return the targets that torch's cross entropy gets; of a mixture the first."""
        assert isinstance(state.task, SupervisedTask)
        found = state.task.targets_of(state.batch) if self._place.key is None else self._place.of(state)
        return found.first if isinstance(found, Mixture) else found

    def _check(self, logits: Any, targets: Any) -> None:
        """Raise ValueError for dense targets that are not class probabilities, such as numbers. Only the first are read."""
        dense = isinstance(logits, Tensor) and isinstance(targets, Tensor) and targets.shape == logits.shape
        if not dense or logits.ndim < 2:
            return
        self._checked = True
        sums = targets.sum(1, dtype=torch.float32)
        if (
            logits.shape[1] > 1
            and bool((targets >= 0).all())
            and torch.allclose(sums, torch.ones_like(sums), atol=1e-2)
        ):
            return
        raise WrongValue(
            f"LabelSmoothing was given targets of shape {tuple(targets.shape)} from {targets.min():.3g} to "
            f"{targets.max():.3g}, which are not class probabilities: those are 0 or more, and sum to 1 over two or more "
            "classes. It applies to classification only; remove label-smoothing for regression, binary or multi-label targets."
        )

    # --- losses other than torch's cross entropy

    def _smoothed(self, logits: Any, targets: Any) -> Any:
        if isinstance(targets, Mixture):  # of MixUp or CutMix
            return targets.map(functools.partial(self._smoothed, logits))
        if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
            raise WrongType(
                f"LabelSmoothing needs a model that returns a tensor of logits and a batch with a tensor of targets at "
                f"target_key, but found {type(logits).__name__} and {type(targets).__name__}. Set "
                f"target_key, or call hocket_general.functional.smooth_labels in the loss of a hocket.Task."
            )
        if not self._checked:
            self._check(logits, targets)
        smooth = smooth_labels(logits, targets, self.smoothing, ignore_index=self._ignored)
        if targets.shape == logits.shape:
            return smooth
        # Checking for ignored positions would wait for the device; if there are none, this multiplies by 1.0.
        return smooth.mul_(targets.numel() / self._counted(targets).clamp(min=1))

    @property
    def _ignored(self) -> int:
        return -100 if self.ignore_index is None else self.ignore_index

    def _counted(self, targets: Tensor) -> Tensor:
        return (targets != self._ignored).sum()

    def _weighted(self, state: State, loss: Loss) -> Loss:
        """Give a mean without a weight the number of labels that count, once core has tried that it is a mean."""
        targets, over = self._targets, loss.reduction or state.loss_reduction
        if loss.weight is not None or over == "sum" or over in WHOLE or not self._replaces_indices(state, targets):
            return loss
        if not self._tried and (samples := count(state, state.batch).samples) != state.step.trained_on:
            inferred_weights.in_training(state, loss, samples)
            self._tried = True
        return loss._replace(weight=self._counted(targets))

    def _explain(self, state: State, error: Exception) -> None:
        """Raise TypeError if the loss failed because it takes class indices: if it can be computed with them."""
        targets = self._targets.first if isinstance(self._targets, Mixture) else self._targets
        if isinstance(error, torch.OutOfMemoryError) or not self._replaces_indices(state, targets):
            return
        try:
            with torch.no_grad(), state.bus.forward_context():
                state.task.loss(state.outputs, self._place.put(state, targets))
        except Exception:
            return
        said = str(error).partition("\n")[0]
        raise WrongType(
            f"label-smoothing gives the loss class probabilities of shape {tuple(state.outputs.shape)} in place of the class "
            f"indices of shape {tuple(targets.shape)}, and the loss takes indices only ({said}). Write "
            "«loss=torch.nn.functional.cross_entropy», which may stand in for nll_loss as it is; or let the loss take class "
            "probabilities; or remove label-smoothing."
        ) from None

    def _replaces_indices(self, state: State, targets: Any) -> bool:
        return isinstance(targets, Tensor) and targets.shape != state.outputs.shape


def _cross_entropy_of(task: Any) -> Any:
    """Return the task's loss function if it is torch's cross entropy, which can smooth labels itself; else None."""
    loss = task.loss_function if isinstance(task, SupervisedTask) else None
    called = loss.func if isinstance(loss, functools.partial) and not loss.args else loss
    module = isinstance(loss, nn.CrossEntropyLoss) and type(loss).forward is nn.CrossEntropyLoss.forward
    return loss if module or called is F.cross_entropy else None


@contextmanager
def _smoothing(task: Any, smoothing: float) -> Iterator[None]:
    """Set the ``label_smoothing`` of the task's cross entropy inside."""
    loss = task.loss_function
    owner, name, changed = (
        (loss, "label_smoothing", smoothing)
        if isinstance(loss, nn.Module)
        else (task, "loss_function", functools.partial(loss, label_smoothing=smoothing))
    )
    before = getattr(owner, name)
    setattr(owner, name, changed)
    try:
        yield
    finally:
        setattr(owner, name, before)

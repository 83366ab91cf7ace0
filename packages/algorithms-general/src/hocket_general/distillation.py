"""Knowledge distillation: train on what a teacher predicts, besides the targets."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.basics.losses import Loss, classes
from hocket.errors import WrongType, WrongValue
from hocket.hookspecs import Event, hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.state.span import Span
from hocket.state.step import count
from hocket.state.task import SupervisedTask, Task
from hocket_general.class_logits import check_loss, check_targets, class_dim_of, logits_of
from hocket_general.hints import Hints
from hocket_general.teachers import as_student, make_teacher

if TYPE_CHECKING:
    from hocket.basics.time import Time
    from hocket.state.state import State


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float = 2.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    *,
    class_dim: int = 1,
) -> Tensor:
    """Return ``T² KL(softmax(teacher / T) || softmax(student / T))``.

    Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2 (arXiv 1503.02531). The factor ``T²``
    keeps the size of the gradients when the temperature changes. The paper's cross entropy differs by the teacher's entropy,
    which has no gradient; the divergence is 0 where both agree. Computed in float32, or float64 for such logits.

    Args:
        student_logits: floating point, ``(N, K)`` or ``(N, K, d1, ...)``.
        teacher_logits: of the same shape; gets no gradient.
        temperature: positive; larger ones weight the small probabilities more.
        reduction: ``"mean"`` over positions and ``"sum"`` give a scalar, ``"none"`` one value per position, ``(N, d1, ...)``.
        class_dim: the dimension of the K classes; -1 for logits of shape ``(N, ..., K)``, as those of language models.

    Raises:
        ValueError: the shapes differ, ``temperature`` is not positive, or an unknown ``reduction``.

    Example:
        >>> import torch
        >>> from hocket_general.functional import distillation_loss
        >>> distillation_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]]), temperature=1.0)
        tensor(0.3278)
    """
    _check_temperature("distillation_loss", temperature)
    if reduction not in ("mean", "sum", "none"):
        raise WrongValue(f"reduction is {reduction!r}: give 'mean', 'sum' or 'none'.")
    if student_logits.shape != teacher_logits.shape:
        raise WrongValue(
            f"The student's logits have shape {tuple(student_logits.shape)} and the teacher's {tuple(teacher_logits.shape)}: "
            "both need the same classes, in the same order. Give a teacher of the student's classes."
        )
    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    student = F.log_softmax(student_logits.to(dtype) / temperature, class_dim)
    teacher = F.log_softmax(teacher_logits.detach().to(dtype) / temperature, class_dim)
    losses = F.kl_div(student, teacher, reduction="none", log_target=True).sum(class_dim) * temperature**2
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def _check_temperature(who: str, temperature: float) -> None:
    if not isinstance(temperature, int | float) or not temperature > 0:
        raise WrongValue(f"{who} was given «temperature={temperature!r}»: give a positive number, such as 2.0.")


class Distillation(Algorithm):
    """Train on ``(1 - alpha) * loss + alpha * T² KL(teacher || student)`` (Hinton et al. 2015, section 2, arXiv 1503.02531).

    The teacher sees the inputs that the student sees, augmented ones included, in eval mode and without gradients, on the same
    device and under the same precision. A task around the model that has no parameters of its own, such as one that normalizes
    images, calls the teacher in the model's place, unless the teacher is a `hocket.Task`. What the forward of such a task draws
    at random, or does in training only, differs for the teacher: augment in the data set, or with ``batch_transform=``.
    It is not part of the model: neither its weights nor its state are in checkpoints, and no optimizer has its parameters.
    Evaluation reports the task's loss alone.

    With ``features``, outputs of inner modules are matched too: their mean squared difference, times ``feature_weight``, is
    added (hints; Romero et al. 2015, equation 3, arXiv 1412.6550, for features of equal shapes).

    Args:
        teacher: a module; a function without arguments that makes one; or the path of weights for a copy of the model.
        temperature: softens both distributions; positive.
        alpha: the weight of the teacher, in [0, 1]; the targets get the rest.
        features: names of modules of the student, and the names of the teacher's modules to match; or a list of names that both
            have.
        feature_weight: the weight of the features' mean squared difference.
        weights: the path of weights to load into a ``teacher`` that is a module or a function.
        start: when distillation begins: a fraction of the duration such as ``"0.2dur"``, or a time; None for the beginning.
        stop: when it ends; None for the end.
        output_key: where the logits are in the outputs: an index, a key or an attribute; None for a tensor, or ``"logits"``.
        class_dim: the dimension of the classes. None for 1 in logits ``(N, K)`` and with torch's classification losses; else
            the one that index targets leave over, or the last one of ``(N, T, K)`` beside a loss that the model computes.
        ignore_index: positions with this index as target do not count; None for the loss's, or -100.

    Raises:
        ValueError: an argument out of range, no effect at all, a teacher that shares parameters with the model, or another
            ``ignore_index`` than the loss's; later, logits (unless ``alpha`` is 0) or features of different shapes, logits
            whose classes may be in several places, or targets of regression or of several labels.
        TypeError: a ``teacher``, ``features`` or outputs of another type.

    Example:
        >>> import hocket, hocket_general, torch
        >>> teacher = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 3), loss="cross_entropy", optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randint(3, (8,)))] * 10,
        ...     algorithms=[hocket_general.Distillation(teacher, temperature=4.0)],
        ... )
        >>> result = trainer.fit()
    """

    events = {
        Event.INIT, Event.FIT_START, Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.AFTER_LOSS,
        Event.FIT_END, Event.EXCEPTION, Event.CLOSE,
    }  # fmt: skip
    phase = Phase.LOSS

    def __init__(
        self,
        teacher: nn.Module | Callable[[], nn.Module] | str | Path,
        temperature: float = 2.0,
        alpha: float = 0.5,
        features: Mapping[str, str] | list[str] | None = None,
        feature_weight: float = 1.0,
        weights: str | Path | None = None,
        start: str | Time | None = None,
        stop: str | Time | None = None,
        output_key: Any = None,
        class_dim: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        _check_temperature("Distillation", temperature)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
            raise WrongValue(f"Distillation was given «alpha={alpha!r}»: give the weight of the teacher, from 0 to 1.")
        if (
            feature_weight < 0
            or (feature_weight != 1 and not features)
            or (alpha == 0 and not (features and feature_weight))
        ):
            raise WrongValue(
                f"Distillation was given «alpha={alpha}» and «feature_weight={feature_weight}», with "
                f"{'' if features else 'no '}features: it would change nothing, or train away from it. Give positive weights."
            )
        if not (isinstance(teacher, nn.Module | str | os.PathLike) or callable(teacher)):
            raise WrongType(
                f"Distillation was given a {type(teacher).__name__} as the teacher: give a module, a function that makes one, "
                "or the path of weights for a copy of the model."
            )
        if weights is not None and isinstance(teacher, str | os.PathLike):
            raise WrongValue(
                f"Distillation was given two paths of weights, «teacher={str(teacher)!r}» and «weights={str(weights)!r}». Give "
                "a module, or a function that makes one, as the teacher, or omit weights."
            )
        if not isinstance(features, Mapping | list | tuple | None):
            raise WrongType(
                f"Distillation was given «features={features!r}»: give a list of names that the model and the teacher have, "
                "such as «features=['layer2']», or a dict of the model's names and the teacher's."
            )
        self.teacher, self.temperature, self.alpha = teacher, temperature, alpha
        names = features or {}
        self._hints = Hints(dict(names) if isinstance(names, Mapping) else {each: each for each in names})
        self.feature_weight, self.weights, self.output_key = feature_weight, weights, output_key
        self.class_dim, self.ignore_index = class_dim, ignore_index
        self._ignored = -100
        #: The first targets, until they are checked.
        self._first: Any = None
        self._checked = False
        self._span = Span(start, stop)
        #: The teacher, and the task of the run with it in place of the model; None before the run is set up.
        self._module: nn.Module | None = None
        self._predict: Callable[[Any], Any] | None = None
        #: Of the current microbatch: whether the teacher has seen it, its logits (None if alpha is 0), index targets, and the
        #: reduction of the task's loss.
        self._seen = False
        self._logits: Tensor | None = None
        self._targets: Tensor | None = None
        self._reduction: str | None = None

    def apply(self, event: Event, state: State) -> None:
        """Set up the teacher; compute its outputs for each microbatch, and add the distillation loss."""
        if event is Event.INIT:
            self._set_up(state)
        elif event is Event.FIT_START:
            assert self._module is not None
            self._forget()
            self._hints.record(state.model, self._module)
        elif event is Event.BEFORE_FORWARD:
            self._seen = False
            self._hints.begin_forward()
        elif event is Event.AFTER_FORWARD:
            if self._span.includes(state):
                self._teach(state)
        elif event is Event.AFTER_LOSS:
            if self._seen:
                self._add(state)
        else:
            self._forget()

    @hookimpl(wrapper=True)
    def loss(self, state: State, outputs: Any, batch: Any) -> Generator[None, Loss, Loss]:
        """Note whether the task's loss is a sum."""
        loss = yield
        self._reduction = loss.reduction or state.loss_reduction
        return loss

    # --- the teacher

    def _set_up(self, state: State) -> None:
        if self.alpha:
            check_loss(state.task)
        self._ignored = self._ignore_index(state.task)
        module = make_teacher(self.teacher, self.weights, state)
        self._hints.check(state.model, module)
        self._module = state.bus.convert_module(module.to(state.device)).eval()
        self._predict = self._module
        if isinstance(state.task, SupervisedTask) and not isinstance(self._module, Task):
            self._predict = as_student(state.task, self._module)

    def _ignore_index(self, task: Task) -> int:
        loss = task.loss_function if isinstance(task, SupervisedTask) else None
        known = classes(loss)
        its = getattr(loss, "ignore_index", getattr(task, "ignore_index", None)) if known is None else known[1]
        if None not in (its, self.ignore_index) and its != self.ignore_index:
            raise WrongValue(
                f"Distillation was given «ignore_index={self.ignore_index}», and the loss ignores {its}. Omit ignore_index, "
                "which takes the loss's, or give the loss the same."
            )
        return next(index for index in (self.ignore_index, its, -100) if index is not None)

    def _teach(self, state: State) -> None:
        assert self._module is not None and self._predict is not None
        if not self._checked and isinstance(task := state.task, SupervisedTask) and task.loss_function is not None:
            self._first = task.targets_of(state.batch)
        self._targets = self._index_targets(state)  # now, because others may replace targets while the loss is computed
        try:
            with torch.no_grad(), state.bus.forward_context():
                outputs = self._predict(state.batch)
        except Exception as error:
            if not isinstance(error, torch.OutOfMemoryError):
                error.add_note("Distillation called its teacher with the model's inputs. Give one that takes these.")
            raise
        if self.output_key is not None and isinstance(outputs, Tensor) and isinstance(state.outputs, Tensor):
            raise WrongValue(
                f"Distillation got «output_key={self.output_key!r}» for models that return tensors. Omit it."
            )
        self._seen, self._logits = True, logits_of(outputs, self.output_key, "teacher") if self.alpha else None

    def _forget(self) -> None:
        self._hints.end()
        self._seen, self._logits, self._targets = False, None, None

    # --- the loss

    def _add(self, state: State) -> None:
        loss, targets, self._seen = state.loss, self._targets, False
        assert loss is not None
        added, values = loss.new_zeros((), dtype=torch.float32), {}
        number: Any = count(state, state.batch).samples if targets is None else (targets != self._ignored).sum()
        if self._logits is not None:
            soft, number = self._soft_loss(state, self._logits)
            added = self.alpha * soft
            values["distillation/loss"] = soft.detach()
        if self._hints:
            hint = self._hints.loss()
            added = added + self.feature_weight * hint
            values["distillation/features"] = hint.detach()
        if self._reduction == "sum":  # over the elements of this microbatch
            added = added * number
        state.loss = (1 - self.alpha) * loss + added.to(loss.dtype)
        state.log(values)

    def _soft_loss(self, state: State, teacher: Tensor) -> tuple[Tensor, Any]:
        """Return the mean divergence of the positions that count, and their number."""
        student, targets, self._logits = logits_of(state.outputs, self.output_key, "model"), self._targets, None
        dim = class_dim_of(state.task, student, targets, self.class_dim)
        if not self._checked:
            check_targets(self._first, student, dim)
            self._first, self._checked = None, True
        positions = distillation_loss(student, teacher, self.temperature, "none", class_dim=dim)
        if targets is None or targets.shape != positions.shape:
            return positions.mean(), positions.numel()
        counted = (targets != self._ignored).to(positions.dtype)
        number = counted.sum()
        return (positions * counted).sum() / number.clamp(min=1), number

    def _index_targets(self, state: State) -> Tensor | None:
        """Return the index targets of the microbatch, or None."""
        task = state.task
        if not isinstance(task, SupervisedTask) or task.loss_function is None:
            return None
        targets = task.targets_of(state.batch)
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex():
            return None
        return targets

"""What one evaluation says of each sample, and the statistics of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongValue
from hocket_tools.progress import say
from hocket_tools.resampling import Statistic

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Metrics by name: those of classes, of numbers, and of any task.
OF_CLASSES = ("accuracy", "balanced-accuracy", "precision", "recall", "f1")
OF_NUMBERS = ("mae", "mse", "rmse")
METRICS = ("loss", *OF_CLASSES, *OF_NUMBERS)


@dataclass
class Samples:
    """One evaluation, by sample in the order of the set. Arrays are empty if the task has nothing of their kind.

    Attributes:
        losses: ``(samples, 2)`` float64: the loss times its weight, and the weight.
        targets, predicted: ``(samples, …)`` int64: classes, -1 where a label is ignored.
        errors: ``(samples, 3)`` float64: sums of absolute and squared errors, and their number.
        classes: the number of classes of the outputs; 0 for other tasks.
        outputs, raw_targets: what metrics get, one item for each sample, if they were kept.
        inputs: the checksum of the batch's tensors for each sample; empty texts where it is not known.
        nonfinite: how many samples have outputs with NaN or infinity, which metrics of classes count as some class.
    """

    losses: NDArray[Any]
    targets: NDArray[Any]
    predicted: NDArray[Any]
    errors: NDArray[Any]
    classes: int = 0
    outputs: list[Any] = field(default_factory=list)
    raw_targets: list[Any] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    nonfinite: int = 0

    def __len__(self) -> int:
        return max(len(self.losses), len(self.targets), len(self.errors), len(self.outputs))

    def kinds(self) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the kind of each sample, and counts ``(kinds, classes)`` of targets, predictions and hits of each kind.

        A sample of one label is of the kind of its target and prediction; one of many labels, such as a mask, is its own.
        """
        import numpy as np

        number, eye = self.classes, np.eye(self.classes + 1)[:, : self.classes]  # the last row is for ignored labels
        if self.targets.ndim == 1:
            cells = np.stack([self.targets, self.predicted], 1)
            pairs, kind = np.unique(cells, axis=0, return_inverse=True)
            known = (pairs[:, :1] >= 0).astype(float)
            is_target, is_predicted = eye[pairs[:, 0]], eye[pairs[:, 1]] * known
            return kind.reshape(-1), is_target, is_predicted, is_target * (pairs[:, :1] == pairs[:, 1:])
        targets, predicted = (each.reshape(len(each), -1) for each in (self.targets, self.predicted))
        counts = [np.zeros((len(targets), number)) for _ in range(3)]
        for label in range(number):
            is_target, is_predicted = targets == label, (predicted == label) & (targets >= 0)
            for which, there in enumerate((is_target, is_predicted, is_target & is_predicted)):
                counts[which][:, label] = there.sum(1)
        return np.arange(len(targets)), counts[0], counts[1], counts[2]

    def confusion(self) -> NDArray[np.int64]:
        """Return ``(classes, classes)`` int64: how many labels of class i were predicted as class j."""
        import numpy as np

        targets, predicted = self.targets.reshape(-1), self.predicted.reshape(-1)
        known = targets >= 0
        cells = targets[known] * self.classes + predicted[known]
        return np.bincount(cells, minlength=self.classes**2).reshape(self.classes, self.classes).astype(np.int64)

    def sample_losses(self) -> NDArray[Any]:
        """Return ``(samples,)`` float64: the mean loss of each sample; NaN for one without weight."""
        import numpy as np

        with np.errstate(divide="ignore", invalid="ignore"):
            losses: NDArray[Any] = self.losses[:, 0] / self.losses[:, 1]
        return losses

    def worst(self, number: int) -> list[int]:
        """Return the places of the samples of the highest loss, the worst first; without losses, of wrong predictions."""
        import numpy as np

        if len(self.losses):
            losses = np.nan_to_num(self.sample_losses(), nan=-np.inf, posinf=np.inf)
            return [int(at) for at in np.argsort(-losses, kind="stable")[:number]]
        if self.classes:
            wrong = (self.targets != self.predicted).reshape(len(self.targets), -1).mean(1)
            return [int(at) for at in np.argsort(-wrong, kind="stable")[:number] if wrong[at]]
        return []


def joined(one: Samples, other: Samples) -> Samples:
    """Return the samples of two evaluations of one set, those of the second after those of the first."""
    import numpy as np

    if len(one) != len(other):
        why = f"they have {len(one)} and {len(other)} samples"
    elif one.targets.shape != other.targets.shape:
        why = "their targets are of different kinds, such as classes and numbers"
    elif (differ := np.argwhere(one.targets != other.targets)).size:
        why = f"their targets differ, first that of sample {differ[0][0]}"
    else:
        if changed := [at for at, pair in enumerate(zip(one.inputs, other.inputs, strict=True)) if len(set(pair)) > 1]:
            say(
                f"the inputs of {len(changed)} of {len(one)} samples differ between the two evaluations, first those of sample "
                f"{changed[0]}. These are pairs only of the same samples, prepared in two ways, and in one order."
            )
        return merged([one, other])
    raise WrongValue(
        f"The two evaluations are not of the same samples, so they are not paired: {why}. «Judge both on one set, in one "
        "order, judge(trainer, 'test') with the same eval_data={'test': loader} for both Trainers, without shuffle¦Name a set "
        "that both have, in one order, such as module:function with a loader without shuffle»."
    )


def statistic(samples: Samples, name: str, metric: Any = None) -> Statistic:
    """Return a metric as a statistic of samples, whose values over classes are means of the classes (macro averages).

    Precision, recall and F1 are those of scikit-learn with ``average="macro"`` and ``zero_division=0``: over the classes that
    are a target or a prediction; ``balanced-accuracy`` is the mean recall of the classes that are a target.

    Args:
        samples: of one evaluation, or of two (`joined`).
        name: one of `METRICS`, or any for ``metric``.
        metric: an object with update, compute and reset, which gets the outputs and targets of each resample.

    Raises ValueError for a metric that the task has not.
    """
    import numpy as np

    if metric is not None:
        return Statistic(name, np.arange(len(samples)), _resampling(samples, metric))
    if name not in METRICS:
        raise WrongValue(
            f"There is no metric {name!r}. Its names are {', '.join(METRICS)}, and those of the configuration."
        )
    if name == "loss":
        return Statistic(name, np.arange(len(samples)), _ratio(_needed(samples.losses, name, "a loss of each sample")))
    if name in OF_NUMBERS:
        errors = _needed(samples.errors, name, "numbers as outputs and targets of one shape")
        column, root = (0 if name == "mae" else 1), name == "rmse"
        mean = _ratio(errors[:, [column, 2]])
        return Statistic(name, np.arange(len(samples)), (lambda weights: np.sqrt(mean(weights))) if root else mean)
    _needed(samples.targets, name, "outputs (samples, classes, …) with labels (samples, …)")
    kind, targets, predicted, hits = samples.kinds()
    if name == "accuracy":
        right = _ratio(np.stack([hits.sum(1), targets.sum(1)], 1))
        single = samples.targets.ndim == 1 and bool((samples.targets >= 0).all())
        return Statistic(name, kind, right, proportion=single)
    return Statistic(name, kind, _over_classes(name, targets, predicted, hits))


def _needed(array: NDArray[Any], name: str, what: str) -> NDArray[Any]:
    if not len(array):
        known = " or ".join(each for each in ("mae", "accuracy", "loss") if each != name)
        raise WrongValue(f"The metric {name!r} needs {what}, which this run has not. Name another, such as {known}.")
    return array


def _ratio(columns: NDArray[Any]) -> Callable[[Any], Any]:
    """Return the function of weights that divides the sum of the first column by that of the second."""
    import numpy as np

    def value(weights: Any) -> Any:
        sums = weights @ columns
        with np.errstate(divide="ignore", invalid="ignore"):
            return sums[:, 0] / sums[:, 1]

    return value


def _over_classes(name: str, targets: Any, predicted: Any, hits: Any) -> Callable[[Any], Any]:
    import numpy as np

    def value(weights: Any) -> Any:
        support, guesses, right = weights @ targets, weights @ predicted, weights @ hits
        of_all = {"precision": guesses, "f1": (support + guesses) / 2}.get(name, support)
        there = support > 0 if name == "balanced-accuracy" else support + guesses > 0
        share = np.divide(right, of_all, out=np.zeros_like(right), where=of_all > 0)
        number = there.sum(1)
        return np.divide((share * there).sum(1), number, out=np.full(len(number), np.nan), where=number > 0)

    return value


def _resampling(samples: Samples, metric: Any) -> Callable[[Any], Any]:
    """Return the function of weights that gives a metric the samples as often as their weights say."""
    import copy

    import numpy as np
    import torch

    outputs, targets = (torch.stack(each) for each in (samples.outputs, samples.raw_targets))

    def value(weights: Any) -> Any:
        found = []
        for each in weights.astype(np.int64):
            of_set = copy.deepcopy(metric)
            of_set.reset()
            at = torch.from_numpy(np.repeat(np.arange(len(each)), each))
            of_set.update(outputs[at], targets[at])
            found.append(float(of_set.compute()))
        return np.array(found)

    return value


def per_class(confusion: NDArray[Any]) -> list[dict[str, float]]:
    """Return precision, recall, F1 and support of each class, from ``(classes, classes)`` counts; 0 where nothing divides."""
    rows = []
    for label in range(len(confusion)):
        hits, support, guesses = map(int, (confusion[label, label], confusion[label].sum(), confusion[:, label].sum()))
        of = {"precision": guesses, "recall": support, "f1": (support + guesses) / 2}
        scores = {name: hits / number if number else 0.0 for name, number in of.items()}
        rows.append({"class": label, **scores, "support": support})
    return rows


def merged(parts: Sequence[Samples]) -> Samples:
    """Return the samples of several parts of a set, one after the other."""
    import numpy as np

    arrays, lists = ("losses", "targets", "predicted", "errors"), ("outputs", "raw_targets", "inputs")
    joint: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in parts]) for name in arrays}
    joint |= {name: [item for each in parts for item in getattr(each, name)] for name in lists}
    classes, nonfinite = max(each.classes for each in parts), sum(each.nonfinite for each in parts)
    return Samples(**joint, classes=classes, nonfinite=nonfinite)

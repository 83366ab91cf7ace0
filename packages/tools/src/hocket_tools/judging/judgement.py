"""Judge one run on one set: intervals, classes and worst examples, and how well it withstands corrupted images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.data import loaders
from hocket.errors import WrongValue
from hocket.help.names import closest
from hocket.state.simple_metrics import Mean
from hocket_tools.arguments import check_least, checked
from hocket_tools.judging.arguments import label_of
from hocket_tools.judging.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from hocket_tools.judging.ordered import in_order
from hocket_tools.judging.paired import Difference, paired_test
from hocket_tools.judging.recording import record
from hocket_tools.judging.samples import METRICS, Samples, joined, per_class, statistic
from hocket_tools.progress import Progress, say
from hocket_tools.resampling import Estimate, Method, Statistic, bootstrap

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.run.trainer import Trainer


@dataclass(frozen=True, slots=True)
class How:
    """How intervals and tests are computed; see `hocket_tools.bootstrap`."""

    level: float = 0.95
    resamples: int = 2000
    method: Method = "bca"
    seed: int = 0


@dataclass(slots=True)
class Judgement:
    """What is known of a run on a set.

    Attributes:
        run, label: the run, and the evaluation set.
        samples: the record of each sample.
        values: what the Trainer measures, as ``label/name``.
        estimates: metrics with their intervals.
        worst: the samples of the highest loss: place in the set, loss, target and prediction.
        corruptions: errors under corrupted images: ``kind -> severity -> 1 - accuracy``.
        corruption_error: their mean.
    """

    run: str
    label: str
    samples: Samples
    values: dict[str, float]
    estimates: dict[str, Estimate]
    metrics: dict[str, Any]
    worst: list[dict[str, Any]] = field(default_factory=list)
    corruptions: dict[str, dict[int, float]] = field(default_factory=dict)
    corruption_error: Estimate | None = None

    def tables(self) -> dict[str, tuple[list[str], list[list[Any]]]]:
        """Return heads and rows of what there is: classes, the confusion matrix, and the worst samples."""
        found: dict[str, tuple[list[str], list[list[Any]]]] = {}
        if self.samples.classes:
            confusion = self.samples.confusion()
            classes = per_class(confusion)
            found["classes"] = [*classes[0]], [[*row.values()] for row in classes]
            counts = [[label, *row] for label, row in enumerate(confusion.tolist())]
            found["confusion"] = ["target", *map(str, range(len(confusion)))], counts
        if self.worst:
            found["worst"] = [*self.worst[0]], [[*row.values()] for row in self.worst]
        return found

    def as_json(self) -> dict[str, Any]:
        """Return everything but the samples as plain data."""
        found: dict[str, Any] = {
            "run": self.run, "set": self.label, "samples": len(self.samples), "nonfinite": self.samples.nonfinite,
            "values": self.values,
            "metrics": {name: asdict(each) for name, each in self.estimates.items()}, "worst": self.worst,
        }  # fmt: skip
        if self.samples.classes:
            confusion = self.samples.confusion()
            found |= {"classes": per_class(confusion), "confusion": confusion.tolist()}
        if self.corruption_error is not None:
            errors = {kind: {str(at): error for at, error in each.items()} for kind, each in self.corruptions.items()}
            found |= {"corruptions": errors, "mean_corruption_error": asdict(self.corruption_error)}
        return found


@checked
def judge(
    trainer: Trainer,
    label: str,
    *,
    run: str = "",
    checkpoint: str | None = None,
    metrics: Sequence[str] = (),
    worst: int = 10,
    how: How | None = None,
) -> Judgement:
    """Evaluate a set once, and compute intervals from what was recorded.

    Args:
        trainer: with the run's model and weights.
        label: of the evaluation set.
        run: what the run is called.
        checkpoint: whose weights to evaluate; None for the Trainer's.
        metrics: names of `hocket_tools.judging.samples.METRICS`, or of the set's own metrics; all that apply unless given.
        worst: how many of the worst samples to name.
        how: the intervals.

    Raises ValueError for a metric that there is not.

    Example:
        >>> import hocket, torch
        >>> from hocket_tools import judge
        >>> data = {"test": [(torch.rand(20, 4), torch.arange(20) % 2)]}
        >>> trainer = hocket.Trainer(torch.nn.Linear(4, 2), loss="cross_entropy", eval_data=data, device="cpu")
        >>> list(judge(trainer, "test").estimates)
        ['loss', 'accuracy', 'f1']
    """
    check_least(0, 10, worst=worst)
    how = how or How()
    trainer._data.make("eval", running=trainer._running)
    sets = trainer.state.eval_sets
    label_of(trainer, label, "judge", "judge(trainer, '{}')")
    there = {name: adapter.metric for name, adapter in sets[label].metrics._metrics.items()}
    # The set's own metrics have to be resampled, except hocket's of the same name.
    ours = {name for name, each in there.items() if name in METRICS and isinstance(each, Mean)}
    own = {name: each for name, each in there.items() if name in metrics and name not in ours}
    if unknown := [name for name in metrics if name not in METRICS and name not in own]:
        known = dict.fromkeys([*METRICS, *there])
        near = closest(unknown[0], known) or "accuracy"
        raise WrongValue(
            f"There is no metric {unknown[0]!r}; there are {', '.join(known)}. Write «metrics=[{near!r}]¦--metrics {near}»."
        )
    with Progress(trainer.state.strategy.rank == 0) as line:
        lengths = [each for each in (sets[label].source.length(), sets[label].limit) if each is not None]
        step = partial(line.step, "batches", min(lengths, default=None))
        found, values = record(trainer, label, checkpoint=checkpoint, keep=bool(own), progress=step)
    if not len(found):
        raise WrongValue(
            f"Nothing of a single sample of '{label}' can be judged: its outputs and targets are neither classes nor numbers, "
            "and there is no loss of each sample. Write hocket evaluate FILE --weights … for the values of the whole set."
        )
    if found.nonfinite:
        say(
            f"{run or 'the model'} has NaN or infinity in the outputs of {found.nonfinite} of {len(found)} samples of "
            f"'{label}', and metrics of classes count such outputs as a class. Look for such inputs, or weights.",
            trainer.state.strategy.rank,
        )
    names = ["loss"] if len(found.losses) else []
    names += ["accuracy", "f1"] if found.classes else ["mae", "rmse"] if len(found.errors) else []
    of_metrics = {name: statistic(found, name, own.get(name)) for name in list(metrics) or names}
    estimates = {name: bootstrap(each, **asdict(how)) for name, each in of_metrics.items()}
    rows = [_described(found, at) for at in found.worst(worst)]
    return Judgement(run, label, found, values, estimates, own, rows)


@checked
def compared(first: Judgement, second: Judgement, how: How | None = None) -> dict[str, Difference]:
    """Return the paired tests of two judgements of one set, for the metrics of the first.

    Raises ValueError for other numbers of samples, or other targets; of other inputs a line is said.

    Example:
        >>> import hocket, torch
        >>> from hocket_tools import compared, judge
        >>> data = {"test": [(torch.rand(20, 4), torch.arange(20) % 2)]}
        >>> first, second = (
        ...     judge(hocket.Trainer(torch.nn.Linear(4, 2), loss="cross_entropy", eval_data=data, device="cpu"), "test")
        ...     for _ in range(2)
        ... )
        >>> 0 <= compared(first, second)["accuracy"].p_value <= 1
        True
    """
    both = joined(first.samples, second.samples)
    return {
        name: paired_test(statistic(both, name, first.metrics.get(name)), **asdict(how or How()))
        for name in first.estimates
    }


@checked
def withstand(
    trainer: Trainer,
    found: Judgement,
    kinds: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    *,
    checkpoint: str | None = None,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    how: How | None = None,
) -> None:
    """Evaluate corrupted copies of the images, and note the errors and their mean in a judgement.

    Args:
        trainer, found: the run, and its judgement of the set.
        kinds, severities: of `hocket_tools.CORRUPTIONS`, and 1 to 5.
        checkpoint: whose weights to evaluate; None for the Trainer's.
        mean, std: of each channel, with which pixels in [0, 1] were normalized: ``(pixel - mean) / std``.
        how: the interval of the mean corruption error; samples are resampled together with all their corruptions.

    Example:
        >>> import hocket, torch
        >>> from hocket_tools import judge, withstand
        >>> data = {"test": [(torch.rand(20, 3, 8, 8), torch.arange(20) % 2)]}
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
        >>> trainer = hocket.Trainer(model, loss="cross_entropy", eval_data=data, device="cpu")
        >>> found = judge(trainer, "test")
        >>> withstand(trainer, found, ["fog"], [1, 3])
        >>> list(found.corruptions["fog"])
        [1, 3]
    """
    how = how or How()
    if not found.samples.classes:
        raise WrongValue(
            "«withstand¦--corruptions» counts wrong classes, and this run predicts none. Omit it for such a run."
        )
    if not kinds or not severities:
        raise WrongValue(
            "withstand was given no kind or no severity of corruptions. Write kinds=['fog'], severities=[1]."
        )
    undone, wrong = Normalized(mean, std), np.zeros(len(found.samples))
    with Progress(trainer.state.strategy.rank == 0) as line:
        for kind in kinds:
            found.corruptions[kind] = {}
            for severity in severities:

                def changed(images: Tensor, places: list[int], kind: str = kind, severity: int = severity) -> Tensor:
                    return undone(images, lambda pixels: corrupt(pixels, kind, severity, seed=how.seed, places=places))

                seen, _ = record(trainer, found.label, checkpoint=checkpoint, losses=False, corrupt=changed)
                known = seen.targets.reshape(len(seen), -1) >= 0
                missed = (seen.predicted.reshape(known.shape) != seen.targets.reshape(known.shape)) & known
                errors = missed.sum(1) / np.maximum(known.sum(1), 1)
                found.corruptions[kind][severity] = float(missed.sum() / known.sum())
                wrong += errors / (len(kinds) * len(severities))
                line.step("corruptions", len(kinds) * len(severities))
    mean_error = Statistic(
        "mean corruption error", np.arange(len(wrong)), lambda weights: weights @ wrong / weights.sum(1)
    )
    found.corruption_error = bootstrap(mean_error, **asdict(how))


class Normalized:
    """Call a function of pixels in [0, 1] on images that were normalized by channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if not all(each > 0 for each in std) or len({1, len(mean), len(std)}) > 2:
            raise WrongValue(
                f"«std={list(std)}» has to be positive: one number for all channels, or as many as «mean={list(mean)}». Write "
                "those of the data set, such as «mean=[0.485, 0.456, 0.406]» and «std=[0.229, 0.224, 0.225]»."
            )
        self._mean, self._std = mean, std

    def __call__(self, images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        mean, std = (images.new_tensor(each).view(-1, 1, 1) for each in (self._mean, self._std))
        numbers = max(len(mean), len(std))
        if images.dim() != 4 or not images.is_floating_point() or numbers not in (1, images.shape[1]):
            raise WrongValue(
                "«withstand takes¦--corruptions take» images, floats of shape (N, C, H, W), with one number of «mean=» and "
                f"«std=» for all channels or one for each, here {numbers}; the inputs are {images.dtype} of shape "
                f"{tuple(images.shape)}. Name a set of images, or give as many numbers as they have channels."
            )
        pixels = images * std + mean
        low, high = pixels.min().item(), pixels.max().item()
        if low < -0.01 or high > 1.01:
            raise WrongValue(
                f"The images have values from {low:.4g} to {high:.4g}, and corruptions change pixels in [0, 1]. Say how they "
                "were normalized, (pixel - mean) / std by channel: «mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]¦"
                "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225»; for pixels from 0 to 255 «std=[1 / 255]¦--std 0.00392157»."
            )
        return (function(pixels.clamp(0, 1)) - mean) / std


def _described(found: Samples, at: int) -> dict[str, Any]:
    """Return place, loss, target and prediction of a sample."""
    row: dict[str, Any] = {"sample": at}
    if len(found.losses):
        row["loss"] = float(found.sample_losses()[at])
    if found.classes and found.targets.ndim == 1:
        row |= {"target": int(found.targets[at]), "predicted": int(found.predicted[at])}
    elif found.classes:
        row["wrong"] = float((found.targets[at] != found.predicted[at]).mean())
    elif len(found.errors):
        row["mae"] = float(found.errors[at, 0] / found.errors[at, 2])
    return row


def images_of(trainer: Trainer, label: str, places: Sequence[int]) -> list[Any]:
    """Return the images ``(C, H, W)`` at some places of a set in [0, 1]; empty if its inputs are no images, or not by index."""
    import torch

    from hocket.state.batch_part import BatchPart

    data, state = in_order(trainer.state.eval_sets[label].data), trainer.state
    if not loaders.by_index(data) or not places:
        return []
    indices = [*data.sampler] if data.batch_sampler is None else [*chain.from_iterable(data.batch_sampler)]
    found = []
    with state.another_step() as step:
        for at in places:
            step.batch = data.collate_fn([data.dataset[indices[at]]])
            try:
                image = BatchPart("hocket evaluate", "input").of(state)[0]
            except (KeyError, TypeError, IndexError):
                return []
            if not (isinstance(image, torch.Tensor) and image.dim() == 3 and len(image) in (1, 3)):
                return []
            image = image.float()
            low, high = image.min(), image.max()
            found.append((image - low) / (high - low).clamp(min=1e-6) if low < 0 or high > 1 else image)
    return found

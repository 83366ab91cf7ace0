"""Tasks for image models: classification and segmentation, with their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.data import items
from hocket.errors import MissingPackage, WrongValue
from hocket.help import installing
from hocket.state import conversions
from hocket.state.task import SupervisedTask

if TYPE_CHECKING:
    from hocket.basics.types import Batch


class _ImageTask(SupervisedTask):
    """Images to logits ``(B, classes, …)``, trained with labels ``(B, …)`` or class probabilities like the logits."""

    def __init__(
        self,
        model: nn.Module,
        num_classes: int | None = None,
        loss: Callable[[Any, Any], Any] | str | None = None,
        *,
        ignore_index: int = -100,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        inputs: Any = None,
        targets: Any = None,
        outputs: Any = None,
    ) -> None:
        function = nn.CrossEntropyLoss(ignore_index=ignore_index) if loss is None else conversions.loss(loss)
        super().__init__(model, function, inputs, targets, outputs)
        self.num_classes = _classes_of(model) if num_classes is None else num_classes
        plain = function is nn.functional.cross_entropy
        ignored = -100 if plain else getattr(function, "ignore_index", ignore_index)  # other functions may know it
        if ignored != ignore_index:
            raise WrongValue(
                f"{type(self).__name__} was given «ignore_index={ignore_index}», and its loss ignores {ignored}. Omit «loss=» "
                f"for a cross entropy that ignores {ignore_index}, or give the loss the same ignore_index."
            )
        self.ignore_index = ignore_index
        if (mean is None) != (std is None):
            raise WrongValue("Normalisation needs both mean= and std=, a number for each channel, or neither.")
        # Not persistent: they are arguments, and checkpoints hold the model only.
        for name, given in (("mean", mean), ("std", std)):
            self.register_buffer(name, None if given is None else torch.tensor(given)[:, None, None], persistent=False)

    def forward(self, batch: Batch) -> Any:
        """Return the logits for a batch, or the part of the model's outputs at ``outputs``."""
        found = self.network(self._images(batch))
        return found if self.outputs is None else items.part(found, self.outputs, "model's output")

    def _images(self, batch: Batch) -> Any:
        if self.inputs is None and isinstance(batch, Mapping):
            names = list(batch)
            raise KeyError(
                f"The batch is a {type(batch).__name__} with {', '.join(map(repr, names))}. Say where images and targets are: "
                f"{type(self).__name__}(…, inputs={names[0]!r}, targets={names[-1]!r})."
            )
        images = self.inputs_of(batch)
        if isinstance(images, Tensor) and images.dtype == torch.uint8:
            images = images.to(self.mean.dtype if isinstance(self.mean, Tensor) else torch.get_default_dtype()) / 255
        return images if self.mean is None else (images - self.mean) / self.std

    def update_metric(self, metric: Any, outputs: Any, batch: Batch) -> None:
        """Call ``metric.update(logits, labels)``; the labels of class probabilities are the most probable classes."""
        targets = self.targets_of(batch)
        if isinstance(targets, Tensor) and targets.is_floating_point():
            targets = targets.argmax(1)
        metric.update(outputs, targets)


class ClassificationTask(_ImageTask):
    """Classify images: cross entropy, accuracy and top-5 accuracy.

    Batches are ``(images, targets)``, or say with ``inputs=`` and ``targets=`` where these are. Images are floating-point
    ``(B, C, H, W)``, or uint8, which become floating-point numbers from 0 to 1 on the device. Targets are int64 labels
    ``(B,)``, or class probabilities ``(B, num_classes)`` such as those of MixUp. Evaluations report ``accuracy``, and ``top5``
    where there are more than 5 classes, with the extra ``hocket-algorithms-vision[metrics]``.

    Args:
        model: returns logits ``(B, num_classes)``; algorithms operate on it.
        num_classes: number of classes; by default ``model.num_classes``, or the outputs of the last linear or convolution.
        loss: a function of (logits, targets), or its name; by default cross entropy without the labels ``ignore_index``.
        ignore_index: a label that counts neither for the loss nor for the metrics.
        mean, std: subtract and divide, for each channel, after the conversion from uint8: ``(images - mean) / std``.
        inputs, targets, outputs: where images and targets are in a batch, and the logits in the model's output: an index,
            a key or a function.

    Raises:
        ValueError: ``num_classes`` is not given and cannot be found, or only one of ``mean`` and ``std`` is given.
        KeyError: later, if a batch is a mapping and ``inputs`` is not given.
        ModuleNotFoundError: in an evaluation without torchmetrics.

    Example:
        >>> import hocket, torch
        >>> from hocket_vision import ClassificationTask, digits, small_resnet
        >>> trainer = hocket.Trainer(
        ...     model=ClassificationTask(small_resnet()), train_data=digits("train"), eval_data={"test": digits("test")},
        ...     optimizer="adamw(lr=3e-3)", duration="1ep", algorithms=["blurpool"], seed=0, device="cpu",
        ... )
        >>> result = trainer.fit()
        >>> sorted(trainer.evaluate())
        ['test/accuracy', 'test/loss', 'test/top5']
    """

    def metrics(self, split: str) -> Mapping[str, Any]:
        """Return accuracy and top-5 accuracy for evaluations; nothing for ``"train"``."""
        if split == "train":
            return {}
        accuracy = _torchmetrics().MulticlassAccuracy
        settings = {"num_classes": self.num_classes, "average": "micro", "ignore_index": self.ignore_index}
        found = {"accuracy": accuracy(**settings)}
        return found | {"top5": accuracy(**settings, top_k=5)} if self.num_classes > 5 else found


class SegmentationTask(_ImageTask):
    """Classify pixels: cross entropy, mean intersection over union, and Dice.

    As `ClassificationTask`, with logits ``(B, num_classes, H, W)``, and targets that are labels ``(B, H, W)`` or class
    probabilities ``(B, num_classes, H, W)``. Models of torchvision return a dict: give ``outputs="out"``.

    Evaluations report ``miou``, ``dice`` and ``accuracy`` with the extra ``hocket-algorithms-vision[metrics]``. Intersections
    and unions are summed over all pixels of the set before they are divided (Everingham et al. 2010), then averaged over the
    classes that occur in labels or predictions.

    Args:
        model: returns logits ``(B, num_classes, H, W)``; algorithms operate on it.
        num_classes, loss, ignore_index, mean, std, inputs, targets, outputs: as in `ClassificationTask`.

    Raises:
        ValueError, KeyError, ModuleNotFoundError: as in `ClassificationTask`.

    Example:
        >>> import hocket, torch
        >>> from hocket_vision import SegmentationTask
        >>> batch = torch.rand(2, 3, 8, 8), torch.randint(4, (2, 8, 8))
        >>> trainer = hocket.Trainer(
        ...     model=SegmentationTask(torch.nn.Conv2d(3, 4, 1), ignore_index=255), train_data=[batch], eval_data=[batch],
        ...     optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        ... )
        >>> result = trainer.fit()
        >>> sorted(trainer.evaluate())
        ['eval/accuracy', 'eval/dice', 'eval/loss', 'eval/miou']
    """

    def metrics(self, split: str) -> Mapping[str, Any]:
        """Return mean intersection over union, Dice and accuracy for evaluations; nothing for ``"train"``."""
        if split == "train":
            return {}
        library = _torchmetrics()
        settings = {"num_classes": self.num_classes, "ignore_index": self.ignore_index}
        return {
            "miou": library.MulticlassJaccardIndex(**settings),
            "dice": library.MulticlassF1Score(**settings, average="macro"),  # Dice is F1
            "accuracy": library.MulticlassAccuracy(**settings, average="micro"),
        }


def _classes_of(model: nn.Module) -> int:
    declared = getattr(model, "num_classes", None)
    if isinstance(declared, int):
        return declared
    sizes = [
        module.out_features if isinstance(module, nn.Linear) else module.out_channels
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    if not sizes:
        raise WrongValue(
            f"The number of classes of {type(model).__name__} is unknown: it has no num_classes, no linear layer and no "
            "convolution. Pass num_classes=."
        )
    return sizes[-1]


def _torchmetrics() -> Any:
    try:
        from torchmetrics import classification
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "The metrics of this task come from torchmetrics, which is not installed. Type: "
            f"{installing.command('metrics', 'hocket-algorithms-vision')}.",
            name=error.name,
        ) from error
    return classification

"""A model with Composer's interface as a task of hocket's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

import hocket
from hocket.data.batches import Counts
from hocket.errors import WrongType
from hocket_migration.composer.models.base import ComposerModel
from hocket_migration.composer.utils.helpers import model_eval_mode

if TYPE_CHECKING:
    from hocket_migration.composer.core.data_spec import DataSpec
    from hocket_migration.composer.core.evaluator import Evaluator


class ComposerTask(hocket.Task):
    """Train a ComposerModel with hocket's own Trainer: ``hocket.Trainer(ComposerTask(model), data, …)``.

    The model is what algorithms operate on and checkpoints save. Its metrics are those of evaluation; its train metrics are
    over an epoch of training.

    Args:
        model: an object with ``forward(batch)``, ``loss(outputs, batch)``, ``eval_forward``, ``get_metrics(is_train)`` and
            ``update_metric(batch, outputs, metric)``.

    Raises:
        TypeError: the model lacks ``loss`` or ``forward``.

    Example:
        >>> import hocket, torch
        >>> from hocket_migration.composer import ComposerModel
        >>> from hocket_migration.composer.task import ComposerTask
        >>> class Regression(ComposerModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.line = torch.nn.Linear(4, 1)
        ...     def forward(self, batch):
        ...         return self.line(batch[0])
        ...     def loss(self, outputs, batch):
        ...         return torch.nn.functional.mse_loss(outputs, batch[1])
        >>> trainer = hocket.Trainer(ComposerTask(Regression()), optimizer="sgd(lr=0.1)", device="cpu")
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        for method in ("loss", "forward"):
            if not callable(getattr(model, method, None)):
                raise WrongType(
                    f"{type(model).__name__} has no {method}(…), which a ComposerModel has. Wrap a module: "
                    "ComposerClassifier(module, num_classes=10); or give it to hocket.Trainer(model, loss=…)."
                )
        self.model = model
        #: The metrics by the label of their set, as they are in use.
        self.made: dict[str, dict[str, Any]] = {}
        #: Evaluation sets by label, and the data of training.
        self.evaluators: dict[str, Evaluator] = {}
        self.train_spec: DataSpec | None = None

    def forward(self, batch: Any) -> Any:
        """Call the model."""
        return self.model(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Call the model's loss; several losses are added up, unless one of them is called ``total``."""
        loss: Any = self.model.loss(outputs, batch)  # type: ignore[operator]  # a method
        if isinstance(loss, Mapping) and "total" not in loss:
            return {"total": _sum(list(loss.values())), **loss}
        if isinstance(loss, Sequence):
            return {"total": _sum(loss), **{f"loss{number}": each for number, each in enumerate(loss)}}
        return loss

    def eval_forward(self, batch: Any) -> Any:
        """Call the model's ``eval_forward``, or ``forward`` for a model without one."""
        forward: Any = getattr(self.model, "eval_forward", None)
        return self.model(batch) if forward is None else forward(batch)

    def has_eval_loss(self, outputs: Any) -> bool:
        """Evaluate by metrics only."""
        return False

    def metrics(self, split: str) -> dict[str, Any]:
        """Return copies of the model's metrics, for an evaluation set those that it asks for."""
        get: Any = getattr(self.model, "get_metrics", None)
        found: dict[str, Any] = {} if get is None else dict(get(is_train=split == "train"))
        if split in self.evaluators:
            found = self.evaluators[split].chosen(found)
        self.made[split] = copy.deepcopy(found)
        return dict(self.made[split])

    def update_metric(self, metric: Any, outputs: Any, batch: Any) -> None:
        """Call the model's ``update_metric``; of a training batch with what ``eval_forward`` makes of the outputs."""
        model: Any = self.model
        forward = getattr(model, "eval_forward", None)
        trained = any(metric is each for each in self.made.get("train", {}).values())
        if (
            trained
            and forward is not None
            and getattr(type(model), "eval_forward", None) is not ComposerModel.eval_forward
        ):
            with model_eval_mode(model):
                outputs = forward(batch, outputs)
        model.update_metric(batch, outputs, metric)

    def count(self, batch: Any) -> int | Counts:
        """Count as the data of training says."""
        return super().count(batch) if self.train_spec is None else self.train_spec.count(batch)

    def split(self, batch: Any, size: int) -> Sequence[Any]:
        """Split as the data of training says."""
        return super().split(batch, size) if self.train_spec is None else self.train_spec.split(batch, size)


def _sum(losses: Sequence[Tensor]) -> Tensor:
    total = losses[0]
    for each in losses[1:]:
        total = total + each
    return total

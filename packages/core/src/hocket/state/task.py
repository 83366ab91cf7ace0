"""Tasks: models that define their batches and their loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from hocket.basics.losses import Loss, Reduction, own_loss
from hocket.data import batches, items
from hocket.data.batches import Counts
from hocket.errors import Unsupported, WrongType, WrongValue
from hocket.hookspecs.events import Event
from hocket.state.task_log import LogsValues

if TYPE_CHECKING:
    from hocket.basics.types import Batch, Where
    from hocket.hookspecs.steps import TakesSteps


class Task(LogsValues):
    """A model that defines its batches and its loss. Subclass it and define :meth:`forward` and :meth:`loss`.

    A task of several steps, such as a GAN, defines :meth:`train_batch` instead. The other methods have defaults. A method by
    the name of an event (`hocket.Event`), such as ``def epoch_start(self, state)``, is called at that event. Algorithms
    operate on the task itself, and checkpoints save it.

    Example:
        >>> import hocket, torch
        >>> class Autoencoder(hocket.Task):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder, self.decoder = torch.nn.Linear(8, 2), torch.nn.Linear(2, 8)
        ...     def forward(self, batch):
        ...         return self.decoder(self.encoder(batch))
        ...     def loss(self, outputs, batch):
        ...         return torch.nn.functional.mse_loss(outputs, batch)
        >>> trainer = hocket.Trainer(
        ...     model=Autoencoder(), train_data=[torch.randn(16, 8)], optimizer="adamw(lr=1e-3)", duration="1ep", device="cpu"
        ... )
        >>> result = trainer.fit()
    """

    #: What the loss is over, as ``Trainer(loss_reduction=…)``, which replaces it: ``"mean"`` over samples, ``"sum"``,
    #: ``"batch"`` for a loss over pairs of the batch, such as a contrastive one, which is then never divided, or
    #: ``"gathered"`` for one that gathers the outputs of all ranks itself. None for a mean, which is tried.
    loss_reduction: Reduction | None = None
    #: ``"trainable"``: checkpoints omit frozen weights, as with `hocket.Checkpoints` and its ``only="trainable"``; for tasks
    #: that train a few weights of a pretrained model, such as adapters.
    checkpoints_only: Literal["trainable"] | None = None
    #: Whether values that it logs come from a model with a log of its own, so that plug-ins may wait for any name.
    logs_for_others: bool = False

    def forward(self, batch: Batch) -> Any:
        """Return the outputs for a batch."""
        raise Unsupported(
            f"{type(self).__name__} needs a forward(batch). Define def forward(self, batch), which returns the "
            "outputs for a batch."
        )

    def loss(self, outputs: Any, batch: Batch) -> Tensor | tuple[Any, Any] | Mapping[str, Tensor] | Loss:
        """Return the loss of a batch: a scalar tensor, a dict of named scalar tensors (summed), or ``(value, weight)``."""
        raise Unsupported(
            f"{type(self).__name__} needs a loss(outputs, batch). Define def loss(self, outputs, batch), which returns a "
            "scalar tensor, such as torch.nn.functional.cross_entropy(outputs, batch[1])."
        )

    def train_batch(self, batch: Batch, step: TakesSteps) -> None:
        """Train on a batch: step the optimizers, once or several times.

        ``step(loss_function, batch, *optimizers)`` computes the gradients of a loss function of one batch and steps the
        named optimizers, or all if none is named; see `hocket.loop.steps.Steps`. A loss function is a method of the task
        that takes a batch and has the same return types as :meth:`loss`. It may be called several times, with microbatches or
        at perturbed weights, so it must read only its batch, and must not change any state.

        ``with step.manual(*optimizers) as by_hand:`` takes a step by hand instead; see
        `hocket.loop.task_steps.TaskSteps.manual`.

        Args:
            batch: the full batch, on the device.
            step: the function to call for each step.

        Example:
            >>> import hocket, torch
            >>> class GAN(hocket.Task):
            ...     def train_batch(self, real, step):
            ...         fake = self.generator(torch.randn(len(real), 100, device=real.device))
            ...         step(self.discriminator_loss, {"real": real, "fake": fake.detach()}, "discriminator")
            ...         step(self.generator_loss, {"fake": fake}, "generator")
        """
        step(self.loss_of, batch)

    def loss_of(self, batch: Batch) -> Any:
        """Return the loss of the outputs for a batch. This is the loss function of a task of one step."""
        return self.loss(self(batch), batch)

    @property
    def owns_steps(self) -> bool:
        """Whether the task defines :meth:`train_batch`."""
        return type(self).train_batch is not Task.train_batch

    @property
    def shares_parameters(self) -> bool:
        """Whether several optimizers may hold one parameter, because they are not all stepped in each batch."""
        return self.owns_steps

    def eval_forward(self, batch: Batch) -> Any:
        """Return the outputs for a batch in evaluation and prediction; by default the same as in training."""
        return self(batch)

    def has_eval_loss(self, outputs: Any) -> bool:
        """Whether :meth:`loss` accepts the outputs of :meth:`eval_forward`; if not, evaluation reports metrics only."""
        return type(self).eval_forward is Task.eval_forward and type(self).loss is not Task.loss

    def check_evaluation(self) -> None:
        """Raise TypeError if there is nothing that evaluation could call."""
        if self.owns_steps and type(self).forward is Task.forward and type(self).eval_forward is Task.eval_forward:
            raise WrongType(
                f"{type(self).__name__} has train_batch and no forward(batch), so there is nothing to evaluate. Define "
                "eval_forward(batch), with «metrics=», or forward(batch) and loss(outputs, batch); or omit eval_data."
            )

    def metrics(self, split: str) -> Mapping[str, Any]:
        """Return new metrics by name for ``"train"`` or the label of an evaluation set: objects with update, compute, reset.

        Example:
            >>> import hocket
            >>> class MeanAbsoluteError:
            ...     def reset(self): self.total, self.samples = 0.0, 0
            ...     def update(self, outputs, targets):
            ...         self.total += (outputs - targets).abs().sum().item()
            ...         self.samples += len(targets)
            ...     def compute(self): return self.total / self.samples
            >>> class Regression(hocket.Task):
            ...     def metrics(self, split):
            ...         return {"mae": MeanAbsoluteError()}
        """
        return {}

    def update_metric(self, metric: Any, outputs: Any, batch: Batch) -> None:
        """Update a metric with a batch; by default ``metric.update(outputs, batch[1])``."""
        metric.update(outputs, items.get_item(batch, 1))

    def count(self, batch: Batch) -> int | Counts:
        """Return the number of samples, or (samples, tokens), in a batch; see :func:`hocket.data.batches.count`."""
        return batches.count(batch)

    def split(self, batch: Batch, size: int) -> Sequence[Any]:
        """Split a batch into microbatches of at most ``size`` samples, as :meth:`count` counts them.

        Together they hold every sample once, in order. The default uses :func:`hocket.data.batches.split`; batches of graphs
        or packed sequences, for instance, need a custom method.

        Example:
            >>> import hocket
            >>> class Detection(hocket.Task):
            ...     def split(self, batch, size):
            ...         images, boxes = batch
            ...         starts = range(0, len(images), size)
            ...         return [(images[i : i + size], boxes[i : i + size]) for i in starts]
        """
        if type(self).count is Task.count:
            return batches.split(batch, size)
        counted = self.count(batch)
        return batches.split(batch, size, int(counted[0] if isinstance(counted, tuple) else counted))

    def join(self, parts: Sequence[Any]) -> Any:
        """Join microbatches into one batch, the inverse of :meth:`split`.

        Used for ``kept`` values of a `hocket.Loss`, and for parts of a batch (`hocket.State.request_steps`).
        """
        return batches.join(parts)

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a sequence of optimizers or a dict of them by name, for a Trainer without ``optimizer=``.

        Example:
            >>> import hocket, torch
            >>> class Classifier(hocket.Task):
            ...     def configure_optimizers(self):
            ...         return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        """
        return None

    def extra_state(self) -> Any:
        """Return state to save in checkpoints besides parameters and buffers, such as a hidden state carried between batches.

        It may consist of tensors, numbers, strings, None, and lists and dicts of them, and is saved for each rank.
        """
        return None

    def load_extra_state(self, state: Any) -> None:
        """Restore the state that :meth:`extra_state` returned. Tensors are on the CPU; additional ranks get rank 0's state.

        Not called for checkpoints without extra state.
        """
        raise Unsupported(f"{type(self).__name__} needs a load_extra_state(state)")

    @property
    def model(self) -> nn.Module:
        """The module that algorithms operate on and checkpoints save: the task, or the module assigned to ``self.model``."""
        model = self._modules.get("model")
        return self if model is None else model

    @model.setter
    def model(self, module: nn.Module) -> None:
        if module is not self:
            self._modules["model"] = module

    def __setattr__(self, name: str, value: Any) -> None:
        if "_modules" not in self.__dict__:
            raise AttributeError(
                f"self.{name} of {type(self).__name__} is assigned before torch.nn.Module has set it up. Write "
                "super().__init__() as the first line of its __init__."
            )
        if name == "log":
            raise AttributeError(
                f"self.log of {type(self).__name__} cannot be assigned: it is the method of hocket.Task that logs values. Give "
                "the attribute another name, such as self.log_layer."
            )
        if name == "model":  # torch would add a submodule of that name despite the property
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


class SupervisedTask(Task):
    """A task made of a module and a loss function. Batches are ``(inputs, targets)``, or mappings of keyword arguments."""

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Any, Any], Any] | None,
        inputs: Where = None,
        targets: Where = None,
        outputs: Where = None,
    ) -> None:
        super().__init__()
        self.inputs, self.targets, self.outputs = inputs, targets, outputs
        self.network = network
        self.loss_function = loss

    def forward(self, batch: Batch) -> Any:
        """Return ``network(inputs)``, or ``network(**batch)`` for a mapping; with a loss function, the part at ``outputs``."""
        if self.outputs is None or self.loss_function is None:  # a model's own loss is beside that part
            return self._call(batch)
        return items.part(self._call(batch), self.outputs, "model's output")

    def _call(self, batch: Batch) -> Any:
        network = self.network
        if self.inputs is not None:
            return network(items.part(batch, self.inputs))
        if isinstance(batch, tuple | list):
            return network(batch[0])
        return network(**batch) if isinstance(batch, Mapping) else network(batch)

    def inputs_of(self, batch: Batch) -> Any:
        """Return the inputs of the model in a batch; a mapping whose entries it gets by name is returned as it is."""
        if self.inputs is not None:
            return items.part(batch, self.inputs)
        return batch[0] if isinstance(batch, tuple | list) else batch

    def loss(self, outputs: Any, batch: Batch) -> Any:
        """Return ``loss(outputs, targets)``; for a mapping ``loss(outputs, batch)``; without a function, the model's loss."""
        if self.loss_function is not None:
            return self.loss_function(outputs, self.targets_of(batch))
        own = own_loss(outputs)
        if own is None:
            scalar = isinstance(outputs, Tensor) and not outputs.dim()
            raise WrongType(
                f"{type(self.network).__name__} returned {type(outputs).__name__} without a loss, and the Trainer was given "
                "none. Pass «loss=», for instance «loss=torch.nn.functional.cross_entropy», or a hocket.Task as the model."
                + (" If this scalar is the loss, write return {'loss': loss} in forward." if scalar else "")
            )
        return own

    def targets_of(self, batch: Batch) -> Any:
        """Return the targets of a batch for the loss function."""
        if self.targets is not None:
            return items.part(batch, self.targets)
        return batch[1] if isinstance(batch, tuple | list) else batch

    def update_metric(self, metric: Any, outputs: Any, batch: Batch) -> None:
        """Call ``metric.update(outputs, targets)``.

        From the outputs of a model with its own loss, metrics get the part at ``outputs``, else the logits if there are any.
        """
        where = self.targets
        if where is None and isinstance(batch, Mapping):
            if "labels" not in batch or own_loss(outputs) is None:
                raise WrongValue(
                    f"The targets for metrics are unknown: the batch is a {type(batch).__name__} with "
                    f"{', '.join(map(repr, batch))}. Pass «targets=» to the Trainer, such as «targets='label'»."
                )
            where = "labels"
        if self.outputs is None:
            logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
        else:
            logits = None if self.loss_function else items.part(outputs, self.outputs, "model's output")
        metric.update(outputs if logits is None else logits, items.part(batch, 1 if where is None else where))

    def has_eval_loss(self, outputs: Any) -> bool:
        """Whether there is a loss function, or the model's outputs hold a loss."""
        return self.loss_function is not None or own_loss(outputs) is not None

    @property
    def model(self) -> nn.Module:
        """The network that was given."""
        return self.network

    @model.setter
    def model(self, module: nn.Module) -> None:
        self.network = module


class TaskEvents:
    """The methods of a task that listen to events, by the name of the event; attached like a plug-in."""

    def __init__(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        vars(self).update(methods)


def events_of(task: Task) -> TaskEvents | None:
    """Return the methods of a task that listen to events, or None. Raises TypeError for one with other arguments."""
    attributes = {event.value: getattr(task, event.value, None) for event in Event}
    methods = {
        name: method for name, method in attributes.items() if callable(method) and not isinstance(method, nn.Module)
    }
    for name, method in methods.items():
        if list(inspect.signature(method).parameters) != ["state"]:
            raise WrongType(
                f"{type(task).__name__} defines {name}{inspect.signature(method)}, and {name} is an event, at which the "
                f"Trainer calls this method with the state. Define def {name}(self, state), or give the method another name, "
                f"such as _{name}."
            )
    return TaskEvents(methods) if methods else None

"""What is known of an exception in a model or its loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.nn import functional as F

from hocket.state.task import SupervisedTask, Task

if TYPE_CHECKING:
    from hocket.basics.types import Batch


class Failure:
    """An exception in the forward pass, the loss or the backward pass of a batch."""

    def __init__(self, error: BaseException, where: str, task: Task, batch: Batch, outputs: object = None) -> None:
        self.text = str(error)
        self.error, self.where, self.task, self.batch, self.outputs = error, where, task, batch, outputs
        self.network = task.model
        #: The function of torch.nn.functional that raised it, or empty.
        self.function = _function(error)

    def parts(self) -> dict[str, Any]:
        """Return inputs, outputs and targets as far as they are known."""
        found: dict[str, Any] = {}
        supervised = self.task if isinstance(self.task, SupervisedTask) else None
        if supervised is None or (isinstance(self.batch, Mapping) and supervised.inputs is None):
            found["batch"] = self.batch
        else:
            with suppress(Exception):
                found["inputs"] = self.inputs
        if self.where != "forward":
            if self.where != "backward":  # before which they are freed
                found["outputs"] = self.outputs
            if supervised is not None and "batch" not in found:
                with suppress(Exception):
                    found["targets"] = supervised.targets_of(self.batch)
        return found or {"batch": self.batch}

    @property
    def inputs(self) -> Any:
        """The inputs of the model in the batch."""
        if isinstance(self.task, SupervisedTask):
            return self.task.inputs_of(self.batch)
        return self.batch[0] if isinstance(self.batch, tuple | list) else self.batch

    @property
    def targets(self) -> Any:
        """The targets in the batch, or None."""
        with suppress(Exception):
            return self.task.targets_of(self.batch) if isinstance(self.task, SupervisedTask) else self.batch[1]
        return None


def _function(error: BaseException) -> str:
    """Return the name of the function of torch.nn.functional in which an exception was raised, or empty."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == F.__name__:
            found = trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    return found

"""Record predictions of a run: the calls of its model, its outputs, and a copy of the model with the evaluated weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hocket.basics.plugin_errors import PlanError
from hocket.data import items
from hocket.data.nesting import map_tensors
from hocket.hookspecs.attachment import Attachment
from hocket.hookspecs.callback import Callback
from hocket.state.state import State
from hocket.state.task import SupervisedTask
from hocket_tools.exporting.named_tensors import check_nesting, named_tensors
from hocket_tools.exporting.portable import Call, PortableModel

#: Predict batches, and return the outputs for them, as ``trainer.predict``.
Predict = Callable[[Sequence[Any]], list[Any]]


class Observer(Callback):
    """Record the model's calls during predictions, on the CPU, and copy it while its weights are those of evaluation."""

    def __init__(self) -> None:
        #: What each prediction called: the network itself, or the task with the batch.
        self.calls: list[Call] = []
        self.network: nn.Module | None = None
        self.method, self.part = "forward", cast(Any, None)
        self._latest: tuple[tuple[Any, ...], dict[str, Any], Any] | None = None
        self._handle: Any = None

    def predict_before_forward(self, state: State) -> None:
        """Watch the network of the task."""
        self._latest = None
        if state.model is not state.task:
            self._handle = state.model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._latest = (args, kwargs, output)

    def predict_after_forward(self, state: State) -> None:
        """Record the call, and copy the model after the first."""
        self.exception(state)
        task = state.task
        if self.network is None:
            part = task.outputs if isinstance(task, SupervisedTask) and task.loss_function is not None else None
            self.method, self.part = ("forward", part) if self._is_all(state, part) else ("eval_forward", None)
            original = state.model if self.method == "forward" else task
            self.network = _copied(original, state)
        if self.method == "forward" and self._latest is not None:
            args, kwargs, _ = self._latest
            call = Call(args, kwargs).without_labels(self.network)
        else:
            call = Call((state.batch,), {})
        check_nesting((call.args, call.kwargs), "inputs")
        args, kwargs = map_tensors(lambda tensor: tensor.detach().cpu(), (call.args, dict(call.kwargs)))
        self.calls.append(Call(args, kwargs))

    def exception(self, state: State) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _is_all(self, state: State, part: Any) -> bool:
        """Whether the network gets tensors of the batch as they are, and its output is that of the prediction."""
        if self._latest is None:
            return False
        args, kwargs, output = self._latest
        if part is not None:
            output = items.part(output, part, "model's output")
        call = Call(args, kwargs).without_labels(state.model)
        of_batch = {id(tensor) for tensor in named_tensors(state.batch, "batch").values()}
        arguments = named_tensors((call.args, call.kwargs), "input").values()
        return _same(output, state.outputs) and all(id(tensor) in of_batch for tensor in arguments)

    def model(self) -> PortableModel:
        """Return the model as a function of named tensors."""
        assert self.network is not None
        return PortableModel(self.network, self.method, self.calls[0], self.part)

    def inputs(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a call by name."""
        assert self.network is not None
        return self.calls[number].tensors(self.network, self.method)


@contextmanager
def observed(state: State, predict: Predict) -> Iterator[tuple[Observer, Predict]]:
    """Yield an attached observer, and a function that predicts with it, in full float32 precision on GPUs.

    Raises PlanError if ranks hold shards of the model.
    """
    if any(isinstance(tensor, DTensor) for tensor in state.task.parameters()):
        raise PlanError(
            f"The strategy {type(state.strategy).__name__} holds shards of the model, which cannot be exported. Type hocket "
            "export RUN in one process, which reads a checkpoint of this run."
        )
    attachment = Attachment("callbacks", "export-observer", Observer())
    state.bus.attach(attachment)

    def predicted(batches: Sequence[Any]) -> list[Any]:
        backend = torch.backends.cudnn
        before, backend.allow_tf32 = backend.allow_tf32, False
        try:
            return predict(batches)
        finally:
            backend.allow_tf32 = before

    try:
        yield attachment.obj, predicted
    finally:
        state.bus.detach(attachment)


def _same(output: Any, predicted: Any) -> bool:
    if output is predicted:
        return True
    one, other = (list(named_tensors(value, "output").values()) for value in (output, predicted))
    return bool(one) and list(map(id, one)) == list(map(id, other))


def _copied(module: nn.Module, state: State) -> nn.Module:
    """Return a copy in evaluation mode on the CPU. Tasks refer to the values that a run logs, which are not copied."""
    try:
        duplicate = copy.deepcopy(module, {id(state.aggregates): None})
    except Exception as error:
        raise PlanError(
            f"{type(module).__name__} cannot be exported, because it cannot be copied: {error}. Every attribute of a module "
            "that is exported has to allow copy.deepcopy."
        ) from error
    return duplicate.cpu().eval().requires_grad_(False)

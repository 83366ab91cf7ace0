"""A model as a function of named tensors that returns a tensor or named tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.data import items
from hocket_tools.exporting.named_tensors import filled, named_tensors

#: Arguments from which models of transformers compute a loss, and which nobody has when the exported model is used.
LABELS = ("labels", "start_positions", "end_positions", "next_sentence_label")


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def without_labels(self, network: nn.Module) -> Call:
        """Return the call without the arguments of a loss, where the network has defaults for them."""
        parameters = inspect.signature(network.forward).parameters
        needed = {name for name, each in parameters.items() if each.default is each.empty}
        kwargs = {name: value for name, value in self.kwargs.items() if name not in LABELS or name in needed}
        return Call(self.args, kwargs)

    def tensors(self, network: nn.Module, method: str) -> dict[str, Tensor]:
        """Return the tensors by the names of the arguments; those in a single mapping by their own."""
        parameters = inspect.signature(getattr(network, method)).parameters.values()
        positional = [
            each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        names = [*positional, *(f"input_{number}" for number in range(len(positional), len(self.args)))]
        arguments = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        if len(arguments) == 1:
            (name,) = arguments
            return named_tensors(arguments[name], name)
        return named_tensors(arguments, "input")


class PortableModel(nn.Module):
    """Call a network with tensors by name, and return its output: a tensor, or a dict of tensors by name.

    Args:
        network: the module, or a task.
        method: ``"forward"``, or ``"eval_forward"`` for a task.
        call: a call whose tensors are replaced, and whose other arguments are constant.
        part: the part of the output to return, as the Trainer's ``outputs``; None for all of it.
    """

    def __init__(self, network: nn.Module, method: str, call: Call, part: Any = None) -> None:
        super().__init__()
        self.network = network
        self._method, self._part = method, part
        self._template = (call.args, dict(call.kwargs))
        #: The names of the inputs in order, and values of those that do not matter.
        self._names = list(call.tensors(network, method))
        self._unused: dict[str, Tensor] = {}

    def forward(self, **tensors: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the output for tensors by name."""
        given = {**self._unused, **tensors}
        args, kwargs = filled(self._template, [given[name] for name in self._names])
        function = self.network if self._method == "forward" else getattr(self.network, self._method)
        output = function(*args, **kwargs)
        if self._part is not None:
            output = items.part(output, self._part, "model's output")
        return output if isinstance(output, Tensor) else named_tensors(output, "output")

    def without(self, unused: Mapping[str, Tensor]) -> PortableModel:
        """Return the model without inputs that have no effect, for which these tensors are passed."""
        model = PortableModel(self.network, self._method, Call(*self._template), self._part)
        model._unused = dict(unused)
        return model

    @torch.no_grad()
    def outputs(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name for tensors by name, as `named_tensors` names those of a prediction."""
        return named_tensors(self(**tensors), "output")

"""Evaluation and prediction with int8 weights in linear layers, by torchao."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hocket import Need, Precision
from hocket.errors import WrongValue
from hocket_strategies.precisions.torchao_import import torchao

if TYPE_CHECKING:
    from hocket.state.state import State


class INT8(Precision):
    """Evaluate and predict with int8 weights in linear layers, to measure the quantised model; train in 32 bits.

    When an evaluation or prediction starts, the weights of each `nn.Linear` are rounded to int8 with one scale per output
    (torchao's ``Int8WeightOnlyConfig``). This happens after algorithms such as EMA have swapped in their weights. The 32-bit
    weights are restored when it ends or fails, so training is not affected; meanwhile both are in memory. Activations, other
    layers, `Trainer.model_state_dict` and checkpoints stay in 32 bits.

    Raises:
        ImportError: torchao is not installed.
        ValueError: the model has no `nn.Linear`, or the strategy shards weights.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), precision="int8", device="cpu")
        >>> values = trainer.evaluate([(torch.randn(8, 4), torch.randn(8, 1))])
    """

    def __init__(self) -> None:
        #: Layers that currently compute with int8 weights, and their 32-bit weights.
        self._lent: list[tuple[nn.Linear, torch.Tensor]] = []

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Check that torchao is installed and that the model has linear layers; change nothing."""
        torchao("quantization")
        if not _linears(module):
            raise WrongValue(
                "«precision='int8'» rounds weights of torch.nn.Linear layers, and the model has none. Pass «precision='fp32'»."
            )
        return module

    def before_load(self, state: State) -> None:
        """Refuse sharded weights, which cannot be rounded here."""
        if Need.FULL_PARAMETERS not in state.strategy.offers:
            raise WrongValue(
                f"«precision='int8'» needs full weights, and the strategy {type(state.strategy).__name__} shards them. "
                "Pass «strategy='single'» or 'ddp', or «precision='fp32'»."
            )

    # --- around evaluation and prediction

    def eval_before_forward(self, state: State) -> None:
        """Use int8 weights from the first batch on."""
        self._load_int8(state)

    def predict_before_forward(self, state: State) -> None:
        """Use int8 weights from the first batch on."""
        self._load_int8(state)

    def eval_end(self, state: State) -> None:
        """Restore the 32-bit weights."""
        self._restore()

    def predict_end(self, state: State) -> None:
        """Restore the 32-bit weights."""
        self._restore()

    def exception(self, state: State) -> None:
        """Restore the 32-bit weights."""
        self._restore()

    def close(self, state: State) -> None:
        """Restore the 32-bit weights."""
        self._restore()

    def _load_int8(self, state: State) -> None:
        if self._lent:
            return
        for linear in _linears(state.task):
            self._lent.append((linear, linear.weight))
            linear._parameters["weight"] = _quantised(linear)

    def _restore(self) -> None:
        for linear, weight in self._lent:
            linear._parameters["weight"] = weight  # type: ignore[assignment]  # the original parameter
        self._lent = []


def _linears(module: nn.Module) -> list[nn.Linear]:
    """Return plain linear layers; subclasses may use their weights in other ways."""
    return [part for part in module.modules() if type(part) is nn.Linear and part.weight.is_floating_point()]


def _quantised(linear: nn.Linear) -> nn.Parameter:
    """Return the layer's weights as a tensor subclass that stores int8; the layer is unchanged."""
    quantization = torchao("quantization")
    with torch.device("meta"):
        other = nn.Linear(linear.in_features, linear.out_features, bias=False)
    other.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    quantization.quantize_(other, quantization.Int8WeightOnlyConfig())
    return other.weight

"""Evaluation and prediction with weights of linear layers in 8 bits, by torchao."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hocket import Need, Precision
from hocket_strategies.precisions.extra import torchao

if TYPE_CHECKING:
    from hocket.state import State


class INT8(Precision):
    """Evaluates and predicts with int8 weights in linear layers, trains in 32 bits: what a quantised model would do, measured.

    The weights of each `nn.Linear` are rounded to int8 with one scale for each output (torchao's ``Int8WeightOnlyConfig``)
    when an evaluation or prediction begins to run, after algorithms such as EMA have lent theirs, and the 32-bit weights
    are back when it ends or fails. Training neither sees nor changes by it; both are in memory meanwhile. Activations,
    other layers, `Trainer.model_state_dict` and checkpoints stay in 32 bits.

    Raises:
        ImportError: torchao is not installed.
        ValueError: the model has no `nn.Linear`, or the strategy gives ranks only parts of weights.

    Example:
        >>> import hocket, torch
        >>> trainer = hocket.Trainer(model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), precision="int8", device="cpu")
        >>> values = trainer.evaluate([(torch.randn(8, 4), torch.randn(8, 1))])
    """

    def __init__(self) -> None:
        #: Layers that compute with int8 weights now, and the weights that they get back.
        self._lent: list[tuple[nn.Linear, torch.Tensor]] = []

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Checks that there is something to quantise, and to quantise with; changes nothing."""
        torchao("quantization")
        if not _linears(module):
            raise ValueError(
                "precision='int8' rounds weights of torch.nn.Linear layers, and the model has none. Pass precision='fp32'."
            )
        return module

    def before_load(self, state: State) -> None:
        """Refuse weights in parts, which cannot be rounded here."""
        if Need.FULL_PARAMETERS not in state.strategy.offers:
            raise ValueError(
                f"precision='int8' needs whole weights, and the strategy {type(state.strategy).__name__} holds parts of them. "
                "Pass strategy='single' or 'ddp', or precision='fp32'."
            )

    # --- around evaluation and prediction

    def eval_before_forward(self, state: State) -> None:
        """Int8 weights from the first batch on."""
        self._lend(state)

    def predict_before_forward(self, state: State) -> None:
        """Int8 weights from the first batch on."""
        self._lend(state)

    def eval_end(self, state: State) -> None:
        """The 32-bit weights again."""
        self._take_back()

    def predict_end(self, state: State) -> None:
        """The 32-bit weights again."""
        self._take_back()

    def exception(self, state: State) -> None:
        """The 32-bit weights again."""
        self._take_back()

    def close(self, state: State) -> None:
        """The 32-bit weights again."""
        self._take_back()

    def _lend(self, state: State) -> None:
        if self._lent:
            return
        for linear in _linears(state.task):
            self._lent.append((linear, linear.weight))
            linear._parameters["weight"] = _quantised(linear)

    def _take_back(self) -> None:
        for linear, weight in self._lent:
            linear._parameters["weight"] = weight  # type: ignore[assignment]  # it is the parameter that was there
        self._lent = []


def _linears(module: nn.Module) -> list[nn.Linear]:
    """Plain linear layers; what a subclass does with its weights is not known."""
    return [part for part in module.modules() if type(part) is nn.Linear and part.weight.is_floating_point()]


def _quantised(linear: nn.Linear) -> nn.Parameter:
    """Its weights as a tensor that stores int8 and multiplies like the rest; the layer stays as it is."""
    quantization = torchao("quantization")
    with torch.device("meta"):
        other = nn.Linear(linear.in_features, linear.out_features, bias=False)
    other.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    quantization.quantize_(other, quantization.Int8WeightOnlyConfig())
    return other.weight

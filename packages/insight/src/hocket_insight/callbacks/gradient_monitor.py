"""Logging of the norms of each layer's gradients, weights and updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from hocket.errors import WrongValue
from hocket.state.state import State
from hocket_insight.callbacks.histograms import Histograms, histogram
from hocket_insight.callbacks.layer_patterns import chosen, patterns_of
from hocket_insight.callbacks.measured_step import MeasuredStep


class GradientMonitor(MeasuredStep):
    """Log 2-norms of each layer: of its gradient, of its weights, and of its update as a ratio to the weights.

    The names are ``gradient/norm/<layer>``, ``gradient/weight_norm/<layer>`` and ``gradient/update_ratio/<layer>``. Gradients
    are those of the step, before clipping; weights are those after it. A ratio near 0.001 is usual; one near 1 overwrites the
    layer, one below 1e-6 hardly trains it. Values stay on the device, and shards count as the full tensors. A measured
    batch keeps a copy of the chosen weights during its step. `OptimizerMonitor` logs the norms over all layers.

    Args:
        every: number of batches between measurements; best a multiple of the Trainer's ``log_every``, because only the last
            value of a logging interval is logged.
        layers: patterns of the layers' names, such as ``"encoder.*"``.
        by: ``"module"``: a layer is a module with parameters of its own, such as a Linear with weight and bias;
            ``"parameter"``: each parameter.
        histograms: also log ``gradient/histogram/<layer>``, with powers of two as the edges of the bins; it reads the
            gradients about ten times.

    Raises:
        ValueError: an argument is out of its range; when a fit starts: a pattern matches no trained layer.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.gradient_monitor import GradientMonitor
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> trainer = hocket.Trainer(
        ...     model=model, loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", log_every="1ba", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))], callbacks=[GradientMonitor(every=1)],
        ... )
        >>> result = trainer.fit("1ep")
        >>> [name for name in result.history if name.startswith("gradient/norm")]
        ['gradient/norm/0', 'gradient/norm/2']
    """

    def __init__(
        self,
        every: int = 500,
        layers: str | Sequence[str] = "*",
        by: Literal["module", "parameter"] = "module",
        histograms: bool = False,
    ) -> None:
        super().__init__(every)
        if by not in ("module", "parameter"):
            raise WrongValue(f"«by={by!r}» is neither 'module' nor 'parameter'.")
        self._patterns, self._by = patterns_of(layers), by
        self._histograms = Histograms() if histograms else None
        if self._histograms is not None:  # otherwise no row calls it
            self.log_metrics = self._histograms.flush
        #: The trained parameters of each chosen layer, by the layer's name.
        self._layers: dict[str, list[nn.Parameter]] = {}

    def fit_start(self, state: State) -> None:
        """Collect the layers, since algorithms may have changed the model."""
        super().fit_start(state)
        trained = {
            id(parameter)
            for optimizer in state.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        layers: dict[str, list[nn.Parameter]] = {}
        for name, parameter in state.model.named_parameters():
            if id(parameter) in trained:
                layer = name if self._by == "parameter" else name.rpartition(".")[0] or "model"
                layers.setdefault(layer, []).append(parameter)
        self._layers = {name: layers[name] for name in chosen(layers, self._patterns, "gradient-monitor")}

    def _parameters(self, state: State) -> list[nn.Parameter]:
        return [parameter for layer in self._layers.values() for parameter in layer]

    def _gradients(self, state: State, parameters: Sequence[nn.Parameter], gradients: Tensor) -> None:
        held = self._by_layer(parameters)
        _log(state, "norm", held, _joined(gradients, held))
        if self._histograms is not None:
            for name, layer in held.items():
                counts = torch.stack([histogram(p.grad) for p in layer if p.grad is not None]).sum(0)
                self._histograms.replace(f"gradient/histogram/{name}", counts)

    def _step(self, state: State, weights: Tensor, updates: Tensor) -> None:
        weights, updates = _joined(weights, self._layers), _joined(updates, self._layers)
        _log(state, "weight_norm", self._layers, weights)
        _log(state, "update_ratio", self._layers, updates / weights.clamp(min=torch.finfo(weights.dtype).tiny))

    def _by_layer(self, parameters: Sequence[nn.Parameter]) -> dict[str, list[nn.Parameter]]:
        """Return those of the parameters that each layer has; they are in the order of the layers."""
        some = set(map(id, parameters))
        held = {name: [p for p in layer if id(p) in some] for name, layer in self._layers.items()}
        return {name: layer for name, layer in held.items() if layer}


def _joined(norms: Tensor, layers: Mapping[str, Sequence[nn.Parameter]]) -> Tensor:
    """Return the norm of each layer of the norms of its parameters."""
    return torch.stack(torch._foreach_norm(norms.split([len(layer) for layer in layers.values()])))


def _log(state: State, kind: str, layers: Iterable[str], values: Tensor) -> None:
    state.log({f"gradient/{kind}/{name}": value for name, value in zip(layers, values.unbind(), strict=True)})

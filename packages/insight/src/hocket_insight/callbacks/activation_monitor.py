"""Logging of the statistics of layers' outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hocket.basics.dtensors import local
from hocket.basics.plugin_errors import PlanError
from hocket.errors import WrongValue
from hocket.state.metric_adapters import is_metric
from hocket.state.state import State
from hocket_insight.callbacks.histograms import Histograms, histogram
from hocket_insight.callbacks.layer_patterns import chosen, patterns_of
from hocket_insight.callbacks.periodic_measurement import Measuring


class ActivationMonitor(Measuring):
    """Log statistics of layers' outputs, which show activations that vanish or explode, and ReLUs that are always zero.

    The names are ``activation/mean/<layer>``, ``activation/std/<layer>``, ``activation/max/<layer>`` (the largest magnitude)
    and ``activation/zeros/<layer>`` (the fraction of elements that are exactly 0). They cover all elements of the first
    floating-point tensor that a layer returns, in all microbatches and calls of a measured batch, on this rank. Where a
    step computes gradients twice, as with SAM, the first time counts. Values stay on the device.

    Modules have hooks only during the forward passes of measured batches: evaluation, and activation checkpointing's second
    forward pass, are not measured. Inside a compiled module there are no outputs of layers, so choosing a layer there is
    an error.

    Args:
        every: number of batches between measurements; best a multiple of the Trainer's ``log_every``, because only the last
            value of a logging interval is logged.
        layers: patterns of the layers' names, such as ``"encoder.*"``.
        types: names of classes, such as ``["Linear", "ReLU"]``, of which or of whose subclasses a layer has to be; None for
            all modules without submodules that are no metrics.
        histograms: also log ``activation/histogram/<layer>``, with powers of two as the edges of the bins; it reads the
            outputs about ten times.

    Raises:
        ValueError: an argument is out of its range; when a fit starts: no layer is chosen.
        PlanError: when a fit starts: a chosen layer is inside a compiled module.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.activation_monitor import ActivationMonitor
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> trainer = hocket.Trainer(
        ...     model=model, loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", log_every="1ba", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))], callbacks=[ActivationMonitor(every=1, types=["ReLU"])],
        ... )
        >>> result = trainer.fit("1ep")
        >>> [name for name in result.history if name.startswith("activation/")]
        ['activation/mean/1', 'activation/std/1', 'activation/max/1', 'activation/zeros/1']
    """

    def __init__(
        self,
        every: int = 500,
        layers: str | Sequence[str] = "*",
        types: str | Sequence[str] | None = None,
        histograms: bool = False,
    ) -> None:
        super().__init__(
            every, ("before_train_batch", "before_forward", "before_backward", "after_train_batch", "batch_end")
        )
        self._patterns = patterns_of(layers)
        self._types = None if types is None else {types} if isinstance(types, str) else set(types)
        self._histograms = Histograms() if histograms else None
        if self._histograms is not None:  # otherwise no row calls it
            self.log_metrics = self._histograms.flush
        self._layers: dict[str, nn.Module] = {}
        self._handles: list[Any] = []
        #: What was measured in this batch, and in the gradients that are being computed, which may be begun again.
        self._batch: dict[str, _Moments] = {}
        self._current: dict[str, _Moments] = {}
        #: Whether the current gradients are measured, and whether those of this batch were.
        self._measuring = self._measured = False

    def fit_start(self, state: State) -> None:
        """Choose the layers. Raises ValueError, PlanError."""
        candidates = {name or "model": module for name, module in state.model.named_modules() if self._fits(module)}
        if not candidates:
            kinds = sorted({type(module).__name__ for module in state.model.modules()})
            raise WrongValue(
                f"activation-monitor was given «types={sorted(self._types or ())}», and the model has no such module. It has: "
                f"{', '.join(kinds)}."
            )
        self._layers = {name: candidates[name] for name in chosen(candidates, self._patterns, "activation-monitor")}
        inside = {id(each) for module in state.task.modules() if _is_compiled(module) for each in module.modules()}
        if compiled := next((name for name, module in self._layers.items() if id(module) in inside), None):
            raise PlanError(
                f"activation-monitor cannot read the output of '{compiled}', because it is inside a compiled module, where "
                "hooks do not run. Train without «compile=», compile only modules whose layers are not monitored, or remove "
                "the monitor; gradient-monitor works with compiled models."
            )

    def _fits(self, module: nn.Module) -> bool:
        if self._types is None:
            return next(module.children(), None) is None and not is_metric(module)
        return not self._types.isdisjoint(each.__name__ for each in type(module).__mro__)

    # --- measuring

    def before_train_batch(self, state: State) -> None:
        """Begin to measure, unless the gradients of this batch were measured; only steps of a train_batch add up."""
        self._current = {}
        self._measuring = not self._measured or state.step.optimizers is not None

    def before_forward(self, state: State) -> None:
        """Register the hooks."""
        if self._measuring:
            self._handles = [
                module.register_forward_hook(partial(self._observe, state, name))
                for name, module in self._layers.items()
            ]

    def before_backward(self, state: State) -> None:
        """Remove the hooks, before activation checkpointing computes outputs again."""
        if self._handles:
            self._remove()

    def after_train_batch(self, state: State) -> None:
        """Add the measurements of these gradients to those of the batch."""
        if self._measuring:
            self._measuring, self._measured = False, True
            for name, moments in self._current.items():
                self._batch[name] = self._batch[name].joined(moments) if name in self._batch else moments
            self._current = {}

    def batch_end(self, state: State) -> None:
        """Log the statistics of a measured batch."""
        if not self._measured:
            return
        self._measured, measured, self._batch = False, self._batch, {}
        found = _statistics(list(measured.values())).items()
        state.log(
            {f"activation/{kind}/{name}": each for kind, of in found for name, each in zip(measured, of, strict=True)}
        )
        if self._histograms is not None:
            for name, moments in measured.items():
                if moments.counts is not None:
                    self._histograms.replace(f"activation/histogram/{name}", moments.counts)

    def exception(self, state: State) -> None:
        """Remove the hooks and discard the measurements of an interrupted batch."""
        self._remove()
        self._batch, self._current, self._measuring, self._measured = {}, {}, False, False

    def close(self, state: State) -> None:
        """Remove the hooks."""
        self.exception(state)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _observe(self, state: State, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if state.aggregates.ignoring:  # a pass that is no training, such as a loss on trial
            return
        leaves = [outputs] if isinstance(outputs, Tensor) else tree_leaves(outputs)
        output = next((each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()), None)
        if output is None or not output.numel():
            return
        moments = _Moments.of(local(output.detach()), self._histograms is not None)
        self._current[name] = self._current[name].joined(moments) if name in self._current else moments


class _Moments:
    """Number, mean, sum of squared deviations, extremes and number of nonzero elements; in float32 at least."""

    __slots__ = ("counts", "deviations", "greatest", "least", "mean", "nonzero", "number")

    def __init__(
        self, number: int, mean: Tensor, deviations: Tensor, least: Tensor, greatest: Tensor, nonzero: Tensor,
        counts: Tensor | None,
    ) -> None:  # fmt: skip
        self.number, self.mean, self.deviations = number, mean, deviations
        self.least, self.greatest, self.nonzero, self.counts = least, greatest, nonzero, counts

    @classmethod
    def of(cls, values: Tensor, counts: bool) -> _Moments:
        precise = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        # On CPU var_mean, count_nonzero and the norm of infinite order would take ten times as long as these.
        mean = precise.mean()
        scratch = precise - mean
        deviations = scratch.square_().sum()
        least, greatest = torch.aminmax(precise)
        # Summing floats takes less than half the time of summing bools; beyond 2**24 the sum is rounded.
        nonzero = torch.ne(precise, 0, out=scratch).sum()
        return cls(values.numel(), mean, deviations, least, greatest, nonzero, histogram(values) if counts else None)

    def joined(self, other: _Moments) -> _Moments:
        """Return the moments of both (Chan et al. 1979, eq. 2.1), whose rounding does not grow with the mean."""
        number = self.number + other.number
        difference = other.mean - self.mean
        return _Moments(
            number,
            self.mean + difference * (other.number / number),
            self.deviations + other.deviations + difference**2 * (self.number * other.number / number),
            torch.minimum(self.least, other.least),
            torch.maximum(self.greatest, other.greatest),
            self.nonzero + other.nonzero,
            None if self.counts is None or other.counts is None else self.counts + other.counts,
        )


def _statistics(measured: Sequence[_Moments]) -> dict[str, Sequence[Tensor]]:
    """Return the statistics of each, by what is measured."""
    numbers = [each.number for each in measured]
    zeros = torch._foreach_add(torch._foreach_neg([each.nonzero for each in measured]), numbers)
    return {
        "mean": [each.mean for each in measured],
        "std": torch._foreach_sqrt(torch._foreach_div([each.deviations for each in measured], numbers)),
        "max": torch._foreach_maximum(
            torch._foreach_neg([each.least for each in measured]), [each.greatest for each in measured]
        ),
        "zeros": torch._foreach_div(zeros, numbers),
    }


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)

"""The values that a LightningModule logs by ``self.log``: reduced as its arguments say, over batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hocket.data.nesting import map_tensors
from hocket.errors import WrongValue

_REDUCTIONS = ("mean", "sum", "min", "max")


def reduction(given: Any, name: str) -> str:
    """Return the name of a reduction. Raises ValueError for another one than mean, sum, min or max."""
    found = given if isinstance(given, str) else getattr(given, "__name__", "")
    found = {"avg": "mean"}.get(found.lower(), found.lower())
    if found not in _REDUCTIONS:
        raise WrongValue(
            f"self.log({name!r}, reduce_fx={given!r}): values are reduced by 'mean', 'sum', 'min' or 'max'. For another "
            "reduction log a torchmetrics.Metric."
        )
    return found


@dataclass
class Value:
    """One logged name: how it is reduced, and what was logged so far."""

    name: str
    on_step: bool
    on_epoch: bool
    reduce: str
    progress_bar: bool
    logger: bool
    #: The number of its evaluation loader, where there are several.
    loader: int | None
    #: A torchmetrics.Metric, which accumulates itself, and its name in the module.
    metric: Any = None
    attribute: str | None = None
    latest: Any = None
    total: Tensor | None = None
    weight: float = 0.0
    #: Whether it was logged in the current batch.
    fresh: bool = False
    #: Whether its name ends with the number of its loader.
    suffixed: bool = True

    @property
    def how(self) -> tuple[Any, ...]:
        """The arguments that all calls with one name share."""
        return self.on_step, self.on_epoch, self.reduce, self.progress_bar, self.logger

    def update(self, value: Any, weight: float) -> None:
        """Add a value."""
        self.fresh = True
        if self.metric is not None:
            return
        value = value.detach()
        self.latest = value
        if not self.on_epoch:
            return
        exact = value if value.device.type == "mps" else value.double()
        if self.reduce == "mean":
            exact, self.weight = exact * weight, self.weight + weight
        if self.total is None:
            self.total = exact.clone()
        elif self.reduce in ("min", "max"):
            self.total = getattr(torch, f"{self.reduce}imum")(self.total, exact)
        else:
            self.total = self.total + exact

    def of_step(self) -> Any:
        """Return the value of the current batch."""
        return self.metric._forward_cache if self.metric is not None else self.latest

    def of_epoch(self, reduce: Callable[[Tensor, str], Tensor] | None) -> Any:
        """Return the value over all batches so far; over all ranks, if ``reduce`` is given."""
        if self.metric is not None:
            return self.metric.compute()
        if self.total is None:
            return None
        total, weight = self.total, torch.tensor(self.weight, dtype=self.total.dtype, device=self.total.device)
        if reduce is not None:
            over = "sum" if self.reduce == "mean" else self.reduce
            total, weight = reduce(torch.stack([total, weight]), over).unbind()
        return (total / weight if self.reduce == "mean" else total).to(
            torch.promote_types(self.latest.dtype, torch.float32)
        )

    def named(self, step: bool) -> str:
        """Return its name as loggers get it."""
        suffix = ("_step" if step else "_epoch") if self.on_step and self.on_epoch else ""
        return f"{self.name}{suffix}{self._loader}"

    @property
    def plain(self) -> str:
        """Its name without ``_step`` and ``_epoch``."""
        return f"{self.name}{self._loader}"

    @property
    def _loader(self) -> str:
        return "" if self.loader is None or not self.suffixed else f"/dataloader_idx_{self.loader}"

    def reset(self) -> None:
        """Begin another epoch."""
        if self.metric is not None:
            self.metric.reset()
        self.total, self.weight, self.fresh = None, 0.0, False


def of_loader(number: int | None) -> str:
    """Return the key, in what `Results.of_epoch` returns, of a loader's values; with None, of the values of all loaders."""
    return f"log of {number}"


class Results:
    """What is logged in an epoch of training, or in an evaluation. ``LightningModule.log`` calls :meth:`log`.

    Args:
        reduce: reduces a tensor over ranks, by ``"sum"``, ``"min"`` or ``"max"``; None for one rank.
        training: whether they are those of training.
    """

    def __init__(self, reduce: Callable[[Tensor, str], Tensor] | None = None, training: bool = True) -> None:
        self._reduce = reduce
        #: Whether values of a step are for callbacks too, which those of an evaluation are not.
        self.training = training
        self.values: dict[str, Value] = {}
        #: Returns the number of samples in the current batch, by which a mean is weighted.
        self.samples: Callable[[], int] = lambda: 1
        #: Whether the current batch is padding, which does not count.
        self.padding = False
        #: The number of the evaluation loader, or None if there is one.
        self.loader: int | None = None
        #: Finds a metric of the module by the name of its attribute.
        self.metric_of: Callable[[str], Any] = lambda name: None

    def log(self, hook: str, name: str, value: Any, **how: Any) -> None:
        """Log a value in a hook of the module. The arguments are those of ``LightningModule.log``, completed by it."""
        loader, suffixed = self.loader, bool(how["add_dataloader_idx"])
        key = f"{hook}.{name}" + ("" if loader is None or not suffixed else f".{loader}")
        attribute = how["metric_attribute"]
        entry = self.values.get(key)
        made = Value(
            name,
            how["on_step"],
            how["on_epoch"],
            reduction(how["reduce_fx"], name),
            how["prog_bar"],
            how["logger"],
            loader,
            value if not isinstance(value, Tensor) else None,
            suffixed=suffixed,
        )
        if not (made.on_step or made.on_epoch):
            raise WrongValue(
                f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing. Set one of them to True, or omit both."
            )
        if entry is None:
            entry = self.values[key] = made
        elif entry.loader != loader:
            raise WrongValue(
                f"self.log({name!r}, add_dataloader_idx=False) in {hook} is called for several loaders, whose values would be "
                "one. Omit add_dataloader_idx=False, or log a name of its own for each: "
                f"self.log(f'{name}_{{dataloader_idx}}', …, add_dataloader_idx=False)."
            )
        elif entry.how != made.how:
            raise WrongValue(
                f"self.log({name!r}, …) is called twice in {hook} with different arguments: on_step, on_epoch, reduce_fx, "
                "prog_bar and logger of a name stay the same. Choose another name for one of them."
            )
        if attribute is not None and not isinstance(value, Tensor):
            entry.attribute = attribute
            if entry.metric is None:
                entry.metric = self.metric_of(attribute)
        if self.padding:
            return
        weight = 1.0
        if entry.on_epoch and entry.metric is None and entry.reduce == "mean":
            weight = float(how["batch_size"] if how["batch_size"] is not None else self.samples())
        entry.update(value, weight)

    def of_step(self, *, stale: bool = False) -> dict[str, dict[str, Any]]:
        """Return the values of the current batch: ``{"log": …, "callback": …, "bar": …}``.

        With ``stale``, also the latest ones of earlier batches of this epoch, as Lightning logs them.
        """
        found: dict[str, dict[str, Any]] = {"log": {}, "callback": {}, "bar": {}}
        for each in self.values.values():
            if each.on_step and (each.fresh or (stale and each.loader == self.loader)):
                self._sort(each, each.of_step(), True, found)
        return found

    def next_batch(self) -> None:
        """Begin the next batch."""
        for each in self.values.values():
            each.fresh = False

    def of_epoch(self, *, final: bool = True) -> dict[str, dict[str, Any]]:
        """Return the values over the epoch so far, in the same form. All ranks call it together, if it is ``final``.

        Those for loggers are also at `of_loader` of their evaluation loader.
        """
        found: dict[str, dict[str, Any]] = {"log": {}, "callback": {}, "bar": {}}
        for each in self.values.values():
            if each.on_epoch:
                self._sort(each, each.of_epoch(self._reduce if final else None), False, found)
        return found

    def _sort(self, each: Value, value: Any, step: bool, found: dict[str, dict[str, Any]]) -> None:
        if value is None:
            return
        if each.logger:
            found["log"][each.named(step)] = value
            if not step:
                found.setdefault(of_loader(each.loader), {})[each.named(step)] = value
        if self.training or not step:
            found["callback"][each.plain] = found["callback"][each.named(step)] = value
        if each.progress_bar:
            found["bar"][each.named(step)] = value

    def reset(self) -> None:
        """Begin another epoch."""
        for each in self.values.values():
            each.reset()
        self.values = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the epoch so far, without the states of metrics."""
        kept = [each.name for each in fields(Value) if each.name != "metric"]
        return {key: {name: getattr(value, name) for name in kept} for key, value in self.values.items()}

    def load_state_dict(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Continue an epoch whose values :meth:`state_dict` returned."""
        for key, value in _moved(saved, device).items():
            metric = None if value["attribute"] is None else self.metric_of(value["attribute"])
            self.values[key] = Value(**value, metric=metric)


def metric_states(module: Module) -> dict[str, Any]:
    """Return the states of a module's metrics, which its ``state_dict`` omits, by their names."""
    return {
        name: {each: getattr(metric, each) for each in (*metric.metric_state, *_OF_METRICS)}
        for name, metric in _metrics(module).items()
        if metric._update_count
    }


def load_metric_states(module: Module, saved: Mapping[str, Any]) -> None:
    """Undo `metric_states`."""
    for name, metric in _metrics(module).items():
        for each, value in saved.get(name, {}).items():
            setattr(metric, each, _moved(value, metric.device))


def _moved(tree: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), tree)


def _metrics(module: Module) -> dict[str, Any]:
    from torchmetrics import Metric

    return {name: each for name, each in module.named_modules() if isinstance(each, Metric)}


#: Attributes of a metric that are no states of its own: the number of batches, and the value of the latest.
_OF_METRICS = ("_update_count", "_forward_cache")

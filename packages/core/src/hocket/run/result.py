"""The result of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics import display
from hocket.basics.history import History
from hocket.basics.timestamp import Timestamp
from hocket.errors import WrongType
from hocket.help import attributes, names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The result of a fit. A notebook shows it as a table.

    Args:
        metrics: the latest evaluation results, as ``label/name``, and the training losses of the last logged batch, as
            ``train/name``. Where early stopping restored the best weights, evaluation results are those of these weights.
        timestamp: the completed part of training.
        run_folder: the folder for loggers; it exists if one of them wrote to it.
        stop_reason: the reason given by a plug-in that requested a stop, or empty.
        costs: calls, own seconds and nested seconds by (plug-in, hook); filled with ``profile_plugins=True``.
        checkpoints: the names of the existing checkpoints, newest last.
        history: everything that the Trainer has logged, in this fit and earlier ones; see `hocket.basics.history.History`.
        best: the best checkpoint of the run by the metric of ``Checkpoints(best=…)``; None if there is none.

    Example:
        >>> import hocket, torch
        >>> data = [(torch.ones(8, 4), torch.zeros(8, 4))]
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 4), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.0)", train_data=data, eval_data=data,
        ...     duration="3ep", device="cpu",
        ... )
        >>> result = trainer.fit()
        >>> list(result.metrics), result.timestamp.epoch, result.stop_reason
        (['train/loss', 'eval/loss'], 3, '')
    """

    metrics: Mapping[str, float]
    timestamp: Timestamp
    run_folder: Path
    stop_reason: str = ""
    costs: Mapping[tuple[str, str], Cost] = field(default_factory=dict)
    checkpoints: Sequence[str] = ()
    history: History = field(default_factory=History)
    best: Best | None = None

    def plot(self, *names: str, by: str = "batch") -> Figure:
        """Draw what was logged with matplotlib, and return the figure; see `hocket.basics.history.History.plot`."""
        return self.history.plot(*names, by=by)

    def __repr__(self) -> str:
        return display.text(self._title(), self._rows())

    def _repr_html_(self) -> str:
        return display.html(self._title(), self._rows())

    def _title(self) -> str:
        return f"Result after {display.position(self.timestamp)}"

    def _rows(self) -> dict[str, str]:
        rows = {name: f"{value:.6g}" for name, value in self.metrics.items()}
        if self.best is not None:
            rows["best"] = f"{self.best.metric} {self.best.value:.6g} in {self.best.path}"
        rows["checkpoints"] = display.listed(self.checkpoints)
        rows["run folder"] = str(self.run_folder)
        rows["history"] = f"{self.history.rows} rows of {display.listed(list(self.history), 8)}"
        rows["stopped by"] = self.stop_reason
        return {name: text for name, text in rows.items() if text}

    if not TYPE_CHECKING:

        def __getitem__(self, name: object) -> Any:
            values = "history" if name in self.history and name not in self.metrics else "metrics"
            known = [*self.metrics, *self.history]
            name = name if name in known else names.closest(name, known, 0.5) or "eval/loss"
            raise WrongType(
                f"A Result has no values by name; its metrics and its history do. Write result.{values}[{name!r}]."
            )

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(attributes.missing("Result", name, self), name=name, obj=self)


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint of a run.

    Args:
        path: its folder or URL, as ``resume=`` and `hocket.Trainer.load_weights` take it.
        metric: the name of the metric that ranks checkpoints.
        value: its value when the checkpoint was written.
    """

    path: str
    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a plug-in on one hook.

    Args:
        calls: number of calls.
        seconds: seconds in its own code. The sum over all plug-ins is their total cost.
        inside: seconds in nested calls: the loop's closure, the wrapped action, other plug-ins.
    """

    calls: int
    seconds: float
    inside: float = 0.0

"""Stopping when a metric no longer improves."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any, Literal

from torch import Tensor

from hocket.callback import Callback
from hocket.data.batches import map_tensors
from hocket.state import State
from hocket.time import Time, Unit
from hocket.training.requests import Decision


class EarlyStopping(Callback):
    """Stops when a metric has not improved for a while, and goes back to the best weights (Prechelt 1998).

    With ``restore_best`` the model and the algorithms' states (such as EMA's averages) are, at the end of every fit, what they
    were at the best evaluation, and so are the metrics of the result. A copy of them is kept on the CPU meanwhile. Optimizers
    are left alone. A value that is not finite is no improvement. Evaluations by `Trainer.evaluate` do not count. A fit after
    one that was stopped has the whole patience again.

    Args:
        monitor: ``label/name`` of a metric, such as ``"test/accuracy"`` or ``"eval/loss"``; ``"train/name"`` for train metrics,
            which are looked at after every epoch.
        mode: whether ``"max"`` or ``"min"`` is better; None takes ``"min"`` for losses, errors and perplexities, ``"max"`` for
            accuracies, and asks otherwise.
        patience: how many evaluations, or how long (``"5ep"``, ``"2000ba"``, ``"0.1dur"``), may pass without an improvement.
        min_delta: what counts as an improvement: more than this, in the metric's own unit.
        restore_best: whether to go back.

    Raises:
        ValueError: ``mode`` is needed, or an argument is out of its range; when a fit starts: there is no such evaluation set;
            at the first evaluation: there is no such metric.

    Example:
        >>> import hocket, torch
        >>> from hocket.callbacks.early_stopping import EarlyStopping
        >>> data = [(torch.ones(8, 4), torch.ones(8, 1))]
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.0)", train_data=data, eval_data=data,
        ...     callbacks=[EarlyStopping("eval/loss", patience=2)], duration="100ep", device="cpu",
        ... )
        >>> trainer.fit().timestamp.epoch
        3
    """

    def __init__(
        self,
        monitor: str,
        mode: Literal["max", "min"] | None = None,
        patience: int | str = 3,
        min_delta: float = 0.0,
        restore_best: bool = True,
    ) -> None:
        mode = _mode(monitor) if mode is None else mode
        if mode not in ("max", "min"):
            raise ValueError(
                f"EarlyStopping cannot tell whether more of '{monitor}' is better; pass mode='max' or mode='min'."
            )
        self._patience = patience if isinstance(patience, int) else Time.parse(patience)
        if not 0 <= min_delta < math.inf or not (patience if isinstance(patience, int) else self._patience.value) > 0:  # type: ignore[union-attr]
            raise ValueError(
                f"EarlyStopping was given patience={patience!r} and min_delta={min_delta}. Give a patience of at least one "
                "evaluation, or of some time such as '5ep', and a min_delta that is finite and not negative."
            )
        self.monitor = monitor
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta
        self._restore_best = restore_best
        #: The best value so far; infinitely bad before the first.
        self.best = -math.inf * self._sign
        #: Looks since the best one, and when it was, in every unit.
        self._waited = 0
        self._improved_at: dict[str, float] = dict.fromkeys(Unit, 0.0)
        self._kept: dict[str, Any] = {}
        self._due = False  # the set of the metric was evaluated just now
        self._standalone = False

    # --- when to look

    def fit_start(self, state: State) -> None:
        """Refuses to wait for what will never be evaluated."""
        if self.monitor.startswith("train/"):
            return
        label = next((label for label in state.eval_sets if self.monitor.startswith(f"{label}/")), None)
        if label is None:
            sets = ", ".join(map(repr, state.eval_sets)) or "none"
            raise ValueError(
                f"EarlyStopping watches '{self.monitor}', but there is no evaluation set of that name. There are: {sets}. Give "
                "monitor='label/name' with one of these labels, or 'train/name' for a train metric; sets are named by "
                "eval_data={'label': …}."
            )
        if not state.eval_sets[label].every:
            warnings.warn(
                f"EarlyStopping watches '{self.monitor}', but '{label}' is evaluated on request only. Pass eval_every='1ep' or "
                "the like.",
                stacklevel=2,
            )

    def eval_standalone_start(self, state: State) -> None:
        """What `Trainer.evaluate` evaluates may be other data."""
        self._standalone = True

    def eval_end(self, state: State) -> None:
        """Notices that the set of the metric was evaluated."""
        if not self._standalone and self.monitor.startswith(f"{state.eval_label}/"):
            self._due = True

    def eval_after_all(self, state: State) -> None:
        """Training weights are in place again: the place to copy them."""
        due, self._due = self._due, False
        if due:
            self._look(state)

    def eval_standalone_end(self, state: State) -> None:
        """The fit's own evaluations count again."""
        self._standalone = False

    def exception(self, state: State) -> None:
        """The evaluation under way does not count."""
        self._due = self._standalone = False

    def epoch_end(self, state: State) -> None:
        """Train metrics are there."""
        if self.monitor.startswith("train/"):
            self._look(state)

    # --- what to do

    def _look(self, state: State) -> None:
        if self.monitor not in state.metrics:
            there = ", ".join(sorted(state.metrics)) or "none"
            raise ValueError(
                f"EarlyStopping watches '{self.monitor}', but there is no such metric. There are: {there}."
            )
        value = state.metrics[self.monitor]
        if math.isfinite(value) and self._sign * (value - self.best) > self._min_delta:
            self.best = value
            self._wait_from_now_on(state)
            if self._restore_best:
                algorithms = {v.name: v.obj.state_dict() for v in state.bus.attachments if v.kind == "algorithms"}
                kept = {"model": state.bus.model_state(state.prepared), "algorithms": algorithms}
                self._kept = {**map_tensors(_to_cpu, kept), "metrics": dict(state.metrics)}
            return
        self._waited += 1
        if isinstance(self._patience, Time):
            unit = self._patience.unit
            over = _now(state, unit) - self._improved_at[unit] >= self._patience.value - 1e-9
        else:
            over = self._waited >= self._patience
        if over:
            evaluations = " evaluations" if isinstance(self._patience, int) else ""
            state.request(
                Decision.STOP, f"{self.monitor} has not improved on {self.best:.6g} for {self._patience}{evaluations}"
            )
            self._wait_from_now_on(state)

    def _wait_from_now_on(self, state: State) -> None:
        self._waited = 0
        self._improved_at = {unit: _now(state, unit) for unit in Unit}

    def fit_end(self, state: State) -> None:
        """Goes back to the best."""
        if self._restore_best and self._kept:
            state.bus.load_model_state(state.prepared, self._kept["model"])
            for attachment in state.bus.attachments:
                if attachment.kind == "algorithms" and attachment.name in self._kept["algorithms"]:
                    attachment.obj.load_state_dict(copy.deepcopy(self._kept["algorithms"][attachment.name]))
            state.metrics.update(self._kept["metrics"])

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The best value, what was kept of it, and how long ago it was."""
        at = {str(unit): value for unit, value in self._improved_at.items()}
        return {"best": self.best, "waited": self._waited, "improved_at": at, "kept": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`. Raises ValueError for keys that are not exactly those."""
        if state_dict.keys() != {"best", "waited", "improved_at", "kept"}:
            raise ValueError(
                f"This is not the state of an EarlyStopping: it has {sorted(state_dict)}, and should have best, waited, "
                "improved_at and kept."
            )
        self.best, self._waited, self._kept = state_dict["best"], state_dict["waited"], state_dict["kept"]
        self._improved_at = {unit: state_dict["improved_at"][unit] for unit in Unit}


def _mode(monitor: str) -> Literal["max", "min"] | None:
    name = monitor.partition("/")[2].lower()
    lower = any(word in name for word in ("loss", "error", "perplexity"))
    higher = "accuracy" in name
    return None if lower == higher else "min" if lower else "max"


def _now(state: State, unit: Unit) -> float:
    return state.elapsed() if unit is Unit.DURATION else float(state.timestamp.count(unit))


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)

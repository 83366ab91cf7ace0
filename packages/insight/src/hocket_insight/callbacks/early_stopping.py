"""Early stopping when a metric no longer improves."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any, Literal

from torch import Tensor

from hocket.basics.direction import check_mode, mode_of
from hocket.basics.time import Time, Unit, time_of
from hocket.data.nesting import map_tensors
from hocket.errors import WrongValue
from hocket.help import warn
from hocket.hookspecs.callback import Callback
from hocket.state.requests import Decision
from hocket.state.state import State
from hocket.state.watching import label_of, warn_of_nothing, watch


class EarlyStopping(Callback):
    """Stop when a metric has not improved for a while, and restore the best weights (Prechelt 1998).

    With ``restore_best``, the end of every fit restores the model, the algorithms' states (such as EMA's averages) and the
    result's metrics of evaluation sets from the best evaluation, and one line says so. Its train metrics are those of the last
    batches, unless one is monitored. A copy is kept on the CPU. Optimizers and checkpoints are not changed.
    A non-finite value is not an improvement. Evaluations by `Trainer.evaluate` do not count. A fit after a stopped one
    starts with the full patience again. Before the Trainer's ``min_duration`` is over, it does not stop.

    Args:
        monitor: ``label/name`` of a metric, such as ``"test/accuracy"`` or ``"eval/loss"``; ``"train/name"`` for train metrics,
            which are checked after every epoch; or the name of a value that a plug-in logs with ``state.log``, which is
            checked after each evaluation and each epoch in which it was logged.
        mode: whether ``"max"`` or ``"min"`` is better; None infers it from usual names, such as ``"min"`` for
            losses and errors and ``"max"`` for accuracies, and raises otherwise.
        patience: number of evaluations, or a length (``"5ep"``, ``"2000ba"``, ``"0.1dur"``), without an improvement.
        min_delta: an improvement has to be larger than this, in the unit of the metric.
        restore_best: whether to restore the best weights.

    Raises:
        ValueError: ``mode`` is needed, or an argument is out of its range. When a fit starts: there is no such evaluation set.
            At the first evaluation: there is no such metric.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.early_stopping import EarlyStopping
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
        check_mode(monitor, mode, lambda mode: f"EarlyStopping({monitor!r}, mode={mode!r})")
        mode = mode_of(monitor) if mode is None else mode
        if mode not in ("max", "min"):
            raise WrongValue(
                f"EarlyStopping cannot infer whether a higher '{monitor}' is better; pass «mode='max'» or «mode='min'». The "
                "name is that of a metric as evaluate() returns it, such as 'eval/loss', or 'eval/accuracy' for "
                "metrics='accuracy'."
            )
        self._patience = patience if isinstance(patience, int) else time_of(patience, "patience")
        if not 0 <= min_delta < math.inf or not (patience if isinstance(patience, int) else self._patience.value) > 0:  # type: ignore[union-attr]
            raise WrongValue(
                f"EarlyStopping was given «patience={patience!r}» and «min_delta={min_delta}». Give a patience of at least one "
                "evaluation, or a length such as '5ep', and a min_delta that is finite and not negative."
            )
        self.monitor = monitor
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta
        self._restore_best = restore_best
        #: The best value so far; before the first evaluation, minus infinity (infinity for mode "min").
        self.best = -math.inf * self._sign
        #: Evaluations since the best one, and the position of that one in every unit.
        self._waited = 0
        self._improved_at: dict[str, float] = dict.fromkeys(Unit, 0.0)
        self._kept: dict[str, Any] = {}
        self._due = False  # whether the metric's set has just been evaluated
        self._seen = False  # whether there was a value
        self._standalone = False

    # --- when to check

    def fit_start(self, state: State) -> None:
        """Check that the monitored set exists, and warn if it is not evaluated regularly."""
        watch(state, "EarlyStopping", self._key(state), self.monitor)
        label = label_of(state, self.monitor)
        if label is not None and not state.eval_sets[label].every:
            warn(
                f"EarlyStopping monitors '{self.monitor}', but '{label}' is evaluated on request only. Pass an interval, such "
                "as «eval_every='1ep'»."
            )

    def _key(self, state: State) -> str:
        return f"callbacks/{state.attachment_of(self).name}"

    def eval_standalone_start(self, state: State) -> None:
        """Ignore the sets of `Trainer.evaluate`, which may be other data."""
        self._standalone = True

    def eval_end(self, state: State) -> None:
        """Record that the metric's set was evaluated."""
        if not self._standalone and self.monitor.startswith(f"{state.eval_label}/"):
            self._due = True

    def eval_after_all(self, state: State) -> None:
        """Check the metric here, because the training weights are in place again and can be copied."""
        due, self._due = self._due, False
        if due and self.monitor in state.metrics:
            self._check(state, state.metrics[self.monitor])
        elif not self._standalone:
            if self.monitor not in state.metrics:  # a train metric is checked when its epoch ends
                self._check_logged(state)
            if due and not self._seen:
                there = ", ".join(sorted(state.metrics)) or "none"
                raise WrongValue(
                    f"EarlyStopping monitors '{self.monitor}', but there is no such metric. The metrics are: {there}."
                )

    def eval_standalone_end(self, state: State) -> None:
        """Count the evaluations of a fit again."""
        self._standalone = False

    def exception(self, state: State) -> None:
        """Discard the current evaluation."""
        self._due = self._standalone = False

    def epoch_end(self, state: State) -> None:
        """Check a train metric, which is available now."""
        if self.monitor.startswith("train/") and self.monitor in state.metrics:
            self._check(state, state.metrics[self.monitor])

    def epoch_checkpoint(self, state: State) -> None:
        """Check a value that was logged in the epoch. It is that of rank 0, so all ranks request the same."""
        if self.monitor in state.metrics or label_of(state, self.monitor) is not None:
            return
        self._check_logged(state)
        if not self._seen:
            self._seen = True  # warn once
            warn_of_nothing(state, "EarlyStopping", self.monitor)

    def _check_logged(self, state: State) -> None:
        if (value := state.watched.take(state, self._key(state))) is not None:
            self._check(state, value)

    # --- stopping and restoring

    def _check(self, state: State, value: float) -> None:
        self._seen = True
        if math.isfinite(value) and self._sign * (value - self.best) > self._min_delta:
            self.best = value
            self._restart_patience(state)
            if self._restore_best:
                algorithms = {v.name: v.obj.state_dict() for v in state.bus.attachments if v.kind == "algorithms"}
                kept = {"model": state.bus.model_state(state.prepared), "algorithms": algorithms}
                train = self.monitor.startswith("train/")  # else those here are of the epoch before
                metrics = {name: v for name, v in state.metrics.items() if train or not name.startswith("train/")}
                self._kept = {**map_tensors(_to_cpu, kept), "metrics": metrics, "at": list(_place(state))}
            return
        self._waited += 1
        if isinstance(self._patience, Time):
            unit = self._patience.unit
            over = _now(state, unit) - self._improved_at[unit] >= self._patience.value - 1e-9
        else:
            over = self._waited >= self._patience
        if over and state.progress.may_stop():
            evaluations = " evaluations" if isinstance(self._patience, int) else ""
            state.request(
                Decision.STOP, f"{self.monitor} has not improved on {self.best:.6g} for {self._patience}{evaluations}"
            )
            self._restart_patience(state)

    def _restart_patience(self, state: State) -> None:
        self._waited = 0
        self._improved_at = {unit: _now(state, unit) for unit in Unit}

    def fit_end(self, state: State) -> None:
        """Restore the best weights, and say so unless they are the latest."""
        if self._restore_best and self._kept:
            epoch, batch = self._kept.get("at", (None, None))  # checkpoints of earlier versions do not have it
            if (epoch, batch) != _place(state) and state.strategy.rank == 0:
                where = f" after epoch {epoch}, batch {batch}" if batch is not None else ""
                print(
                    f"hocket: early-stopping restored the weights{where}, where {self.monitor} was {self.best:.6g}. Evaluation "
                    "metrics of the result are theirs; train/… are of the last batches. restore_best=False keeps the latest.",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            state.bus.load_model_state(state.prepared, self._kept["model"])
            for attachment in state.bus.attachments:
                if attachment.kind == "algorithms" and attachment.name in self._kept["algorithms"]:
                    attachment.obj.load_state_dict(copy.deepcopy(self._kept["algorithms"][attachment.name]))
            state.metrics.update(self._kept["metrics"])

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the copies from that evaluation, and the position since which patience counts."""
        at = {str(unit): value for unit, value in self._improved_at.items()}
        return {"best": self.best, "waited": self._waited, "improved_at": at, "kept": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned. Raises ValueError if the keys differ."""
        if state_dict.keys() != {"best", "waited", "improved_at", "kept"}:
            raise WrongValue(
                f"This is not the state of an EarlyStopping: it has {sorted(state_dict)}, and should have best, waited, "
                "improved_at and kept."
            )
        self.best, self._waited, self._kept = state_dict["best"], state_dict["waited"], state_dict["kept"]
        self._improved_at = {unit: state_dict["improved_at"][unit] for unit in Unit}


def _place(state: State) -> tuple[int, int]:
    return state.timestamp.epoch, state.timestamp.batch


def _now(state: State, unit: Unit) -> float:
    return state.elapsed() if unit is Unit.DURATION else float(state.timestamp.count(unit))


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)

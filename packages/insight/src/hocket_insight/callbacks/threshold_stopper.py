"""Stopping when a value crosses a threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.errors import WrongValue
from hocket.hookspecs.callback import Callback
from hocket.state.requests import Decision
from hocket.state.state import State
from hocket.state.watching import check_name, label_of, warn_of_nothing


class ThresholdStopper(Callback):
    """Stop when a logged value is beyond a threshold: a loss that explodes, or an accuracy that is enough.

    It looks at every value that the loggers get under the name, on rank 0: metrics of evaluations in a fit, train metrics,
    ``train/loss``, and values that plug-ins log. The fit ends after the next batch, or at its end, or once the Trainer's
    ``min_duration`` is over if the value is still beyond the threshold then. NaN is not beyond any threshold; see the
    Trainer's ``nonfinite=``. `EarlyStopping` stops when a metric no longer improves.

    Args:
        monitor: the name of the value, such as ``"train/loss"`` or ``"test/accuracy"``.
        above: the largest value that does not count.
        below: the smallest value that does not count.
        times: how many logged values in succession have to be beyond a threshold.
        checkpoint: whether to write a checkpoint too, before the Trainer's last one.

    Raises:
        ValueError: there is no threshold, or ``times`` is less than 1; when a fit starts: there is no such evaluation set.

    Example:
        >>> import hocket, torch
        >>> from hocket_insight.callbacks.threshold_stopper import ThresholdStopper
        >>> data = [(torch.ones(8, 4), torch.ones(8, 1))]
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.01)", train_data=data, eval_data=data,
        ...     callbacks=[ThresholdStopper("eval/loss", below=1e-3)], duration="1000ep", device="cpu",
        ... )
        >>> trainer.fit().metrics["eval/loss"] < 1e-3
        True
    """

    def __init__(
        self,
        monitor: str,
        above: float | None = None,
        below: float | None = None,
        times: int = 1,
        checkpoint: bool = False,
    ) -> None:
        numbers = [each for each in (above, below) if each is not None]
        numeric = all(isinstance(each, int | float) and type(each) is not bool and each == each for each in numbers)
        if not numbers or not numeric or type(times) is not int or times < 1:
            raise WrongValue(
                f"threshold-stopper was given «above={above!r}», «below={below!r}» and «times={times!r}». Give above= or "
                f"below= a number, such as ThresholdStopper({monitor!r}, above=10.0), and times an int of 1 or more."
            )
        if above is not None and below is not None and below > above:
            raise WrongValue(
                f"threshold-stopper was given «above={above!r}» and «below={below!r}», between which every value stops the "
                "fit. Give above= the larger number, or one of them."
            )
        self.monitor = monitor
        self._above, self._below, self._times, self._checkpoint = above, below, times, checkpoint
        #: Values in succession that were beyond a threshold, and the reason to stop, if there is one.
        self._crossed = 0
        self._reason = ""
        self._seen = self._warned = self._standalone = False

    def fit_start(self, state: State) -> None:
        """Check the name."""
        check_name(state, "threshold-stopper", self.monitor)
        self._reason = ""

    def eval_standalone_start(self, state: State) -> None:
        """Ignore the sets of `Trainer.evaluate`, which may be other data."""
        self._standalone = True

    def eval_standalone_end(self, state: State) -> None:
        """Look at the evaluations of a fit again."""
        self._standalone = False

    def exception(self, state: State) -> None:
        """Look at the evaluations of a fit again."""
        self._standalone = False

    def log_metrics(self, state: State, metrics: Mapping[str, float]) -> None:
        """Look at the value. The loop is asked later, where all ranks take part in the decision."""
        value = metrics.get(self.monitor)
        if value is None or state.strategy.rank or self._standalone:
            return
        self._seen = True
        above = self._above is not None and value > self._above
        below = self._below is not None and value < self._below
        self._crossed = self._crossed + 1 if above or below else 0
        if self._crossed >= self._times:
            side = f"above {self._above}" if above else f"below {self._below}"
            often = f", {self._crossed} times in succession" if self._times > 1 else ""
            self._reason = f"{self.monitor} is {value:.6g}, {side}{often}"
        else:
            self._reason = ""

    def batch_end(self, state: State) -> None:
        """Ask the loop to stop."""
        if self._reason and state.progress.may_stop():
            state.request(Decision.STOP | (Decision.CHECKPOINT if self._checkpoint else Decision.NOTHING), self._reason)
            self._reason, self._crossed = "", 0

    def epoch_start(self, state: State) -> None:
        """Warn once if nothing was logged under the name in the first epoch."""
        if state.timestamp.epoch:
            self._warn(state)

    def after_fit(self, state: State) -> None:
        """Warn once if nothing was logged under the name."""
        self._warn(state)

    def _warn(self, state: State) -> None:
        label = label_of(state, self.monitor)
        awaited = label is not None and not any(name.startswith(f"{label}/") for name in state.metrics)
        seen = self._seen or self.monitor in state.metrics  # or before the run was resumed
        if not (seen or awaited or self._warned or state.strategy.rank):
            self._warned = True
            warn_of_nothing(state, "threshold-stopper", self.monitor)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of values in succession that were beyond a threshold."""
        return {"crossed": self._crossed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned. Raises ValueError if the keys differ."""
        if state_dict.keys() != {"crossed"}:
            raise WrongValue(
                f"This is not the state of a ThresholdStopper: it has {sorted(state_dict)}, and should have crossed."
            )
        self._crossed = state_dict["crossed"]

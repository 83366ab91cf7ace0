"""Loss spikes: find them by a robust statistic, and skip the batch or roll back to the last good state."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hocket.basics import safe_files
from hocket.errors import WrongState, WrongValue
from hocket.help import warn
from hocket.hookspecs import Event, hookimpl
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.state.requests import Decision
from hocket_general.good_state import GoodState
from hocket_general.measured_batches import MeasuredBatch, joined

if TYPE_CHECKING:
    from hocket.state.state import State

#: The standard deviation of a normal distribution is this multiple of its median absolute deviation.
_NORMAL = 1.4826
#: The smallest deviation that counts, relative to the median: a curve without noise has no spike of a thousandth.
_FLOOR = 0.01
#: The journal's name in the folder of the run.
JOURNAL = "loss_spikes.jsonl"


def spike_score(value: float, history: Sequence[float]) -> float:
    """Return how far ``value`` is above the median of ``history``, in robust standard deviations.

    ``(value - median) / max(1.4826 * MAD, 0.01 * |median|)``, where MAD is the median absolute deviation: a z-score that
    earlier outliers hardly change (Leys et al. 2013, "Detecting outliers", section 2). Negative below the median.

    Args:
        value: such as a loss; a non-finite one scores infinity.
        history: earlier values, at least one, all finite.

    Raises:
        ValueError: ``history`` is empty.

    Example:
        >>> from hocket_general.functional import spike_score
        >>> round(spike_score(3.0, [1.0, 1.1, 0.9, 1.2, 0.8]), 1)
        13.5
    """
    if not history:
        raise WrongValue(
            "spike_score was given an empty history. Give earlier values, such as those of the last 100 batches."
        )
    if not math.isfinite(value):
        return math.inf
    median = statistics.median(history)
    deviation = statistics.median(abs(each - median) for each in history)
    scale = max(_NORMAL * deviation, _FLOOR * abs(median))
    return (value - median) / scale if scale else math.inf if value > median else 0.0


class LossSpikeGuard(Algorithm):
    """Roll back to the last good state when the loss spikes, or skip the batch; the data moves on.

    After Chowdhery et al. 2022, "PaLM", section 5.1 (arXiv 2204.02311), who restarted about 100 steps before a spike and
    skipped the next 200 to 500 batches of data; here this happens in memory. A batch is a spike if its loss, or gradient norm,
    is more than ``threshold`` robust standard deviations (:func:`spike_score`) above the median of the last ``window`` good
    batches, or if its loss is non-finite. All ranks decide together. Of a batch that is trained on in parts, as those of
    `BatchSizeWarmup`, a rollback judges the largest values, and ``"skip"`` each part.

    ``action="rollback"`` keeps a copy of weights, optimizers, schedules, and the state of algorithms, precision and strategy,
    in the memory of the host. It finds a spike one batch later, so that nothing waits for the device: the spike, the batch
    after it and all others since the copy are undone. Only before a copy, an evaluation, a checkpoint that is due, and the end
    of an epoch or fit does it wait, so that these never have spiked weights. ``action="skip"`` finds it before the
    optimizer steps and skips that step; it keeps no copy, and waits for the device in every batch.

    The Trainer's ``nonfinite=`` acts before the guard: ``"raise"`` ends the fit, and a step that ``"skip"`` skips is no spike.
    With ``nonfinite="warn"`` the guard handles non-finite losses.

    Spikes are reported in warnings, in the log as ``loss-spike-guard/spikes``, and in ``loss_spikes.jsonl`` in the folder of
    the run, with the indices of the samples in the data set if the data has indices.

    Args:
        action: ``"rollback"`` or ``"skip"``.
        threshold: how many robust standard deviations above the median are a spike; positive.
        window: number of batches that the statistic is over.
        warmup: number of good batches before the first comparison. Before, only non-finite values are spikes.
        gradient_norm: whether to look at the norm of the gradients, before clipping, too. Norms that overflow are ignored.
        every: number of batches between copies of the state.
        skip: number of further batches to skip after a rollback.
        limit: maximum number of spikes in a run; the next one raises.

    Raises:
        ValueError: an argument out of range.
        RuntimeError: later, more than ``limit`` spikes.

    Example:
        >>> import hocket, hocket_general, torch
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss="mse_loss", optimizer="sgd(lr=0.1)", duration="1ep", device="cpu",
        ...     train_data=[(torch.randn(8, 4), torch.randn(8, 1))] * 10,
        ...     algorithms=[hocket_general.LossSpikeGuard(every=5, skip=2, warmup=5)],
        ... )
        >>> result = trainer.fit()
    """

    events = {
        Event.FIT_START, Event.AFTER_DATALOADER, Event.BATCH_START, Event.AFTER_TRAIN_BATCH, Event.EPOCH_END,
        Event.EVAL_BEFORE_ALL, Event.BATCH_CHECKPOINT, Event.FIT_END, Event.EXCEPTION,
    }  # fmt: skip
    phase = Phase.OPTIMIZER  # before averages of the weights are evaluated
    once = "Both would write one loss_spikes.jsonl, and go back for one spike twice. Remove one."

    def __init__(
        self,
        action: Literal["rollback", "skip"] = "rollback",
        threshold: float = 6.0,
        window: int = 100,
        warmup: int = 20,
        gradient_norm: bool = False,
        every: int = 100,
        skip: int = 0,
        limit: int = 10,
    ) -> None:
        if action not in ("rollback", "skip"):
            raise WrongValue(f"LossSpikeGuard was given «action={action!r}»: give 'rollback' or 'skip'.")
        if not threshold > 0:
            raise WrongValue(
                f"LossSpikeGuard was given «threshold={threshold}»: give a positive number of deviations, such as 6.0."
            )
        if not 1 <= warmup <= window or every < 1:
            raise WrongValue(
                f"LossSpikeGuard was given «warmup={warmup}», «window={window}» and «every={every}»: these are numbers of "
                "batches, 1 or more, and warmup is at most window."
            )
        if skip < 0 or limit < 0:
            raise WrongValue(f"LossSpikeGuard was given «skip={skip}» and «limit={limit}»: give 0 or more.")
        self.action = action
        self.threshold = threshold
        self.window = window
        self.warmup = warmup
        self.gradient_norm = gradient_norm
        self.every = every
        self.skip = skip
        self.limit = limit
        #: The last good values by name.
        self._history: dict[str, list[float]] = {}
        #: The current batch, and the one before it if that is not judged yet.
        self._current: MeasuredBatch | None = None
        self._pending: MeasuredBatch | None = None
        #: The indices of the samples loaded for the next batch, one list for each batch of the data.
        self._loaded: list[list[Any] | None] = []
        #: Number of batches still to skip, and the spikes so far.
        self._to_skip = 0
        self._journal: deque[dict[str, Any]] = deque(maxlen=limit + 1)  # more spikes end the run
        self._good = GoodState(self)
        #: Whether a fit is running: evaluations between fits undo nothing.
        self._fitting = False

    def apply(self, event: Event, state: State) -> None:
        """Measure each batch, and judge the one before it."""
        if event is Event.AFTER_DATALOADER:
            self._loaded.append(state.sample_indices())
        elif event is Event.BATCH_START:
            self._batch_start(state)
        elif event is Event.AFTER_TRAIN_BATCH:
            assert self._current is not None
            self._current.measure(state, self.gradient_norm)
        elif event is Event.EXCEPTION:
            self._fitting = False
        elif event is Event.FIT_START:
            self._loaded, self._fitting = [], True
            if self.action == "rollback" and not self._good:  # otherwise it is that of the resumed fit
                self._good.take(state, self._history)
        elif self.action == "rollback" and self._fitting and (event is not Event.BATCH_CHECKPOINT or _saves(state)):
            done = self._completed(state)
            self._judge_all(state, [self._pending, done])
            self._pending = None
            if done is not None or event is Event.FIT_END:  # otherwise a callback evaluates within a batch
                self._current = None
        if event is Event.FIT_END:
            self._good.load(None)
            self._fitting = False

    @hookimpl(tryfirst=True)  # to see every step, whichever plug-in takes it
    def optimizer_step(self, state: State, closure: Callable[[], Tensor]) -> bool | None:
        """Skip the step of a spike, for ``action="skip"``; otherwise leave it to the next implementation."""
        batch, key = self._current, (state.step.name, state.step.part)
        if batch is None:
            return None
        if key not in batch.spikes:
            skips = self.action == "skip"
            batch.add(*key, alone=skips)
            spikes = batch.spikes[key] = self._judge(state, batch.read(state.step.name)) if skips else {}
            if spikes:
                self._report(state, batch, spikes)
        return False if batch.spikes[key] else None

    def no_effect(self, state: State) -> str:
        """Return that no batch was compared with ``warmup`` batches before it, if so."""
        if state.timestamp.batch > self.warmup:
            return ""
        return (
            f"«warmup={self.warmup}» batches come before the first comparison, and there were {state.timestamp.batch}, so it "
            "looked for non-finite values only. Give a smaller warmup, or train longer."
        )

    # --- batches

    def _batch_start(self, state: State) -> None:
        at, done = state.timestamp.batch, self._completed(state)
        if self.action == "rollback":
            due = at > 0 and at % self.every == 0
            good = self._judge_all(state, [self._pending, done] if due else [self._pending])
            self._pending = done if good and not due else None
            if good and due:
                self._good.take(state, self._history)
        loaded, self._loaded = self._loaded, []
        self._current = MeasuredBatch.of(state, loaded)
        if self._to_skip:
            self._to_skip -= 1
            state.request(Decision.SKIP_BATCH)

    def _completed(self, state: State) -> MeasuredBatch | None:
        """Return the current batch if a step was taken, and no exception interrupted it, after which it is trained on again."""
        batch = self._current
        return None if batch is None or batch.at["batch"] == state.timestamp.batch or not batch.values else batch

    def _judge_all(self, state: State, batches: Sequence[MeasuredBatch | None]) -> bool:
        """Judge batches in order, and roll back at the first spike. Return whether there was none."""
        for batch in batches:
            if batch is not None and (spikes := self._judge(state, batch.read())):
                self._report(state, batch, spikes, restored=self._good.batch)
                self._history = self._good.restore(state)
                self._to_skip = self.skip
                return False
        return True

    def _judge(self, state: State, values: dict[str, float]) -> dict[str, float]:
        """Return the scores of values that are spikes. If there are none, all join the good ones."""
        values = {name: math.inf if math.isnan(value) else value for name, value in values.items()}  # NaN has no order
        if state.strategy.world_size > 1 and values:  # so that all ranks decide the same, whatever they measured
            mine = torch.tensor(list(values.values()), dtype=torch.float64)
            values = dict(zip(values, state.bus.all_reduce(mine, "max").tolist(), strict=True))
        spikes = {}
        for name, value in values.items():
            history = self._history.get(name, [])
            if not math.isfinite(value) and "gradient_norm" in name:
                continue  # loss scaling overflows now and then; gradients that are really non-finite show in the next loss
            score = spike_score(value, history) if len(history) >= self.warmup or not math.isfinite(value) else 0.0
            if score > self.threshold:
                spikes[name] = score
        if not spikes:
            for name, value in values.items():
                if math.isfinite(value):
                    self._history[name] = [*self._history.get(name, []), value][-self.window :]
        return spikes

    def _report(
        self, state: State, batch: MeasuredBatch, spikes: dict[str, float], restored: int | None = None
    ) -> None:
        indices = (
            batch.indices if state.strategy.world_size == 1 else joined(state.bus.all_gather_object(batch.indices))
        )
        values = {name: value if math.isfinite(value) else str(value) for name, value in batch.read().items()}
        scores = {name: round(score, 2) if math.isfinite(score) else str(score) for name, score in spikes.items()}
        done = {"action": self.action, **({} if restored is None else {"restored": restored})}
        self._journal.append({**batch.at, **done, "values": values, "scores": scores, "samples": indices})
        if state.strategy.rank == 0:
            lines = "".join(f"{json.dumps(each)}\n" for each in self._journal)
            safe_files.replace(state.run_folder / JOURNAL, lines)
        state.log({"loss-spike-guard/spikes": len(self._journal)})
        where = f"batch {batch.at['batch']} (epoch {batch.at['epoch']}, batch {batch.at['batch_in_epoch']} in it)"
        found = ", ".join(
            f"{name} {values[name]}" + (f" at {scores[name]} deviations" if math.isfinite(spikes[name]) else "")
            for name in spikes
        )
        if len(self._journal) > self.limit:
            raise WrongState(
                f"The loss spiked in {where}: {found}. That is spike {len(self._journal)} of this run, and "
                f"loss-spike-guard allows «limit={self.limit}». {JOURNAL} in the folder of the run lists their samples. "
                "Lower the learning rate, clip gradients, or give a higher threshold= or limit=."
            )
        what = "its step is skipped" if restored is None else f"the state after batch {restored} is restored"
        warn(f"The loss spiked in {where}: {found}; {what}.", RuntimeWarning)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the statistic, the batches that are not judged yet, the journal and the last good state."""
        return {
            "history": {name: list(values) for name, values in self._history.items()},
            "pending": None if self._pending is None else self._pending.state_dict(),
            "current": None if self._current is None else self._current.state_dict(),
            "to_skip": self._to_skip,
            "journal": list(self._journal),
            "copy": self._good.saved(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`. Raises ValueError for an unknown key."""
        known = {"history", "pending", "current", "to_skip", "journal", "copy"}
        if state_dict.keys() != known:
            raise WrongValue(
                f"LossSpikeGuard was given a state with {sorted(state_dict.keys() ^ known)} missing or unknown. Resume with "
                "the version of hocket that wrote the checkpoint."
            )
        self._history = {name: list(values) for name, values in state_dict["history"].items()}
        self._pending, self._current = (
            None if (saved := state_dict[key]) is None else MeasuredBatch(**saved) for key in ("pending", "current")
        )
        self._to_skip = state_dict["to_skip"]
        journal = state_dict["journal"]
        self._journal = deque(journal, max(self.limit, len(journal)) + 1)  # limit may be lower now
        self._good.load(state_dict["copy"])


def _saves(state: State) -> bool:
    """Whether a checkpoint is due. Requested ones are not: a signal must not change a run that is resumed after it."""
    return any(hasattr(each.obj, "is_due") and each.obj.is_due(state) for each in state.bus.attachments)

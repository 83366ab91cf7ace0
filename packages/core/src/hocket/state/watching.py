"""Values by name for plug-ins that act on them: metrics of evaluation sets, train metrics, and values of `State.log`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket.errors import WrongValue
from hocket.help import names, warn
from hocket.help.ours import is_ours
from hocket.state import simple_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.state.state import State

#: Usual labels of evaluation sets: a metric of such a label without a set is a mistake, and no logged value.
_LABELS = ("eval", "test", "val", "valid", "validation", "dev")


class WatchedValues:
    """The latest values logged under names that plug-ins wait for. Each plug-in takes a value once."""

    def __init__(self) -> None:
        #: The name that each plug-in waits for, by the plug-in's key; and the value that it has not taken yet.
        self.names: dict[str, str] = {}
        self._values: dict[str, float | Tensor] = {}

    def watch(self, key: str, name: str) -> None:
        """Keep the latest value logged under ``name`` for the plug-in ``key``."""
        self.names[key] = name

    def update(self, logged: Mapping[str, float | Tensor]) -> None:
        """Note the watched ones of the values that are logged."""
        self._values.update((key, logged[name]) for key, name in self.names.items() if name in logged)

    def take(self, state: State, key: str) -> float | None:
        """Return rank 0's value, or None if nothing was logged since the last call. All ranks call it; waits for the device."""
        value = self._values.pop(key, None)
        taken: float | None = state.bus.broadcast_object(None if value is None else float(value))
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the values that were not taken yet."""
        return dict(self._values)

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self._values = dict(tree)


def label_of(state: State, name: str) -> str | None:
    """Return the label of the evaluation set that a metric belongs to, or None."""
    return max((label for label in state.eval_sets if name.startswith(f"{label}/")), key=len, default=None)


def watch(state: State, who: str, key: str, name: str) -> None:
    """Watch a metric or logged value, before training. Raises ValueError if the name is that of a set that does not exist.

    Args:
        who: the plug-in, for the message.
        key: identifies the plug-in, the same in a resumed run.
    """
    check_name(state, who, name)
    state.watched.watch(key, name)


def check_name(state: State, who: str, name: str) -> None:
    """Raise ValueError if a metric or logged value that a plug-in monitors cannot be there, before training."""
    prefix = name.partition("/")[0]
    of_a_set = "/" in name and (prefix in _LABELS or names.closest(prefix, state.eval_sets))
    if of_a_set and prefix != "train" and label_of(state, name) is None:
        sets = ", ".join(map(repr, state.eval_sets)) or "none"
        raise WrongValue(
            f"{who} monitors '{name}', but there is no evaluation set of that name. The sets are: {sets}. Give 'label/name' "
            "with one of these labels, 'train/name' for a train metric, or the name of a value that a plug-in logs with "
            "state.log; sets are named by «eval_data={'label': …}»."
        )
    label = label_of(state, name)
    unmeasured = label is not None and name != f"{label}/loss" and not state.eval_sets[label].metrics.names
    if unmeasured and not may_log(state):
        metric = name.removeprefix(f"{label}/")
        known = simple_metrics.find(metric) or names.closest(metric, simple_metrics.METRICS)
        write = f"«metrics={{{metric!r}: …}}» in the Trainer, with a metric of torchmetrics, for example"
        if known is not None:
            write = f"«metrics={known!r}» in the Trainer" + (
                "" if known == metric else f", and monitor '{label}/{known}'"
            )
        raise WrongValue(
            f"{who} monitors '{name}', and evaluation measures only '{label}/loss', because «metrics=» is empty. Write "
            f"{write}; or monitor '{label}/loss'."
        )
    if label is not None and not may_log(state):
        measured = {"loss", *state.eval_sets[label].metrics.names}
        own = name.removeprefix(f"{label}/")
        near = None if own in measured else names.closest(own, measured, 0.85)
        if near:
            raise WrongValue(
                f"{who} monitors '{name}', which evaluation does not measure. Write '{label}/{near}'; it measures "
                f"{', '.join(f'{label}/{metric}' for metric in sorted(measured))}."
            )
    if "/" not in name and not state.task.logs_for_others and (meant := _metrics_like(state, name)):
        raise WrongValue(
            f"{who} monitors '{name}', but metrics of evaluation sets are named 'label/name'. Write "
            f"{' or '.join(map(repr, meant))}; or log a value under another name with state.log."
        )


def may_log(state: State) -> bool:
    """Whether values of evaluation sets may be logged by code that is not hocket's: a Task, algorithm or callback."""
    if state.task.logs_for_others:
        return True
    plugins = [attachment.obj for attachment in state.bus.attachments if attachment.kind in ("algorithms", "callbacks")]
    return any(not is_ours(type(part).__module__) for part in [state.task, *plugins])


def _metrics_like(state: State, name: str) -> list[str]:
    """Return the metrics of evaluation sets that a name without label may stand for, such as ``val_loss`` or ``accuracy``."""
    first, _, rest = name.partition("_")
    own = rest if rest and (first in _LABELS or first in state.eval_sets) else name
    labels = [first] if first in state.eval_sets else list(state.eval_sets)
    return [f"{label}/{own}" for label in labels if own in {"loss", *state.eval_sets[label].metrics.names}]


def warn_of_nothing(state: State, who: str, name: str) -> None:
    """Warn that nothing was logged under a name that a plug-in watches, by the end of the first epoch."""
    logged = [*state.metrics, *state.history.names(), "train/loss"]
    near = names.closest(name, logged, 0.5)
    if name in logged:  # with a longer interval than the epoch
        write = "Write «log_every='1ep'» in the Trainer"
    else:
        write = f"Write {near!r}" if near else "Log it with state.log, or monitor another value"
    warn(
        f"{who} monitors '{name}', and no plug-in has logged a value of that name in this epoch. There are: "
        f"{', '.join(sorted(set(logged))) or 'none'}. {write}."
    )

"""What the Trainer asks of the content of checkpoints, which hocket-checkpoints defines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.basics.plugin_errors import PluginError
from hocket.help import optional_packages

if TYPE_CHECKING:
    from hocket.basics.seeding import RandomStream
    from hocket.loop.fit import FitLoop
    from hocket.loop.nonfinite import NonFiniteGuard
    from hocket.state.component import Content
    from hocket.state.state import State
    from hocket_data.data_module_loading import ModuleData


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run consists of besides its `State`, as far as its checkpoints hold it."""

    loop: FitLoop
    guard: NonFiniteGuard
    stream: RandomStream
    #: The Trainer's arguments, and the hyperparameters that its optimizers had before schedules changed them.
    arguments: Mapping[str, Any]
    hyperparameters: Mapping[str, str]
    module: ModuleData | None


class NoContent:
    """That of a run without hocket-checkpoints. What saves or loads raises the error that says what to install."""

    def __init__(self, absent: optional_packages.NotInstalled) -> None:
        self._absent = absent

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """Raise NotInstalled."""
        raise self._absent

    def load_state_dict(self, tree: Mapping[str, Any], strict: bool, ignore: Sequence[str] = ()) -> None:
        """Raise NotInstalled."""
        raise self._absent

    def check_loaded(self) -> None:
        """Do nothing."""

    def train_data_is_set(self) -> None:
        """Do nothing."""

    def eval_sets_are_made(self) -> None:
        """Do nothing."""


def content_of(state: State, parts: Parts) -> Content:
    """Return the content of a run's checkpoints, or `NoContent` if hocket-checkpoints is absent."""
    try:
        part = optional_packages.module("hocket_checkpoints.core_components")
    except optional_packages.NotInstalled as absent:
        return NoContent(absent)
    content: Content = part.content_of(state, parts)
    return content


def by_own_names(state: State, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights by the model's own names instead of the task's.

    Raises PluginError if the strategy uses other names.
    """
    prefix = state.model_prefix
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if missing := set(state.model.state_dict()) - set(own):
        raise PluginError(
            f"The strategy's model_state has no {', '.join(sorted(missing)[:3])}: it has to use the model's own names, "
            f"but has {', '.join(list(weights)[:3])}."
        )
    return own

"""Objects that save and restore their own state."""

from __future__ import annotations

from typing import Any

from hocket.errors import WrongValue


class Stateful:
    """The base of plug-ins, which have no state unless they define both methods."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: tensors, numbers, strings, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned. Raises ValueError for an unknown key."""
        if state_dict:
            raise WrongValue(f"{type(self).__name__} has no state, but was given {sorted(state_dict)}")


def has_state(owner: object) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


#: Methods that belong together, and the modules with their defaults, of which a subclass overrides both or neither.
_PAIRS = (("state_dict", "load_state_dict"), ("extra_state", "load_extra_state"))
_DEFAULTS = (__name__, "hocket.state.task", "hocket_data.data_module", "hocket.state.component")


def one_sided(owner: object) -> str:
    """Return which methods an object has and lacks, if it saves a state that it cannot restore, or the reverse; or empty."""
    for pair in _PAIRS:
        methods = {name: getattr(owner, name, None) for name in pair}
        own = {
            name: callable(item) and getattr(item, "__module__", "") not in _DEFAULTS for name, item in methods.items()
        }
        if len({*own.values()}) > 1:
            given, lacking = sorted(pair, key=lambda name: not own[name])
            arguments = ", state" if lacking == pair[1] else ""
            return (
                f"{type(owner).__name__} defines {given}() and no {lacking}(), so checkpoints cannot restore its state. Define "
                f"def {lacking}(self{arguments}) too, or remove {given}()."
            )
    return ""

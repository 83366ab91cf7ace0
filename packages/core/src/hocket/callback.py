"""Callbacks: plug-ins that observe."""

from __future__ import annotations

from typing import Any


class Callback:
    """Implements hooks by name and observes; every event and action of :mod:`hocket.hookspecs` can be one of its methods.

    ``def batch_end(self, state)`` listens; ``@hookimpl(wrapper=True) def forward(self, state, batch)`` surrounds an action.
    A method asks only for the arguments that it uses. A public method that looks like a misspelt hook is an error when the
    callback is attached; helpers start with an underscore or are called nothing like a hook.

    Example:
        >>> import hocket
        >>> class Recorder(hocket.Callback):
        ...     def batch_end(self, state):
        ...         state.log({"samples": state.timestamp.sample})
        ...     @hocket.hookimpl(wrapper=True)
        ...     def forward(self, state, batch):
        ...         outputs = yield
        ...         return outputs
    """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, numbers, strings, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`. Raises ValueError for a key that this callback does not know."""
        if state_dict:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state_dict)}")

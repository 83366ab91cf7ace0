"""Callbacks: plug-ins that observe."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hocket.data.stateful import Stateful


class Callback(Stateful):
    """Base class of callbacks, which observe training. A method can implement any event or action of :mod:`hocket.hookspecs`.

    ``def batch_end(self, state)`` listens to an event; ``@hookimpl(wrapper=True) def forward(self, state, batch)`` wraps an
    action. A method declares only the arguments that it uses. Attaching a callback with a public method that looks like a
    misspelt hook raises an error; name helpers with a leading underscore, or unlike any hook.

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

    #: Intervals in batches by event, from ``after_dataloader`` to ``batch_end``: ``{"batch_end": 10}`` calls ``batch_end``
    #: in batches 10, 20 and so on only, and 0 in none.
    every_batches: Mapping[str, int] = MappingProxyType({})
    #: If a Trainer may have one only, also of subclasses: why, and what to write instead of two. Empty allows several.
    once: str = ""

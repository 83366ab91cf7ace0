"""The bus as the loop and plug-ins know it: `state.bus` calls the hooks of a run's plug-ins. See `hocket.plugins.bus`."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hocket.hookspecs.actions import Actions
from hocket.hookspecs.events import Events
from hocket.hookspecs.loggers import Loggers
from hocket.hookspecs.precision import PrecisionHooks
from hocket.hookspecs.strategies import StrategyHooks

if TYPE_CHECKING:
    from hocket.hookspecs.attachment import Attachment

    class Hooks(Events, Actions, StrategyHooks, PrecisionHooks, Loggers):
        """The signatures of the compiled hooks, for type checkers and editors."""

else:
    Hooks = object


class BusLike(Hooks):
    """Calls all implementations of a hook: ``state.bus.batch_end(state)``."""

    #: The smallest interval of `hocket.Callback.every_batches`, of which the others are multiples; 0 for none.
    interval: int
    #: (plug-in, hook) -> [calls, own seconds, seconds in nested timed calls], if costs are counted.
    account: dict[tuple[str, str], list[float]]
    #: The same for the implementations of actions, strategies and precisions.
    work: dict[tuple[str, str], list[float]]
    #: Whether costs are counted all the time, and not only during `measure`.
    profile: bool

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """The attached plug-ins, in the order of attachment."""

    def attach(self, *attachments: Attachment) -> None:
        """Add plug-ins and recompile."""

    def detach(self, attachment: Attachment) -> None:
        """Remove a plug-in and recompile."""

    def on_rank(self, rank: int) -> None:
        """Set the rank of this process. On ranks other than 0, only loggers with ``all_ranks`` are called from now on."""

    def measure(self, on: bool, ranges: Callable[[str], AbstractContextManager[Any]] | None = None) -> None:
        """Begin or end to fill `account` and `work`, and recompile. Between an end and the next beginning calls cost nothing.

        Args:
            ranges: a context for each call, which gets the hook as its name, after that of the plug-in and a point.
        """

    def without(self, *kinds: str) -> AbstractContextManager[None]:
        """Call no event listeners of these kinds inside the context; the actions that they implement still run."""

    def listeners(self, hook: str, *, wrappers: bool = True) -> list[Attachment]:
        """Return the plug-ins that implement a hook, in call order. ``wrappers=False`` omits plug-ins that wrap it."""

    def compiled(
        self, hook: str, without: Collection[Attachment], inner: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return a hook compiled without some plug-ins. ``inner`` replaces all implementations of an action but wrappers."""

    def replace(self, hooks: Mapping[str, Callable[..., Any]]) -> None:
        """Call these functions for hooks, until the next change of plug-ins; listeners at intervals are those of now."""

    def begin_batch(self, number: int) -> None:
        """Leave out, in batches that are no multiple of `interval`, the listeners that are not called there.

        They would not be called otherwise either, but looked at.

        Args:
            number: of the batch that begins, counted from 1.
        """

"""The bus: the plug-ins of one Trainer, with every hook compiled into one plain callable.

pluggy registers and validates implementations, but calls do not go through it. For each hook the bus compiles the attached
implementations into one function, such as ``bus.batch_end(state)`` or ``bus.forward(state, batch)``. An event without
listeners is a no-op function; an action without overrides is the bare default. Arguments are positional, in the order of
the specification.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pluggy

from hocket.basics.kinds import singular
from hocket.basics.plugin_errors import HookError
from hocket.help import names, optional_packages
from hocket.help.ours import is_ours
from hocket.hookspecs import HOOKS, SPECS, Event
from hocket.hookspecs.attachment import Attachment
from hocket.hookspecs.bus import BusLike
from hocket.hookspecs.events import between
from hocket.plugins.delivery import Delivery
from hocket.plugins.folding import (
    Listener,
    all_despite_errors,
    all_of,
    around,
    finish,
    first_result,
    noted,
    origin_of,
    positional,
)
from hocket.plugins.order import by_option, check_combination, order

_EVENTS = [event.value for event in Event]
_IN_A_BATCH = {event.value for event in between(Event.AFTER_DATALOADER, Event.BATCH_END)}
#: Every listener of these events runs, even if another one raises.
_ALWAYS = {Event.EXCEPTION.value, Event.CLOSE.value}
#: After these hooks, loggers must have written all pending rows.
_FINISHING = {"flush", Event.CLOSE.value}
#: Kinds whose errors get no plug-in note: the default actions call the user's model and loss, so the error is the user's.
_TRANSPARENT = {"actions", "strategies", "precisions"}


class _Registry(pluggy.PluginManager):
    """A pluggy manager that treats every name in the plug-in's namespace as an implementation, marked or not."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        function = vars(plugin).get(name)
        if function is None:
            return None
        options = dict(getattr(function, "hocket_impl", None) or {})
        if options.get("hookwrapper"):
            raise HookError(
                f"'{name}' uses pluggy's old hookwrapper=True. Write @hookimpl(wrapper=True), and return the result."
            )
        return {"hookwrapper": False, "wrapper": False, "optionalhook": False, "tryfirst": False, "trylast": False} | {
            "specname": None,
            **options,
        }


class _Implemented:
    """The hooks of one plug-in. Compared by identity: two empty `types.SimpleNamespace` objects would be equal."""

    def __init__(self, hooks: dict[str, Callable[..., Any]]) -> None:
        vars(self).update(hooks)


class Bus(BusLike):
    """Hold the attached plug-ins and call their hooks. There is one bus per Trainer; two buses share no state.

    Raises HookError for an unknown hook or an unknown argument of a hook, and ConflictError or OrderError for algorithms
    that cannot run together.
    """

    def __init__(self, attachments: Iterable[Attachment] = (), *, profile: bool = False) -> None:
        self._pluggy = _Registry("hocket")
        for spec in SPECS:
            self._pluggy.add_hookspecs(spec)
        self.profile = profile
        #: Counts costs; None if nobody asked for them so far.
        self._timer = self._make_timer() if profile else None
        self._attachments: dict[str, Attachment] = {}
        #: Kinds of plug-ins whose event listeners are currently disabled.
        self._muted: tuple[str, ...] = ()
        self._deliveries: dict[str, Delivery] = {}
        self._rank = 0
        self.interval = 0
        #: Two functions for each hook: one calls all listeners at their intervals, the other only the listeners of every batch.
        self._at_intervals: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._due: bool | None = None
        self.account, self.work = {}, {}
        self.attach(*attachments)

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return tuple(self._attachments.values())

    def attach(self, *attachments: Attachment) -> None:
        for attachment in attachments:
            key = f"{attachment.kind}/{attachment.name}"
            if key in self._attachments:
                raise HookError(
                    f"{attachment.kind} '{attachment.name}' is already attached. Give the second one another name."
                )
            implemented = _implementations(attachment)
            try:
                self._pluggy.register(_Implemented(implemented), name=key)
            except pluggy.PluginValidationError as error:
                self._pluggy.unregister(name=key)
                raise HookError(self._explain(attachment, error)) from None
            self._attachments[key] = attachment
            if attachment.kind == "loggers":
                self._deliveries[key] = Delivery(attachment, implemented)
        self._compile()

    def detach(self, attachment: Attachment) -> None:
        key = f"{attachment.kind}/{attachment.name}"
        self._pluggy.unregister(name=key)
        del self._attachments[key]
        self._deliveries.pop(key, None)
        self._compile()

    def on_rank(self, rank: int) -> None:
        self._rank = rank
        self._compile()

    def measure(self, on: bool, ranges: Callable[[str], AbstractContextManager[Any]] | None = None) -> None:
        self._timer = self._timer or self._make_timer()
        self._timer.measuring, self._timer.ranges = on, ranges
        self._compile()

    def _make_timer(self) -> Any:
        return optional_packages.module("hocket_insight.profiling.timing", "profile_plugins=").Timer(self)

    def _writes(self, key: str) -> bool:
        attachment = self._attachments[key]
        return attachment.kind != "loggers" or not self._rank or getattr(attachment.obj, "all_ranks", False)

    @contextmanager
    def without(self, *kinds: str) -> Iterator[None]:
        self._muted = kinds
        self._compile()
        try:
            yield
        finally:
            self._muted = ()
            self._compile()

    def listeners(self, hook: str, *, wrappers: bool = True) -> list[Attachment]:
        return [self._attachments[impl.plugin_name] for impl in self._ordered(hook) if wrappers or not impl.wrapper]

    def compiled(
        self, hook: str, without: Collection[Attachment], inner: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        return self._fold(hook, without, inner)

    def _listens(self, attachment: Attachment, hook: str) -> bool:
        caller = getattr(self._pluggy.hook, hook, None)
        key = f"{attachment.kind}/{attachment.name}"
        return caller is not None and any(impl.plugin_name == key for impl in caller.get_hookimpls())

    def _ordered(self, hook: str) -> list[pluggy.HookImpl]:
        hookimpls = getattr(self._pluggy.hook, hook).get_hookimpls()
        impls = {impl.plugin_name: impl for impl in hookimpls if self._writes(impl.plugin_name)}
        if len(impls) < 2:
            return list(impls.values())
        action = bool(getattr(self._pluggy.hook, hook).spec.opts.get("firstresult"))
        ordered = order(hook, self._attachments.values(), self._listens, action)
        return by_option(impls[key] for key in (f"{v.kind}/{v.name}" for v in ordered) if key in impls)

    def _compile(self) -> None:
        check_combination([attachment for attachment in self._attachments.values() if attachment.kind == "algorithms"])
        self.interval, self._at_intervals, self._due = 0, {}, None
        for hook in HOOKS:
            setattr(self, hook, self._fold(hook))

    def replace(self, hooks: Mapping[str, Callable[..., Any]]) -> None:
        self.interval = 0
        for hook, function in hooks.items():
            setattr(self, hook, function)

    def begin_batch(self, number: int) -> None:
        due = number % self.interval == 0
        if due is not self._due:
            self._due = due
            for hook, (all_listeners, in_every_batch) in self._at_intervals.items():
                setattr(self, hook, all_listeners if due else in_every_batch)

    def _fold(
        self, hook: str, without: Collection[Attachment] = (), inner: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Compile all implementations of a hook into one plain callable; see `compiled`."""
        spec = getattr(self._pluggy.hook, hook).spec
        implementations = self._acting(hook, without)
        wrappers = [impl for impl in implementations if impl.wrapper]
        if inner is not None:
            listeners = [Listener(inner)]
        else:
            listeners = [self._listener(hook, impl, spec.argnames) for impl in implementations if not impl.wrapper]
        if hook in _FINISHING:
            listeners += [Listener(finish(queue, hook)) for key, queue in self._deliveries.items() if self._writes(key)]
        if hook in _ALWAYS:
            folded = all_despite_errors([noted(*listener[:2]) for listener in listeners])
        elif spec.opts.get("firstresult"):
            folded = first_result(hook, [noted(*listener[:2]) for listener in listeners])
        else:
            folded = all_of(listeners, counted=hook == Event.BATCH_END.value)
            if not without and inner is None and not wrappers:
                self._note_intervals(hook, listeners, folded)
        for impl in reversed(wrappers):
            folded = self._wrap(hook, impl, spec.argnames, folded)
        if self._timer is not None and "closure" in spec.argnames:
            folded = self._timer.without_closure(folded, spec.argnames.index("closure"))
        return folded

    def _acting(self, hook: str, without: Collection[Attachment]) -> list[pluggy.HookImpl]:
        """Return the implementations that are called, in order; event listeners of muted kinds are not."""
        muted = self._muted if hook in _EVENTS else ()
        plugins = ((impl, self._attachments[impl.plugin_name]) for impl in self._ordered(hook))
        return [impl for impl, plugin in plugins if plugin not in without and plugin.kind not in muted]

    def _note_intervals(self, hook: str, listeners: Sequence[Listener], folded: Callable[..., Any]) -> None:
        """Note what `begin_batch` may leave out: listeners of an event that are not called in every batch."""
        intervals = [listener.every for listener in listeners if listener.every > 1]
        if intervals:
            self.interval = math.gcd(self.interval, *intervals)
            constant = [listener for listener in listeners if listener.every == 1]
            self._at_intervals[hook] = folded, all_of(constant, counted=hook == Event.BATCH_END.value)

    def _listener(self, hook: str, impl: pluggy.HookImpl, argnames: tuple[str, ...]) -> Listener:
        """Return one implementation as a positional callable; errors of the task and of core's actions name no plug-in."""
        attachment = self._attachments[impl.plugin_name]
        function = positional(impl.function, impl.argnames, argnames)
        first = getattr(self._pluggy.hook, hook).spec.opts.get("firstresult")
        if attachment.kind == "loggers" and not first:
            function = self._deliveries[impl.plugin_name].of(hook, function)
        function = self._measured(function, hook, attachment)
        whose = "" if attachment.kind in _TRANSPARENT else origin_of(attachment, hook)
        return Listener(function, whose, 1 if first or hook in _ALWAYS else self._every(hook, impl))

    def _every(self, hook: str, impl: pluggy.HookImpl) -> int:
        """Return the interval in batches between calls of an implementation; see `hocket.Callback.every_batches`."""
        attachment = self._attachments[impl.plugin_name]
        given = getattr(attachment.obj, "every_batches", None) or {}
        if not isinstance(given, Mapping):
            raise HookError(
                f"{origin_of(attachment, hook)} has every_batches = {given!r}; it should be numbers of batches by event. Write "
                f"every_batches = {{{hook!r}: {given if type(given) is int else 10}}}."
            )
        every: int = given.get(hook, 1)
        if every != 1 and (hook not in _IN_A_BATCH or type(every) is not int or every < 0):
            raise HookError(
                f"{origin_of(attachment, hook)} has «every_batches={{{hook!r}: {every!r}}}». Give events from after_dataloader "
                "to batch_end the number of batches, an int of 0 (never) or more."
            )
        return every

    def _wrap(
        self, hook: str, impl: pluggy.HookImpl, argnames: tuple[str, ...], inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap ``inner`` in a generator implementation, with pluggy's semantics of ``wrapper=True``."""
        attachment = self._attachments[impl.plugin_name]
        start = positional(impl.function, impl.argnames, argnames)
        return self._measured(around(start, inner, origin_of(attachment, hook)), hook, attachment)

    def _measured(self, function: Callable[..., Any], hook: str, attachment: Attachment) -> Callable[..., Any]:
        """Time an implementation if costs are counted."""
        if self._timer is None:
            return function
        timed: Callable[..., Any] = self._timer.timed(function, hook, attachment.name, attachment.kind in _TRANSPARENT)
        return timed

    def _explain(self, attachment: Attachment, error: pluggy.PluginValidationError) -> str:
        for hook, function in _implementations(attachment).items():
            known = getattr(self._pluggy.hook, hook).spec.argnames
            for argument in inspect.signature(function).parameters:
                if argument not in known:
                    near = names.closest(argument, known, 0.5)
                    hint = f" Did you mean '{near}'?" if near else ""
                    return (
                        f"{origin_of(attachment, hook)} asks for the argument '{argument}', but the hook has "
                        f"({', '.join(known)}).{hint} Use only these names."
                    )
        return f"{attachment.kind} '{attachment.name}' cannot be attached: {error}"


def _implementations(attachment: Attachment) -> dict[str, Callable[..., Any]]:
    """Return the implementations of a plug-in by hook name. Raises HookError for a method that looks like a misspelt hook."""
    obj = attachment.obj
    hooks: dict[str, Callable[..., Any]] = {}
    for name in dir(type(obj)) + list(getattr(obj, "__dict__", ())):
        if name.startswith("_"):
            continue
        if name not in HOOKS:
            _check_misspelt(attachment, name)
        elif callable(function := getattr(obj, name)):
            if name in getattr(obj, "__dict__", ()) and not inspect.isroutine(function):
                raise HookError(
                    f"{singular(attachment.kind).capitalize()} '{attachment.name}' has an attribute {name}, of class "
                    f"{type(function).__name__}, and {name} is a hook, which would be called. Give the attribute another name, "
                    f"such as self.own_{name}."
                )
            hooks[name] = function
    if not hooks and attachment.kind in ("callbacks", "loggers"):
        _check_called(attachment)
    if (declared := getattr(type(obj), "declared_listeners", None)) is not None:
        hooks |= declared(obj, attachment.name, hooks)
    return hooks


def _check_called(attachment: Attachment) -> None:
    """Raise HookError for a callback or logger without any hook, whose methods would never be called."""
    kind = type(attachment.obj)
    own = [name for name, value in vars(kind).items() if name[0] != "_" and inspect.isfunction(value)]
    if "checkpoint_components" in own:  # which checkpoints call
        return
    own = [name for name in own if name not in ("state_dict", "load_state_dict")]
    if own and not is_ours(kind.__module__):
        table = "Logger" if attachment.kind == "loggers" else "Callback"
        write = next((text for name in own if (text := names.listed(name, "methods", table))), None)
        usual = "log_metrics(self, state, metrics)" if table == "Logger" else "batch_end(self, state)"
        raise HookError(
            f"{attachment.kind} '{attachment.name}' ({kind.__name__}) defines {', '.join(own)} and no hook, so hocket would "
            f"never call it. Define {write or usual}; `hocket plugins hooks` prints all hooks."
        )


def _check_misspelt(attachment: Attachment, name: str) -> None:
    """Raise HookError for a public method whose name resembles a hook: it is more likely a typo than a helper."""
    function = inspect.getattr_static(type(attachment.obj), name, None)
    if not inspect.isfunction(function) or function.__module__ == "builtins" or is_ours(function.__module__):
        return
    near = theirs if (theirs := names.hook(name)) in HOOKS else names.closest(name, HOOKS, 0.8)
    looks_like_one = name.startswith(("on_", "before_", "after_")) or name.endswith(("_start", "_end"))
    if near or looks_like_one or hasattr(function, "hocket_impl"):
        hint = f"Did you mean '{near}'?" if near else "`hocket plugins hooks` prints them all."
        raise HookError(
            f"{attachment.kind} '{attachment.name}' ({type(attachment.obj).__name__}) defines {name}(), which is not a hook. "
            f"{hint} If it is a helper, name it _{name}."
        )

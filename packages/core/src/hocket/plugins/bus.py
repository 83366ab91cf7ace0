"""The bus: the plug-ins of one Trainer, with every hook compiled into one plain callable.

pluggy registers and validates implementations, but calls do not go through it. For each hook the bus compiles the attached
implementations into one function, such as ``bus.batch_end(state)`` or ``bus.forward(state, batch)``. An event without
listeners is a no-op function; an action without overrides is the bare default. Arguments are positional, in the order of
the specification.
"""

from __future__ import annotations

import difflib
import inspect
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pluggy

from hocket.algorithm import Algorithm, Phase
from hocket.help import names
from hocket.hookspecs import SPECS, Actions, Event, Events, Loggers, PrecisionHooks, StrategyHooks
from hocket.hookspecs.needs import Need
from hocket.ours import is_ours
from hocket.plugins.delivery import Delivery
from hocket.plugins.errors import HookError
from hocket.plugins.folding import all_despite_errors, all_of, finish, first_result, note, noted, origin_of, positional
from hocket.plugins.order import by_option, check_combination, order
from hocket.plugins.spec import HOOKS, Attachment

_HOOKS = HOOKS
_EVENTS = {event.value: event for event in Event}
_ACTIONS = {name for name in vars(Actions) if not name.startswith("_")}
_NAMES = [event.value for event in Event]
_IN_A_BATCH = set(_NAMES[_NAMES.index(Event.AFTER_DATALOADER.value) : _NAMES.index(Event.BATCH_END.value) + 1])
#: Every listener of these events runs, even if another one raises.
_ALWAYS = {Event.EXCEPTION.value, Event.CLOSE.value}
#: After these hooks, loggers must have written all pending rows.
_FINISHING = {"flush", Event.CLOSE.value}
#: Kinds whose errors get no plug-in note: the default actions call the user's model and loss, so the error is the user's.
_TRANSPARENT = {"actions", "strategies", "precisions"}


class _Registry(pluggy.PluginManager):
    """A pluggy manager that treats every name in the plug-in's namespace as an implementation, marked or not."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
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


if TYPE_CHECKING:

    class _Hooks(Events, Actions, StrategyHooks, PrecisionHooks, Loggers):
        """The signatures of the compiled hooks, for type checkers and editors."""

else:
    _Hooks = object


class Bus(_Hooks):
    """Hold the attached plug-ins and call their hooks. There is one bus per Trainer; two buses share no state.

    Raises HookError for an unknown hook or an unknown argument of a hook, and ConflictError or OrderError for algorithms
    that cannot run together.
    """

    def __init__(self, attachments: Iterable[Attachment] = (), *, profile: bool = False) -> None:
        self._pluggy = _Registry("hocket")
        for spec in SPECS:
            self._pluggy.add_hookspecs(spec)
        #: Whether costs are counted all the time, and not only during `measure`.
        self.profile = profile
        #: Whether a plug-in measures now, and what it marks each call with; see `measure`.
        self._measuring = False
        self._ranges: Callable[[str], AbstractContextManager[Any]] | None = None
        self._attachments: dict[str, Attachment] = {}
        #: Kinds of plug-ins whose event listeners are currently disabled.
        self._muted: tuple[str, ...] = ()
        self._deliveries: dict[str, Delivery] = {}
        self._rank = 0
        #: The smallest interval of `hocket.Callback.every_batches`, of which the others are multiples; 0 for none.
        self.interval = 0
        #: Two functions for each hook: one calls all listeners at their intervals, the other only the listeners of every batch.
        self._at_intervals: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._due: bool | None = None
        #: (plug-in, hook) -> [calls, own seconds, seconds in nested timed calls], filled if ``profile`` is True, and during
        #: `measure`.
        self.account: dict[tuple[str, str], list[float]] = {}
        #: The same for the implementations of actions, strategies and precisions, filled during `measure`.
        self.work: dict[tuple[str, str], list[float]] = {}
        #: Seconds spent in nested calls so far, for each function being timed, outermost first.
        self._nested_seconds: list[float] = []
        self.attach(*attachments)

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """Return the attached plug-ins, in the order of attachment."""
        return tuple(self._attachments.values())

    def attach(self, *attachments: Attachment) -> None:
        """Add plug-ins and recompile."""
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
        """Remove a plug-in and recompile."""
        key = f"{attachment.kind}/{attachment.name}"
        self._pluggy.unregister(name=key)
        del self._attachments[key]
        self._deliveries.pop(key, None)
        self._compile()

    def on_rank(self, rank: int) -> None:
        """Set the rank of this process. On ranks other than 0, only loggers with ``all_ranks`` are called from now on."""
        self._rank = rank
        self._compile()

    def measure(self, on: bool, ranges: Callable[[str], AbstractContextManager[Any]] | None = None) -> None:
        """Begin or end to fill `account` and `work`, and recompile. Between an end and the next beginning calls cost nothing.

        Args:
            ranges: a context for each call, which gets the hook as its name, after that of the plug-in and a point.
        """
        self._measuring, self._ranges = on, ranges
        self._compile()

    def _writes(self, key: str) -> bool:
        attachment = self._attachments[key]
        return attachment.kind != "loggers" or not self._rank or getattr(attachment.obj, "all_ranks", False)

    @contextmanager
    def without(self, *kinds: str) -> Iterator[None]:
        """Call no event listeners of these kinds inside the context; the actions that they implement still run."""
        self._muted = kinds
        self._compile()
        try:
            yield
        finally:
            self._muted = ()
            self._compile()

    def listeners(self, hook: str, *, wrappers: bool = True) -> list[Attachment]:
        """Return the plug-ins that implement a hook, in call order. ``wrappers=False`` omits plug-ins that wrap it."""
        return [self._attachments[impl.plugin_name] for impl in self._ordered(hook) if wrappers or not impl.wrapper]

    def compiled(
        self, hook: str, without: Collection[Attachment], inner: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return a hook compiled without some plug-ins. ``inner`` replaces all implementations of an action but wrappers."""
        return self._fold(hook, without, inner)

    def _listens(self, attachment: Attachment, hook: str) -> bool:
        caller = getattr(self._pluggy.hook, hook, None)
        key = f"{attachment.kind}/{attachment.name}"
        return caller is not None and any(impl.plugin_name == key for impl in caller.get_hookimpls())

    def _ordered(self, hook: str) -> list[pluggy.HookImpl]:
        found = getattr(self._pluggy.hook, hook).get_hookimpls()
        impls = {impl.plugin_name: impl for impl in found if self._writes(impl.plugin_name)}
        if len(impls) < 2:
            return list(impls.values())
        action = bool(getattr(self._pluggy.hook, hook).spec.opts.get("firstresult"))
        ordered = order(hook, self._attachments.values(), self._listens, action)
        return by_option(impls[key] for key in (f"{v.kind}/{v.name}" for v in ordered) if key in impls)

    def _compile(self) -> None:
        check_combination([attachment for attachment in self._attachments.values() if attachment.kind == "algorithms"])
        self.interval, self._at_intervals, self._due = 0, {}, None
        for hook in _HOOKS:
            setattr(self, hook, self._fold(hook))

    def replace(self, hooks: Mapping[str, Callable[..., Any]]) -> None:
        """Call these functions for hooks, until the next change of plug-ins; listeners at intervals are those of now."""
        self.interval = 0
        for hook, function in hooks.items():
            setattr(self, hook, function)

    def begin_batch(self, number: int) -> None:
        """Leave out, in batches that are no multiple of `interval`, the listeners that are not called there.

        They would not be called otherwise either, but looked at.

        Args:
            number: of the batch that begins, counted from 1.
        """
        due = number % self.interval == 0
        if due is not self._due:
            self._due = due
            for hook, (all_listeners, in_every_batch) in self._at_intervals.items():
                setattr(self, hook, all_listeners if due else in_every_batch)

    def _fold(
        self, hook: str, without: Collection[Attachment] = (), inner: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Compile all implementations of a hook into one plain callable; see `compiled`."""
        caller = getattr(self._pluggy.hook, hook)
        argnames = caller.spec.argnames
        first = caller.spec.opts.get("firstresult")
        ordered = [impl for impl in self._ordered(hook) if self._attachments[impl.plugin_name] not in without]
        if hook in _EVENTS:
            ordered = [impl for impl in ordered if self._attachments[impl.plugin_name].kind not in self._muted]
        calls = [self._call(hook, impl, argnames) for impl in ordered if not impl.wrapper]
        if inner is not None:
            calls = [(inner, "")]
        if hook in _FINISHING:
            calls += [(finish(each, hook), "") for key, each in self._deliveries.items() if self._writes(key)]
        if hook in _ALWAYS:
            folded = all_despite_errors([noted(*call) for call in calls])
        elif first:
            folded = first_result(hook, [noted(*call) for call in calls])
        else:
            every = [1] if inner is not None else [self._every(hook, impl) for impl in ordered if not impl.wrapper]
            every += [1] * (len(calls) - len(every))  # of deliveries to loggers
            listeners = [(call, n) for call, n in zip(calls, every, strict=True) if n]
            counted = hook == Event.BATCH_END.value
            folded = all_of(listeners, counted)
            if (
                not without
                and inner is None
                and all(not impl.wrapper for impl in ordered)
                and any(n > 1 for _, n in listeners)
            ):
                self.interval = math.gcd(self.interval, *(n for _, n in listeners if n > 1))
                in_every_batch = all_of([each for each in listeners if each[1] == 1], counted)
                self._at_intervals[hook] = folded, in_every_batch
        for impl in reversed([impl for impl in ordered if impl.wrapper]):
            folded = self._wrap(hook, impl, argnames, folded)
        if (self.profile or self._measuring) and "closure" in argnames:
            return self._with_timed_closure(folded, argnames.index("closure"))
        return folded

    def _call(self, hook: str, impl: pluggy.HookImpl, argnames: tuple[str, ...]) -> tuple[Callable[..., Any], str]:
        """Return one implementation as a positional callable, and the plug-in to name in its errors ("" for user errors)."""
        attachment = self._attachments[impl.plugin_name]
        function = positional(impl.function, impl.argnames, argnames)
        if attachment.kind == "loggers" and not getattr(self._pluggy.hook, hook).spec.opts.get("firstresult"):
            function = self._deliveries[impl.plugin_name].of(hook, function)
        function = self._measured(function, hook, attachment)
        return function, "" if attachment.kind in _TRANSPARENT else origin_of(attachment, hook)

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
        whose = origin_of(attachment, hook)

        def wrapped(*args: Any) -> Any:
            generator = start(*args)
            try:
                next(generator)
            except StopIteration:
                raise HookError(f"The wrapper of {whose} did not yield. Write `result = yield` once.") from None
            except BaseException as error:
                note(error, whose)
                raise
            try:
                result = inner(*args)
            except BaseException as error:
                try:
                    generator.throw(error)
                except StopIteration as stop:
                    return stop.value
                generator.close()
                raise HookError(f"The wrapper of {whose} yielded twice.") from error
            try:
                generator.send(result)
            except StopIteration as stop:
                return stop.value
            except BaseException as error:
                note(error, whose)
                raise
            generator.close()
            raise HookError(f"The wrapper of {whose} yielded twice.")

        return self._measured(wrapped, hook, attachment)

    def _measured(self, function: Callable[..., Any], hook: str, attachment: Attachment) -> Callable[..., Any]:
        """Time an implementation if costs are counted, and mark its calls if there are ranges."""
        if not (self.profile or self._measuring):
            return function
        transparent = attachment.kind in _TRANSPARENT
        if self._ranges is not None:
            function = _in_range(function, self._ranges, hook if transparent else f"{attachment.name}.{hook}")
        if transparent and not self._measuring:
            return self._timed(function, None)
        entries = self.work if transparent else self.account
        return self._timed(function, entries.setdefault((attachment.name, hook), [0, 0.0, 0.0]))

    def _timed(self, function: Callable[..., Any], entry: list[float] | None) -> Callable[..., Any]:
        """Time the function, and add to ``entry`` its own seconds and those of the timed functions that it calls."""
        clock, nested = time.perf_counter, self._nested_seconds

        def timed(*args: Any) -> Any:
            begin = clock()
            nested.append(0.0)
            try:
                return function(*args)
            finally:
                took, others = clock() - begin, nested.pop()
                if entry is not None:
                    entry[0] += 1
                    entry[1] += took - others
                    entry[2] += others
                if nested:
                    nested[-1] += took

        return timed

    def _with_timed_closure(self, function: Callable[..., Any], index: int) -> Callable[..., Any]:
        """Exclude the loop's closure from the time of the plug-in that calls it."""

        def call(*args: Any) -> Any:
            return function(*args[:index], self._timed(args[index], None), *args[index + 1 :])

        return call

    def _explain(self, attachment: Attachment, error: pluggy.PluginValidationError) -> str:
        for hook, function in _implementations(attachment).items():
            known = getattr(self._pluggy.hook, hook).spec.argnames
            for argument in inspect.signature(function).parameters:
                if argument not in known:
                    near = difflib.get_close_matches(argument, known, 1, 0.5)
                    hint = f" Did you mean '{near[0]}'?" if near else ""
                    return (
                        f"{origin_of(attachment, hook)} asks for the argument '{argument}', but the hook has "
                        f"({', '.join(known)}).{hint} Use only these names."
                    )
        return f"{attachment.kind} '{attachment.name}' cannot be attached: {error}"


def _in_range(
    function: Callable[..., Any], ranges: Callable[[str], AbstractContextManager[Any]], name: str
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with ranges(name):
            return function(*args)

    return call


def _implementations(attachment: Attachment) -> dict[str, Callable[..., Any]]:
    """Return the implementations of a plug-in by hook name. Raises HookError for a method that looks like a misspelt hook."""
    obj = attachment.obj
    found: dict[str, Callable[..., Any]] = {}
    for name in dir(type(obj)) + list(getattr(obj, "__dict__", ())):
        if name.startswith("_"):
            continue
        if name not in _HOOKS:
            _check_misspelt(attachment, name)
        elif callable(function := getattr(obj, name)):
            found[name] = function
    if not found and attachment.kind in ("callbacks", "loggers"):
        _check_called(attachment)
    if isinstance(obj, Algorithm):
        for name in found:
            if name not in _ACTIONS:
                raise HookError(
                    f"Algorithm '{attachment.name}' defines {name}(), but algorithms act on events in apply(event, state). Add "
                    f"Event.{name.upper()} to its `events`, or make it a hocket.Callback."
                    if name in _EVENTS
                    else f"Algorithm '{attachment.name}' defines {name}(), a hook that algorithms do not implement. They may "
                    f"implement actions: {', '.join(sorted(_ACTIONS))}."
                )
        _check_declarations(attachment)
        if not obj.events and type(obj).apply is not Algorithm.apply:
            raise HookError(
                f"Algorithm '{attachment.name}' defines apply(), which would never be called: it declares no events. Write "
                "events = {hocket.Event.AFTER_LOSS} in the class, with the events to act on."
            )
        for event in sorted(obj.events, key=lambda event: event.value):
            found[event.value] = _listener(obj, event)
    return found


def _check_declarations(attachment: Attachment) -> None:
    """Raise HookError for an algorithm whose `events`, `phase` or names of other algorithms are of another form."""
    obj, who = attachment.obj, f"Algorithm '{attachment.name}' ({type(attachment.obj).__name__})"
    given = obj.events if isinstance(obj.events, Collection) and not isinstance(obj.events, str) else [obj.events]
    if given is not obj.events or not all(isinstance(event, Event) for event in given):
        meant = [str(getattr(event, "value", event)).rpartition(".")[2].lower() for event in given]
        near = [difflib.get_close_matches(names.hook(name) or name, _NAMES, 1) for name in meant]
        write = ", ".join(f"hocket.Event.{name[0].upper()}" for name in near if name) or "hocket.Event.AFTER_LOSS"
        raise HookError(
            f"{who} has events = {obj.events!r}; it should be a set of members of hocket.Event. Write events = {{{write}}}. "
            f"The members are {', '.join(Event.__members__)}."
        )
    for name, kind in (("phase", Phase), ("needs", Need)):
        if not isinstance(given := getattr(obj, name), kind | int):
            there = list(kind.__members__)
            like = difflib.get_close_matches(str(given).upper(), there, 1) or there
            raise HookError(
                f"{who} has {name} = {given!r}; it should be a member of hocket.{kind.__name__}. Write {name} = "
                f"hocket.{kind.__name__}.{like[0]}. The members are {', '.join(there)}."
            )
    for name in ("before", "after", "conflicts"):
        given = getattr(obj, name)
        if isinstance(given, str) or not isinstance(given, Collection) or not all(isinstance(n, str) for n in given):
            raise HookError(
                f"{who} has {name} = {given!r}; it should be a set of names of algorithms. Write {name} = "
                f"{{{given if isinstance(given, str) else 'label-smoothing'!r}}}."
            )


def _listener(algorithm: Algorithm, event: Event) -> Callable[[Any], None]:
    """Return the listener of an algorithm for one of its events, as a plain function of the state."""
    apply, match = algorithm.apply, algorithm.match
    if type(algorithm).match is Algorithm.match:
        return lambda state: apply(event, state)

    def listener(state: Any) -> None:
        if match(event, state):
            apply(event, state)

    return listener


def _check_called(attachment: Attachment) -> None:
    """Raise HookError for a callback or logger without any hook, whose methods would never be called."""
    kind = type(attachment.obj)
    own = [name for name, each in vars(kind).items() if name[0] != "_" and inspect.isfunction(each)]
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
    theirs = names.hook(name)
    near = [theirs] if theirs in _HOOKS else difflib.get_close_matches(name, _HOOKS, 1, 0.8)
    looks_like_one = name.startswith(("on_", "before_", "after_")) or name.endswith(("_start", "_end"))
    if near or looks_like_one or hasattr(function, "hocket_impl"):
        hint = f"Did you mean '{near[0]}'?" if near else "`hocket plugins hooks` prints them all."
        raise HookError(
            f"{attachment.kind} '{attachment.name}' ({type(attachment.obj).__name__}) defines {name}(), which is not a hook. "
            f"{hint} If it is a helper, name it _{name}."
        )

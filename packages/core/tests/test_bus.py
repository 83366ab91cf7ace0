"""The bus calls what pluggy would call, with what pluggy would give; order, errors and costs are its own."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch
from hypothesis import given, strategies as st

from hocket import Algorithm, Callback, Event, Phase, hookimpl
from hocket.hookspecs import SPECS
from hocket.hookspecs.attachment import Attachment
from hocket.plugins import ConflictError, HookError, OrderError
from hocket.plugins.bus import Bus


def bus_of(*plugins: Any, kind: str = "callbacks", **options: Any) -> Bus:
    return Bus([Attachment(kind, f"p{index}", plugin) for index, plugin in enumerate(plugins)], **options)


def pluggy_of(*plugins: Any) -> pluggy.PluginManager:
    manager = pluggy.PluginManager("hocket")
    for spec in SPECS:
        manager.add_hookspecs(spec)
    for plugin in plugins:
        manager.register(plugin)
    return manager


def outcome(call: Any) -> tuple[str, Any]:
    try:
        return "returned", call()
    except Exception as error:
        return "raised", (type(error), str(error))


#: What a plain implementation of an action does, and what a wrapper does around it.
PLAIN = {
    "answers": lambda value: value,
    "passes": lambda value: None,
    "raises": lambda value: (_ for _ in ()).throw(KeyError(f"plain {value}")),
}
WRAPPERS = ("nothing", "replaces", "swallows", "raises before", "raises after", "translates")


def plain(what: str, value: int) -> Any:
    class Plain:
        @hookimpl
        def zero_grad(self, state: Any) -> Any:
            return PLAIN[what](value)

    return Plain()


def wrapper(what: str, value: int) -> Any:
    class Wrapper:
        @hookimpl(wrapper=True)
        def zero_grad(self, state: Any) -> Any:
            if what == "raises before":
                raise RuntimeError(f"before {value}")
            try:
                result = yield
            except Exception as error:
                if what == "swallows":
                    return value
                if what == "translates":
                    raise ValueError(f"translated {value}") from error
                raise
            if what == "raises after":
                raise RuntimeError(f"after {value}")
            return value if what == "replaces" else result

    return Wrapper()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just(plain), st.sampled_from(sorted(PLAIN))),
            st.tuples(st.just(wrapper), st.sampled_from(WRAPPERS)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_an_action_means_what_it_means_to_pluggy(parts: list[Any]) -> None:
    """First answers, wrappers that replace, swallow, translate and raise, in every combination."""
    plugins = [make(what, number) for number, (make, what) in enumerate(parts)]
    ours = outcome(lambda: bus_of(*plugins).zero_grad(None))
    if all(make is wrapper for make, _ in parts):
        return  # an action that nobody takes is an error here, and None there
    # The first plug-in is outermost and answers first; with pluggy it is the one that was registered last.
    assert ours == outcome(lambda: pluggy_of(*reversed(plugins)).hook.zero_grad(state=None))


def test_of_several_answers_the_outermost_counts() -> None:
    """Callbacks answer before algorithms, those before the strategy, the default actions last."""

    class Answers:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def zero_grad(self, state: Any) -> Any:
            return self.answer

    kinds = ("loggers", "callbacks", "precisions", "strategies", "actions")
    for start in range(len(kinds)):
        attachments = [
            Attachment(kind, kind, Answers(kind if index >= start else None)) for index, kind in enumerate(kinds)
        ]
        assert Bus(reversed(attachments)).zero_grad(None) == kinds[start]


def test_a_wrapper_that_does_not_yield_or_yields_twice() -> None:
    class Never(Callback):
        @hookimpl(wrapper=True)
        def zero_grad(self, state: Any) -> Any:
            if state is not None:
                yield
            return True

    class Twice(Callback):
        @hookimpl(wrapper=True)
        def zero_grad(self, state: Any) -> Any:
            yield
            yield

    with pytest.raises(HookError, match="did not yield"):
        bus_of(Never(), plain("answers", 1)).zero_grad(None)
    with pytest.raises(HookError, match="yielded twice"):
        bus_of(Twice(), plain("answers", 1)).zero_grad(None)


def test_arguments_are_asked_for_by_name() -> None:
    seen: list[Any] = []

    class None_(Callback):
        def loss(self) -> None:
            seen.append(())

    class Last(Callback):
        def loss(self, batch: Any) -> None:
            seen.append((batch,))

    class Swapped(Callback):
        def loss(self, batch: Any, state: Any) -> None:
            seen.append((batch, state))

    class Answer:
        def loss(self, state: Any, outputs: Any, batch: Any) -> int:
            seen.append((state, outputs, batch))
            return 1

    bus = Bus(
        [Attachment("callbacks", n.__name__, n()) for n in (None_, Last, Swapped)]
        + [Attachment("actions", "answer", Answer())]
    )
    assert bus.loss("s", "o", "b") == 1
    assert sorted(seen, key=len) == [(), ("b",), ("b", "s"), ("s", "o", "b")]


def test_two_buses_share_nothing_and_recompile() -> None:
    heard: list[str] = []

    class Listen(Callback):
        def __init__(self, name: str) -> None:
            self._name = name

        def batch_end(self, state: Any) -> None:
            heard.append(self._name)

    first, second = bus_of(Listen("a")), bus_of()
    second.batch_end(None)
    assert heard == []
    attachment = Attachment("callbacks", "late", Listen("b"))
    first.attach(attachment)
    first.batch_end(None)
    first.detach(attachment)
    first.batch_end(None)
    assert heard == ["a", "b", "a"]
    with pytest.raises(HookError, match="already attached"):
        first.attach(Attachment("callbacks", "p0", Listen("c")))

    class Wrong(Callback):
        def batch_end(self, stat: Any) -> None: ...

    with pytest.raises(HookError, match="Did you mean 'state'"):
        first.attach(Attachment("callbacks", "late", Wrong()))
    first.attach(attachment)  # the name is free


def test_a_logger_can_be_detached() -> None:
    class Counts(Callback):
        flushed = 0

        def flush(self, state: Any) -> None:
            self.flushed += 1

    attachment, other = Attachment("loggers", "one", Counts()), Attachment("loggers", "other", Counts())
    bus = Bus([attachment, other])
    bus.detach(attachment)
    bus.flush(None)
    bus.close(None)
    assert (attachment.obj.flushed, other.obj.flushed) == (0, 1)


def test_an_exception_says_whose_it_is() -> None:
    class Fails(Callback):
        def batch_end(self, state: Any) -> None:
            raise KeyError("x")

    bus = Bus([Attachment("callbacks", "mine", Fails(), "acme", "1.2")])
    with pytest.raises(KeyError) as raised:
        bus.batch_end(None)
    assert raised.value.__notes__ == ["Raised by callback 'mine' of acme 1.2 in batch_end."]


def test_on_exception_and_close_everyone_runs() -> None:
    heard: list[int] = []

    class Fails(Callback):
        def __init__(self, number: int) -> None:
            self._number = number

        def close(self, state: Any) -> None:
            heard.append(self._number)
            raise OSError(f"number {self._number}")

    class State:
        exception = None

    with pytest.raises(OSError, match="number 0") as raised:
        bus_of(Fails(0), Fails(1), Fails(2)).close(State())
    assert heard == [0, 1, 2]
    assert [note for note in raised.value.__notes__ if "number 1" in note and "'p1'" in note]


@given(every=st.integers(0, 7), other=st.integers(0, 7), alone=st.booleans(), begun=st.booleans())
def test_a_plugin_is_called_in_each_nth_batch(every: int, other: int, alone: bool, begun: bool) -> None:
    called: list[tuple[str, int, int]] = []

    class Rare(Callback):
        def __init__(self, n: int) -> None:
            self.every_batches, self.n = {"before_forward": n, "batch_end": n}, n

        def before_forward(self, state: Any) -> None:
            called.append(("before_forward", self.n, state.timestamp.batch))

        def batch_end(self, state: Any) -> None:
            called.append(("batch_end", self.n, state.timestamp.batch))

        def epoch_end(self, state: Any) -> None:
            called.append(("epoch_end", self.n, state.timestamp.batch))

    bus = bus_of(Rare(every)) if alone else bus_of(Rare(every), Rare(other))
    expected = []
    for batch in range(20):
        if begun and bus.interval:
            bus.begin_batch(batch + 1)
        bus.before_forward(SimpleNamespace(timestamp=SimpleNamespace(batch=batch)))
        bus.batch_end(SimpleNamespace(timestamp=SimpleNamespace(batch=batch + 1)))  # which is counted by then
        bus.epoch_end(SimpleNamespace(timestamp=SimpleNamespace(batch=batch + 1)))
        numbers = [every] if alone else [every, other]
        due = [n for n in numbers if n and (batch + 1) % n == 0]
        expected += [("before_forward", n, batch) for n in due]
        expected += [("batch_end", n, batch + 1) for n in due]
        expected += [("epoch_end", n, batch + 1) for n in numbers]
    assert sorted(called) == sorted(expected)


@pytest.mark.parametrize("every", [{"batch_end": -1}, {"batch_end": 1.5}, {"epoch_end": 2}])
def test_other_numbers_and_events_are_refused(every: dict[str, Any]) -> None:
    class Rare(Callback):
        every_batches = every

        def batch_end(self) -> None: ...

        def epoch_end(self) -> None: ...

    with pytest.raises(
        HookError, match=r"has every_batches=.* Give events from after_dataloader to batch_end the number"
    ):
        bus_of(Rare())


def test_costs_are_counted() -> None:
    class Work(Callback):
        def batch_end(self, state: Any) -> None: ...

        @hookimpl(wrapper=True)
        def zero_grad(self, state: Any) -> Any:
            return (yield)

    bus = bus_of(Work(), plain("answers", 1), profile=True)
    for _ in range(3):
        bus.batch_end(None)
        bus.zero_grad(None)
    assert bus.account["p0", "batch_end"][0] == bus.account["p0", "zero_grad"][0] == 3
    assert bus.account["p0", "batch_end"][1] > 0


def test_time_counts_where_it_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the plug-ins set forward themselves, own time and time inside add up to all there is."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    class Outer(Callback):
        @hookimpl(wrapper=True)
        def optimizer_step(self, state: Any, closure: Any) -> Any:
            work(1)
            result = yield
            work(2)
            closure()
            bus.batch_end(state)
            return result

    class Inner(Callback):
        def optimizer_step(self, state: Any, closure: Any) -> Any:
            work(4)
            return True

        def batch_end(self, state: Any) -> None:
            work(8)

        def before_forward(self, state: Any) -> None:
            work(16)

    def closure() -> None:
        work(32)  # the user's model
        bus.before_forward(None)

    bus = bus_of(Outer(), Inner(), profile=True)
    bus.optimizer_step(None, closure)
    assert bus.account == {
        ("p0", "optimizer_step"): [1, 3.0, 4.0 + 8 + 16 + 32],
        ("p1", "optimizer_step"): [1, 4.0, 0.0],
        ("p1", "batch_end"): [1, 8.0, 0.0],
        ("p1", "before_forward"): [1, 16.0, 0.0],
    }
    assert sum(own for _, own, _ in bus.account.values()) == now[0] - 32


# --- order


def algorithm(name: str, events: Any = (Event.BATCH_END,), **attributes: Any) -> Attachment:
    ran = attributes.pop("ran", None)

    def apply(self: Any, event: Event, state: Any) -> None:
        if ran is not None:
            ran.append(name)

    return Attachment("algorithms", name, type("A", (Algorithm,), {"events": events, "apply": apply, **attributes})())


def names(bus: Bus, hook: str) -> list[str]:
    return [attachment.name for attachment in bus.listeners(hook)]


def test_phase_then_constraints_then_the_users_order() -> None:
    attachments = [
        algorithm("weights", phase=Phase.WEIGHTS),
        algorithm("b"),
        algorithm("a"),
        algorithm("first", before=("b", "absent")),
        algorithm("data", phase=Phase.DATA, after=("a",)),
    ]
    found = names(Bus(attachments), "batch_end")
    assert found in (["a", "data", "first", "b", "weights"], ["first", "b", "a", "data", "weights"])


def test_kinds_run_in_order() -> None:
    class Listen(Callback):
        def batch_end(self, state: Any) -> None: ...

    attachments = [Attachment("loggers", "l", Listen()), Attachment("callbacks", "c", Listen()), algorithm("a")]
    assert names(Bus(attachments), "batch_end") == ["a", "c", "l"]


def test_what_is_opened_last_is_closed_first() -> None:
    pair = (Event.BEFORE_LOSS, Event.AFTER_LOSS)
    attachments = [
        algorithm("a", pair), algorithm("b", pair), algorithm("late", pair, phase=Phase.WEIGHTS),
        algorithm("only-after", (Event.AFTER_LOSS,)),
    ]  # fmt: skip
    bus = Bus(attachments)
    assert names(bus, "before_loss") == ["a", "b", "late"]
    assert names(bus, "after_loss") == ["only-after", "late", "b", "a"]


def test_what_a_constraint_opens_last_is_closed_first() -> None:
    pair = (Event.BEFORE_LOSS, Event.AFTER_LOSS)
    bus = Bus([algorithm("a", pair), algorithm("b", pair, before=("a",)), algorithm("c", pair)])
    assert names(bus, "before_loss") == ["b", "a", "c"]
    assert names(bus, "after_loss") == ["c", "a", "b"]


@given(st.permutations(range(5)), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6))
def test_constraints_hold_or_are_refused(order: list[int], pairs: list[tuple[int, int]]) -> None:
    """Whatever the user's order: every ``before`` is kept, or there is a cycle that is named."""
    before = {a: {f"a{b}" for x, b in pairs if x == a and b != a} for a in range(5)}
    attachments = [algorithm(f"a{i}", before=tuple(sorted(before[i]))) for i in order]
    try:
        got = names(Bus(attachments), "batch_end")
    except OrderError as error:
        cycle = str(error).split("'")[1::2]
        assert cycle[0] == cycle[-1] and all(b in before[int(a[1:])] for a, b in itertools.pairwise(cycle))
        return
    assert sorted(got) == [f"a{i}" for i in range(5)]
    assert all(got.index(f"a{a}") < got.index(b) for a in range(5) for b in before[a])


def test_a_conflict_is_refused_whoever_declares_it() -> None:
    for attachments in (
        [algorithm("a", conflicts=("b",)), algorithm("b")],
        [algorithm("b"), algorithm("a", conflicts=("b",))],
    ):
        with pytest.raises(ConflictError, match="'a' and 'b'"):
            Bus(attachments)
    Bus([algorithm("a", conflicts=("absent",))])


def test_match_guards_apply() -> None:
    ran: list[str] = []
    attachment = algorithm("a", ran=ran, match=lambda self, event, state: state)
    bus = Bus([attachment])
    bus.batch_end(False)
    bus.batch_end(True)
    assert ran == ["a"]


def test_tryfirst_and_trylast() -> None:
    heard: list[str] = []

    def listener(name: str, **options: bool) -> Attachment:
        class Listens(Callback):
            @hookimpl(**options)
            def batch_end(self, state: Any) -> None:
                heard.append(name)

        return Attachment("callbacks", name, Listens())

    Bus([listener("last", trylast=True), listener("a"), listener("b"), listener("first", tryfirst=True)]).batch_end(
        None
    )
    assert heard == ["first", "a", "b", "last"]


def test_after_an_event_the_users_order_is_reversed() -> None:
    class Listens(Algorithm):
        events = {Event.AFTER_LOSS, Event.BATCH_END}

        def apply(self, event: Event, state: Any) -> None: ...

    bus = Bus([Attachment("algorithms", name, Listens()) for name in "abc"])
    assert [attachment.name for attachment in bus.listeners("after_loss")] == ["c", "b", "a"]
    assert [attachment.name for attachment in bus.listeners("batch_end")] == ["a", "b", "c"]


def test_an_attribute_with_the_name_of_a_hook_is_named():
    class Measure:
        def __init__(self):
            self.loss = torch.nn.MSELoss()

        def batch_end(self, state): ...

    with pytest.raises(
        HookError, match=r"Callback 'p0' has an attribute loss, of class MSELoss.* such as self\.own_loss"
    ):
        bus_of(Measure())

"""Schedules against closed forms, against torch.optim.lr_scheduler step by step, and across units."""

import math
import pickle

import pytest
import torch
from hypothesis import given, strategies as st
from torch.optim import lr_scheduler

from hocket.basics.time import Time, TimeError, Unit
from hocket.basics.timestamp import Timestamp
from hocket.schedules import (
    WSD,
    Clock,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    Linear,
    MultiStep,
    Polynomial,
    Schedule,
    Step,
)

EPOCH_LENGTH, EPOCHS, SAMPLES, TOKENS = 5, 8, 4, 100
BATCHES = EPOCH_LENGTH * EPOCHS


def clocks(duration, *, epoch_length=EPOCH_LENGTH, batches=BATCHES):
    """The clock before each step, and after the last one."""
    clock = Clock(Timestamp(), Time.parse(duration), epoch_length)
    for batch in range(1, batches + 1):
        yield clock
        clock.timestamp.next_batch(SAMPLES, TOKENS, 0.5)
        if batch % EPOCH_LENGTH == 0:
            clock.timestamp.next_epoch()
    yield clock


def factors(schedule, duration=f"{BATCHES}ba", **kwargs):
    return [schedule(clock) for clock in clocks(duration, **kwargs)]


def torch_factors(make, batches=BATCHES):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    values = []
    for _ in range(batches + 1):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize(
    ("schedule", "reference"),
    [
        (Step("7ba", gamma=0.5), lambda o: lr_scheduler.StepLR(o, 7, 0.5)),
        (MultiStep(["3ba", "20ba", "21ba"]), lambda o: lr_scheduler.MultiStepLR(o, [3, 20, 21])),
        (Exponential(0.9, decay_period="1ba"), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        (Cosine(t_max="40ba", alpha_f=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 40, eta_min=0.1)),
        (Cosine(), lambda o: lr_scheduler.CosineAnnealingLR(o, BATCHES)),
        (
            Linear(alpha_i=0.3, alpha_f=0.7, t_max="11ba"),
            lambda o: lr_scheduler.LinearLR(o, start_factor=0.3, end_factor=0.7, total_iters=11),
        ),
        (Polynomial(2.0, t_max="33ba"), lambda o: lr_scheduler.PolynomialLR(o, total_iters=33, power=2.0)),
        (CosineRestarts("7ba"), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7)),
        (
            CosineRestarts("3ba", t_mult=2, alpha_f=0.05),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, T_mult=2, eta_min=0.05),
        ),
        (CosineRestarts("1ba", t_mult=3), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 1, T_mult=3)),
        (Constant(0.25), lambda o: lr_scheduler.ConstantLR(o, factor=0.25, total_iters=10**9)),
    ],
    ids=lambda value: repr(value) if not callable(value) or hasattr(value, "warmup") else "torch",
)
def test_like_torch(schedule, reference):
    assert factors(schedule) == pytest.approx(torch_factors(reference), abs=1e-12)


WARMUP = 6


@pytest.mark.parametrize(
    ("schedule", "closed_form"),
    [
        (Constant(0.4, warmup="6ba"), lambda t: 0.4),
        (Step("4ba", gamma=0.3, warmup="6ba"), lambda t: 0.3 ** ((t - 6) // 4)),
        (MultiStep(["10ba", "30ba"], warmup="6ba"), lambda t: 0.1 ** ((t >= 10) + (t >= 30))),
        (MultiStep(["3ba", "30ba"], warmup="6ba"), lambda t: 0.1 ** (1 + (t >= 30))),
        (Exponential(0.7, decay_period="5ba", warmup="6ba"), lambda t: 0.7 ** ((t - 6) / 5)),
        (
            Linear(alpha_i=0.8, alpha_f=0.2, t_max="26ba", warmup="6ba"),
            lambda t: 0.8 - 0.6 * min(t - 6, 20) / 20,
        ),
        (Cosine(alpha_f=0.1, warmup="6ba"), lambda t: 0.1 + 0.45 * (1 + math.cos(math.pi * (t - 6) / 34))),
        (Polynomial(3, t_max="36ba", alpha_f=0.5, warmup="6ba"), lambda t: 0.5 + 0.5 * max(0, 1 - (t - 6) / 30) ** 3),
        (
            CosineRestarts("5ba", warmup="6ba"),
            lambda t: (1 + math.cos(math.pi * ((t - 6) % 5) / 5)) / 2,
        ),
        (WSD("8ba", shape="linear", warmup="6ba"), lambda t: min(1.0, (40 - t) / 8)),
        (WSD("8ba", alpha_f=0.1, warmup="6ba"), lambda t: 1 - 0.9 * math.sqrt(max(0, t - 32) / 8)),
        (
            WSD("8ba", shape="cosine", t_max="30ba", warmup="6ba"),
            lambda t: (1 + math.cos(math.pi * min(max(0, (t - 22) / 8), 1))) / 2,
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, Schedule) else "closed",
)
def test_with_warmup(schedule, closed_form):
    """A straight line from 0 to what follows, which it meets; then the closed form."""
    expected = [t / WARMUP * closed_form(WARMUP) if t < WARMUP else closed_form(t) for t in range(BATCHES + 1)]
    assert factors(schedule) == pytest.approx(expected, abs=1e-12)


EQUAL_DURATIONS = [
    f"{BATCHES}ba",
    f"{EPOCHS}ep",
    f"{BATCHES * SAMPLES}sp",
    f"{BATCHES * TOKENS}tok",
    f"{BATCHES // 2}s",
]


@pytest.mark.parametrize("duration", EQUAL_DURATIONS)
@pytest.mark.parametrize(
    ("shares", "in_batches"),
    [
        (Cosine(warmup="0.1dur"), Cosine(warmup="4ba")),
        (Linear(t_max="0.7dur", warmup="0.05dur"), Linear(t_max="28ba", warmup="2ba")),
        (MultiStep(["0.3dur", "0.7dur"]), MultiStep(["12ba", "28ba"])),
        (Step("0.1dur"), Step("4ba")),
        (CosineRestarts("0.1dur", t_mult=2.0), CosineRestarts("4ba", t_mult=2.0)),
        (WSD("0.25dur"), WSD("10ba")),
        (Exponential(0.5, decay_period="0.2dur"), Exponential(0.5, decay_period="8ba")),
    ],
    ids=repr,
)
def test_every_unit_of_the_duration_advances_every_batch(duration, shares, in_batches):
    """Shares of an epoch-based duration are not rounded to epochs, and all units agree with batches."""
    assert factors(shares, duration) == pytest.approx(factors(in_batches), abs=1e-12)


@pytest.mark.parametrize("duration", [f"{BATCHES}ba", f"{EPOCHS}ep"])
@pytest.mark.parametrize(
    ("mixed", "in_batches"),
    [
        (Cosine(warmup="3ba"), Cosine(warmup="3ba", t_max="40ba")),
        (Cosine(warmup="1ep", t_max="35ba"), Cosine(warmup="5ba", t_max="35ba")),
        (MultiStep(["2ep", "13ba", "0.5dur"]), MultiStep(["10ba", "13ba", "20ba"])),
        (Step("2ep"), Step("10ba")),
    ],
    ids=repr,
)
def test_epochs_and_batches_mix(duration, mixed, in_batches):
    assert factors(mixed, duration) == pytest.approx(factors(in_batches, f"{BATCHES}ba"), abs=1e-12)


@given(st.integers(1, 1000), st.integers(1, 99), st.sampled_from(["ba", "ep"]))
def test_a_milestone_at_a_share_falls_on_its_very_batch(length, percent, unit):
    """0.07dur of 100 batches is batch 7, though 0.07 * 100 > 7 in floating point."""
    clock = Clock(Timestamp(), Time.parse(f"100{unit}"), length)
    total = 100 if unit == "ba" else 100 * length
    due = -(-percent * total // 100)
    schedule = MultiStep([f"{percent / 100}dur"], gamma=0.5)
    for batch, expected in ((due - 1, 1.0), (due, 0.5)):
        clock.timestamp.batch = batch
        clock.timestamp.epoch, clock.timestamp.batch_in_epoch = divmod(batch, length)
        assert schedule(clock) == expected


def test_after_the_end_the_factor_stays():
    """A constant does not jump to 1, and a finished decay does not start again."""
    for schedule, last in [
        (Constant(0.3), 0.3),
        (Linear(alpha_f=0.2, t_max="10ba"), 0.2),
        (Cosine(alpha_f=0.1, t_max="10ba"), 0.1),
        (Polynomial(alpha_f=0.4, t_max="10ba"), 0.4),
        (WSD("5ba", alpha_f=0.05, t_max="10ba"), 0.05),
    ]:
        assert factors(schedule)[10:] == pytest.approx([last] * (BATCHES - 9))


def test_a_prolonged_run_is_seen():
    schedule = Linear()
    clock = Clock(Timestamp(batch=5), Time(10, Unit.BATCH))
    assert schedule(clock) == 0.5
    clock.max_duration = Time(20, Unit.BATCH)
    assert schedule(clock) == 0.75


def test_the_length_of_an_epoch_may_become_known_later():
    schedule, clock = Linear(t_max="10ba"), Clock(Timestamp(batch=5), Time(2, Unit.EPOCH))
    assert schedule(clock) == 0.5  # no epochs in it
    with pytest.raises(TimeError, match="The number of batches per epoch is unknown"):
        Linear()(clock)
    clock.epoch_length = 10
    clock.timestamp.batch_in_epoch = 5
    assert Linear()(clock) == 0.75
    assert Constant()(Clock(Timestamp(), Time(2, Unit.EPOCH))) == 1.0


def test_progress():
    clock = Clock(Timestamp(epoch=1, batch=7, sample=28, token=700, batch_in_epoch=2, seconds=3.5), Time(4, "ep"), 5)
    expected = {"2ep": 0.7, "14ba": 0.5, "14sp": 2.0, "1400tok": 0.5, "7s": 0.5, "1dur": 7 / 20, "0.7dur": 0.5}
    assert {time: clock.progress(time) for time in expected} == pytest.approx(expected)
    with pytest.raises(TimeError, match="its length is zero"):
        clock.progress("0ba")


def test_units_that_do_not_convert_are_refused():
    clock = Clock(Timestamp(), Time.parse("1e9tok"), 100)
    with pytest.raises(TimeError, match="cannot be compared in a run of 1000000000tok"):
        Cosine(warmup="100ba")(clock)
    with pytest.raises(TimeError, match="cannot be expressed in tok"):
        clock.convert(Time.parse("1ep"), Unit.TOKEN)
    assert Cosine(warmup="1e8tok")(clock) == 0.0
    assert Cosine(warmup="0ba")(clock) == 1.0  # nothing is nothing in any unit


@pytest.mark.parametrize(
    "make",
    [
        lambda: Step("0ba"),
        lambda: Step("5"),
        lambda: Step("5ba", gamma=-1),
        lambda: MultiStep("5ba"),
        lambda: Exponential(math.nan),
        lambda: Constant(math.inf),
        lambda: Constant(True),
        lambda: Cosine(t_max="0dur"),
        lambda: Cosine(warmup="-1ba"),
        lambda: CosineRestarts("1ba", t_mult=0.5),
        lambda: WSD(shape="exponential"),
        lambda: Linear(t_max="5ba", warmup="5ba")(Clock(Timestamp(), Time(10, Unit.BATCH))),
        lambda: WSD("6ba", warmup="5ba")(Clock(Timestamp(), Time(10, Unit.BATCH))),
    ],
)
def test_impossible_arguments_are_refused(make):
    with pytest.raises(ValueError) as caught:
        make()
    assert "\n\n" not in str(caught.value)


def test_a_wsd_may_consist_of_warmup_and_decay():
    values = factors(WSD("0.9dur", shape="linear", warmup="0.1dur"))
    assert values == pytest.approx([t / 4 if t < 4 else (40 - t) / 36 for t in range(41)])


def test_schedules_can_be_printed_and_pickled():
    schedule = MultiStep(["30ep", "0.9dur"], gamma=0.2, warmup="5ep")
    assert repr(schedule) == "MultiStep(milestones=['30ep', '0.9dur'], gamma=0.2, warmup='5ep')"
    assert factors(pickle.loads(pickle.dumps(schedule)), "40ep") == factors(schedule, "40ep")

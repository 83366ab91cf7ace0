"""Time, Timestamp and Interval: the grammar, exactness, and what is refused."""

import copy
import pickle
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, strategies as st

from hocket.basics.time import Interval, Time, TimeError, Unit, whole
from hocket.basics.timestamp import Timestamp

COUNTED = [Unit.EPOCH, Unit.BATCH, Unit.SAMPLE, Unit.TOKEN]
CONTINUOUS = [Unit.DURATION, Unit.SECOND]

counts = st.integers(min_value=0, max_value=10**30)
shares = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
times = st.one_of(
    st.builds(Time, counts, st.sampled_from(COUNTED)), st.builds(Time, shares, st.sampled_from(CONTINUOUS))
)

# --- Time


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("10ep", 10, Unit.EPOCH),
        ("1000ba", 1000, Unit.BATCH),
        ("5e6sp", 5_000_000, Unit.SAMPLE),
        ("2e9tok", 2_000_000_000, Unit.TOKEN),
        ("4_000tok", 4000, Unit.TOKEN),
        ("2.5e1ba", 25, Unit.BATCH),
        ("2.0ep", 2, Unit.EPOCH),
        ("9007199254740993tok", 2**53 + 1, Unit.TOKEN),  # the first integer that is not a float
        ("0.1dur", 0.1, Unit.DURATION),
        ("1DUR", 1.0, Unit.DURATION),
        ("90min", 5400.0, Unit.SECOND),
        ("90m", 5400.0, Unit.SECOND),
        ("1h30m", 5400.0, Unit.SECOND),
        ("1H30M15S", 5415.0, Unit.SECOND),
        ("25h", 90_000.0, Unit.SECOND),
        ("45s", 45.0, Unit.SECOND),
        ("10sec", 10.0, Unit.SECOND),
        ("2d", 172_800.0, Unit.SECOND),
        ("1.5h", 5400.0, Unit.SECOND),
        ("1d 2h", 93_600.0, Unit.SECOND),
        ("  1 EP\n", 1, Unit.EPOCH),
    ],
)
def test_parse(text, value, unit):
    time = Time.parse(text)
    assert (time.value, time.unit) == (value, unit)
    assert type(time.value) is (float if unit in CONTINUOUS else int)


@pytest.mark.parametrize("number", ["0.1", 0.25])
def test_a_fraction_without_a_unit_is_told_to_add_one_that_is_accepted(number):
    with pytest.raises(TimeError, match=rf"has no unit.*'{number}dur'.*'{number}s'"):
        Time.parse(number)
    assert Time.parse(f"{number}dur") and Time.parse(f"{number}s")


@pytest.mark.parametrize("number", ["5", "1e3", " 4_000 ", 5])
def test_a_number_without_a_unit_is_told_to_add_one(number):
    with pytest.raises(TimeError, match=rf"has no unit.*{str(number).strip()}ba"):
        Time.parse(number)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "ep", "m", "-1ep", "+1ep", "1.5ep", "0.5sp", "9007199254740992.5tok", "nandur", "infba", "inf"),
        *("1m1h", "1h1h", "1h30", "5 000tok", "_5ba", "5_ba", "5__0ba", ".5dur", "1.dur", "0x10ba", "٣ep", "10 apples"),
        *(
            "10ep5ba",
            "1e400sec",
            "1e309ba",
            "1e400ep",
            "9" * 400 + "tok",
            "1e5000tok",
            "1e999999999tok",
            "1" * 5000 + "ba",
            None,
            True,
            b"1ep",
            1j,
        ),
    ],
)
def test_parse_refuses_in_one_paragraph(text):
    with pytest.raises(TimeError) as caught:
        Time.parse(text)
    message = str(caught.value)
    assert "\n\n" not in message and len(message) < 600
    assert isinstance(caught.value, ValueError)


@given(times)
@example(Time(1e-7, Unit.DURATION))
@example(Time(1e16, Unit.SECOND))
def test_text_round_trip(time):
    assert Time.parse(str(time)) == time
    assert eval(repr(time)) == time


@given(st.text(alphabet="0123456789._e+-epbasptokdurhmin x", max_size=12))
def test_parse_gives_a_time_or_a_time_error(text):
    try:
        time = Time.parse(text)
    except TimeError:
        return
    assert Time.parse(str(time)) == time


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_clock_times_add_up(days, hours, minutes, seconds):
    expected = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert Time.parse(f"{days}d{hours}h{minutes}m{seconds}s") == Time(expected, Unit.SECOND)
    assert Time.parse(f"{hours}h{seconds}sec") == Time(hours * 3600 + seconds, Unit.SECOND)


@given(st.decimals(0, 10**6, allow_nan=False, places=3))
def test_decimals_are_read_as_python_reads_them(number):
    assert Time.parse(f"{number}dur").value == float(str(number))


@pytest.mark.parametrize(
    ("value", "unit"), [(1.5, Unit.EPOCH), (-1, Unit.BATCH), (float("nan"), Unit.DURATION), (float("inf"), Unit.SECOND)]
)
@pytest.mark.parametrize("as_text", [True, False])
def test_constructor_checks(value, unit, as_text):
    with pytest.raises(TimeError):
        Time(value, str(unit) if as_text else unit)


def test_constructor_normalises():
    assert Time(2.0, "ep") == Time(2, Unit.EPOCH)
    assert type(Time(2.0, Unit.EPOCH).value) is int
    assert type(Time(2, Unit.SECOND).value) is float
    with pytest.raises(TimeError, match="one of ep, ba, sp, tok, dur, sec"):
        Time(1, "weeks")
    with pytest.raises(TimeError, match="True"):
        Time(True, Unit.EPOCH)


@given(times, times)
def test_arithmetic_within_a_unit_only(a, b):
    if a.unit is not b.unit:
        assert a != b
        for operation in (a.__add__, a.__sub__, a.__truediv__, a.__lt__, a.__le__, a.__gt__, a.__ge__):
            with pytest.raises(TypeError) as caught:
                operation(b)
            assert str(a) in str(caught.value) and str(b) in str(caught.value)
        return
    assert (a < b, a <= b, a > b, a >= b) == (
        a.value < b.value,
        a.value <= b.value,
        a.value > b.value,
        a.value >= b.value,
    )
    if a.unit in COUNTED:
        assert (a + b).value == a.value + b.value
        assert ((a + b) - b) == a
    if b.value > 1e-3 and a.value < 1e300:
        assert a / b == a.value / b.value


def test_a_time_is_never_negative():
    with pytest.raises(TimeError, match=r"1ep - 2ep would be negative"):
        Time(1, Unit.EPOCH) - Time(2, Unit.EPOCH)


@given(counts, st.fractions(0, 100, max_denominator=64))
def test_scaling_rounds_to_the_nearest_whole(count, factor):
    assert Time(count, Unit.TOKEN) * float(factor) == Time(round(count * Fraction(float(factor))), Unit.TOKEN)
    assert float(factor) * Time(count, Unit.TOKEN) == Time(count, Unit.TOKEN) * float(factor)
    if factor:
        assert Time(count, Unit.TOKEN) / float(factor) == Time(round(count / Fraction(float(factor))), Unit.TOKEN)


def test_scaling_examples_and_errors():
    assert Time(10, Unit.BATCH) / 4 == Time(2, Unit.BATCH)
    assert Time(10, Unit.BATCH) * 0.55 == Time(6, Unit.BATCH)
    assert Time(1, Unit.DURATION) / 4 == Time(0.25, Unit.DURATION)
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(TimeError):
            Time(10, Unit.BATCH) * bad
    with pytest.raises(TypeError, match="by a number"):
        Time(10, Unit.BATCH) * Time(1, Unit.DURATION)
    with pytest.raises(TypeError, match="not a Time"):
        Time(10, Unit.BATCH) + 1
    with pytest.raises(ZeroDivisionError):
        Time(10, Unit.BATCH) / 0


def test_times_are_values():
    time = Time(3, Unit.EPOCH)
    assert len({time, Time.parse("3ep"), Time(3, Unit.BATCH)}) == 2
    assert pickle.loads(pickle.dumps(time)) == copy.deepcopy(time) == time
    assert Time.parse(time) is time
    assert time in [Time(3, Unit.BATCH), Time(3, Unit.EPOCH)]
    with pytest.raises(AttributeError):
        time.value = 4


def test_does_not_import_torch():
    code = "import sys, hocket.basics.time, hocket.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- Timestamp

batches = st.lists(
    st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.floats(0, 10), st.booleans()), min_size=1, max_size=20
)


@given(batches)
def test_timestamp_counts(steps):
    timestamp = Timestamp()
    epoch_from = 0
    for index, (samples, tokens, seconds, ends_epoch) in enumerate(steps, 1):
        timestamp.next_batch(samples, tokens, seconds)
        done, in_epoch = steps[:index], steps[epoch_from:index]
        assert timestamp.batch == index
        assert timestamp.sample == sum(step[0] for step in done)
        assert timestamp.token == sum(step[1] for step in done)
        assert timestamp.seconds == pytest.approx(sum(step[2] for step in done))
        assert timestamp.batch_in_epoch == len(in_epoch)
        assert timestamp.sample_in_epoch == sum(step[0] for step in in_epoch)
        assert timestamp.token_in_epoch == sum(step[1] for step in in_epoch)
        assert timestamp.epoch_seconds == pytest.approx(sum(step[2] for step in in_epoch))
        assert timestamp.batch_seconds == seconds
        assert timestamp.epoch == sum(step[3] for step in done[:-1])
        if ends_epoch:
            timestamp.next_epoch()
            epoch_from = index
            assert timestamp.epoch == sum(step[3] for step in done)
            assert (timestamp.batch_in_epoch, timestamp.sample_in_epoch, timestamp.token_in_epoch) == (0, 0, 0)
            assert timestamp.epoch_seconds == 0.0
            assert timestamp.batch == index
    restored = Timestamp()
    restored.load_state_dict(timestamp.state_dict())
    assert restored == timestamp == timestamp.copy()
    assert timestamp.copy() is not timestamp


def test_timestamp_does_not_overflow():
    timestamp = Timestamp(token=2**63 - 1)
    timestamp.next_batch(1, 2**40, 0.1)
    assert timestamp.token == 2**63 - 1 + 2**40


def test_timestamp_get():
    timestamp = Timestamp(epoch=1, batch=2, sample=3, token=4, seconds=5.5)
    assert [str(timestamp.get(unit)) for unit in (*COUNTED, Unit.SECOND)] == ["1ep", "2ba", "3sp", "4tok", "5.5sec"]
    assert timestamp.count(Unit.TOKEN) == 4
    with pytest.raises(TimeError, match="elapsed"):
        timestamp.get(Unit.DURATION)


@pytest.mark.parametrize(
    "change", [{"batch": None}, {"batch": 1.5}, {"batch": True}, {"batch": -1}, {"seconds": "1"}, {"batches": 1}]
)
def test_timestamp_refuses_a_foreign_state(change):
    timestamp, state = Timestamp(batch=7), Timestamp(batch=9).state_dict()
    with pytest.raises(ValueError, match="Timestamp"):
        timestamp.load_state_dict({**state, **change})
    with pytest.raises(ValueError, match=r"missing \['sample'\]"):
        timestamp.load_state_dict({name: value for name, value in state.items() if name != "sample"})
    assert timestamp == Timestamp(batch=7)


# --- Interval


def due_batches(interval, batches, *, epoch_length=None, samples=4, tokens=0, seconds=1.0, total=None):
    """After which batches the interval is due, asked as a loop asks: after each batch, and after each epoch."""
    interval, now, due = Interval(interval), Timestamp(), []
    total = total or batches
    for batch in range(1, batches + 1):
        previous = now.copy()
        now.next_batch(samples, tokens, seconds)
        if interval.due(previous, now, (batch - 1) / total, batch / total):
            due.append(batch)
        if epoch_length and batch % epoch_length == 0:
            previous = now.copy()
            now.next_epoch()
            if interval.due(previous, now, batch / total, batch / total):
                due.append(batch)
    return due


@pytest.mark.parametrize(
    ("interval", "batches", "expected"),
    [
        ("2ep", 12, [8]),  # four batches an epoch
        ("1ep", 6, [4]),
        ("1ep", 12, [4, 8, 12]),
        ("3ba", 8, [3, 6]),
        ("100ba", 8, []),
        ("0.25dur", 8, [2, 4, 6, 8]),
        ("0.5dur", 8, [4, 8]),
        ("5sp", 3, [2, 3]),  # 4, 8, 12 samples
        ("8sp", 4, [2, 4]),
        ("2s", 5, [2, 4]),
        (None, 8, []),
        (0, 8, []),
        ("0ba", 8, []),
        ("0dur", 8, []),
    ],
)
def test_interval(interval, batches, expected):
    assert due_batches(interval, batches, epoch_length=4) == expected


@given(st.integers(1, 50), st.integers(1, 300))
def test_share_intervals_are_exact(parts, per_part):
    """1/parts of the duration, as a text of any number of digits that means it, is due after every whole part."""
    total = parts * per_part
    assert due_batches(f"{1 / parts!r}dur", total) == list(range(per_part, total + 1, per_part))


@pytest.mark.parametrize("total", [10, 30, 70, 1000, 12_340])
def test_a_tenth_of_the_duration_is_due_ten_times(total):
    assert due_batches("0.1dur", total) == list(range(total // 10, total + 1, total // 10))


@given(st.integers(1, 1000), st.lists(st.integers(1, 3000), min_size=1, max_size=30))
def test_counted_intervals_match_the_multiples_crossed(every, sizes):
    interval, now = Interval(Time(every, Unit.SAMPLE)), Timestamp()
    for size in sizes:
        previous = now.copy()
        now.next_batch(size, 0, 0.0)
        crossed = any(k % every == 0 for k in range(previous.sample + 1, now.sample + 1))
        assert interval.due(previous, now) == crossed


def test_interval_in_epochs_is_due_only_right_after_one():
    before = Timestamp(batch=4, batch_in_epoch=4)
    assert Interval("1ep").due(before, Timestamp(epoch=1, batch=4))
    assert not Interval("1ep").due(before, Timestamp(epoch=1, batch=5, batch_in_epoch=1))


def test_interval_in_dur_needs_the_shares():
    with pytest.raises(TimeError, match="elapsed_before"):
        Interval("0.1dur").due(Timestamp(), Timestamp())


@pytest.mark.parametrize("bad", [1, 500, "500", "often", -1, True, False, 0.5])
def test_interval_refuses(bad):
    with pytest.raises(TimeError):
        Interval(bad)


def test_intervals_are_values():
    interval = Interval("500ba")
    assert (
        interval == Interval.parse(interval) == Interval(Time(500, Unit.BATCH)) == pickle.loads(pickle.dumps(interval))
    )
    assert copy.deepcopy(interval) == interval
    assert hash(interval) == hash(Interval("500ba"))
    assert interval != Interval("1ep")
    assert bool(interval) and not Interval(None) and not Interval("0ep")
    assert repr(interval) == "Interval('500ba')" and repr(Interval(0)) == "Interval(None)"


@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_whole_is_the_exact_floor_of_a_quotient_of_decimals(steps, tenths):
    assume(steps * 10 // tenths < 10**6)
    assert whole(steps / (tenths / 10)) == steps * 10 // tenths

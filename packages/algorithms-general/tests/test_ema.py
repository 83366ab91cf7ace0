"""EMA on its events: against the formula, and the model's tensors before, during and after an evaluation."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hocket.basics.swapped_tensors import BorrowedTensors
from hocket.basics.time import Time, Unit
from hocket.basics.timestamp import Timestamp
from hocket.hookspecs import Event
from hocket_general import EMA


class Run:
    """The events of a run in the loop's order; the test itself plays the optimizer."""

    def __init__(self, ema: EMA, model: nn.Module, batches: int = 10) -> None:
        now, borrowed = Timestamp(), BorrowedTensors()
        self.ema = ema
        self.state = SimpleNamespace(
            model=model,
            max_duration=None,
            bus=SimpleNamespace(attachments=[]),
            timestamp=now,
            previous=now.copy(),
            elapsed=lambda: min(now.batch / batches, 1.0),
            borrower=borrowed.borrower,
            borrow=lambda plugin, values: borrowed.borrow("ema", values),
            give_back=lambda plugin: borrowed.give_back("ema"),
        )
        self.fire(Event.FIT_START)
        self.fire(Event.EPOCH_START)

    def fire(self, *events: Event) -> None:
        for event in events:
            if self.ema.match(event, self.state):
                self.ema.apply(event, self.state)

    def batch(self, samples: int = 4) -> None:
        self.state.previous = self.state.timestamp.copy()
        self.state.timestamp.next_batch(samples, 0, 0.0)
        self.fire(Event.BATCH_END)

    def epoch(self) -> None:
        self.state.previous = self.state.timestamp.copy()
        self.state.timestamp.next_epoch()
        self.fire(Event.EPOCH_END, Event.EPOCH_START)


class Scalar(nn.Module):
    """One weight, so that averages can be followed by hand."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.weight.fill_(value)


def evaluated(run: Run) -> float:
    """The weight that an evaluation sees; afterwards it is checked to be the training weight again."""
    training = run.state.model.weight.item()
    run.fire(Event.EVAL_BEFORE_ALL)
    seen = run.state.model.weight.item()
    run.fire(Event.EVAL_AFTER_ALL)
    assert run.state.model.weight.item() == training
    return seen


def train(run: Run, values: list[float], samples: int = 4) -> None:
    for value in values:
        run.state.model.set(value)
        run.batch(samples)


# --- when, and how much


def test_the_default_is_a_half_life_of_a_thousand_batches():
    run = Run(EMA(), Scalar())
    train(run, [1.0])  # the first update copies
    assert evaluated(run) == 1.0
    train(run, [3.0])
    assert evaluated(run) == pytest.approx(0.99930709 * 1 + (1 - 0.99930709) * 3, abs=1e-8)


def test_smoothing_alone_is_enough():
    run = Run(EMA(smoothing=0.9), Scalar())
    train(run, [1.0, 2.0, 4.0])
    assert evaluated(run) == pytest.approx(0.9 * (0.9 * 1 + 0.1 * 2) + 0.1 * 4)
    assert EMA(half_life=None, smoothing=0.9).update_interval == Time(1, Unit.BATCH)


def test_a_longer_interval_updates_less_and_forgets_as_fast():
    run = Run(EMA(half_life="4ba", update_interval="2ba"), Scalar())
    train(run, [0.0, 1.0])
    assert evaluated(run) == 1.0
    train(run, [5.0])
    assert evaluated(run) == 1.0
    train(run, [3.0])
    kept = 2 ** -(2 / 4)
    assert evaluated(run) == pytest.approx(kept * 1 + (1 - kept) * 3)


def test_epochs_are_counted_at_their_end():
    run = Run(EMA(half_life="1ep"), Scalar())
    train(run, [1.0, 2.0])
    assert evaluated(run) == 2.0  # nothing yet: the weight itself
    run.epoch()
    train(run, [7.0, 4.0])
    assert evaluated(run) == 2.0
    run.epoch()
    assert evaluated(run) == pytest.approx(3.0)


@pytest.mark.parametrize("sizes", [[6, 6, 6], [10, 2, 6], [1, 16, 1]])
def test_a_half_life_in_samples_is_exact_for_batches_of_any_size(sizes):
    """After 18 samples at one weight, whatever the batches, 2 ** -(18 / 9) of the first is left."""
    run = Run(EMA(half_life="9sp"), Scalar())
    train(run, [1.0])
    for size in sizes:
        train(run, [0.0], samples=size)
    assert evaluated(run) == pytest.approx(0.25)


@pytest.mark.parametrize("start", ["0.3dur", "3ba", "12sp"])
def test_the_average_starts_as_a_copy_when_it_is_time(start):
    run = Run(EMA(smoothing=0.5, start=start), Scalar(), batches=10)
    train(run, [1.0, 2.0])
    assert evaluated(run) == 2.0
    train(run, [3.0])
    run.state.model.set(9.0)
    assert evaluated(run) == 3.0
    train(run, [5.0])
    assert evaluated(run) == 4.0


def test_training_is_not_affected():
    run = Run(EMA(smoothing=0.5), Scalar())
    train(run, [1.0, 2.0])
    assert run.state.model.weight.item() == 2.0


# --- evaluation and prediction


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def descend(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()


def test_parameters_and_buffers_follow_the_formula_in_a_real_training():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(EMA(smoothing=0.8), model)
    expected: dict[str, torch.Tensor] = {}
    for _ in range(5):
        descend(model, optimizer)
        run.batch()
        for name, value in model.state_dict().items():
            if name in expected and value.is_floating_point():
                expected[name] = 0.8 * expected[name] + 0.2 * value
            else:
                expected[name] = value.clone()
    training = copy.deepcopy(model.state_dict())
    run.fire(Event.PREDICT_START)
    torch.testing.assert_close(dict(model.state_dict()), expected)
    assert not torch.equal(model[0].weight, training["0.weight"])
    assert not torch.equal(model[1].running_mean, training["1.running_mean"])
    run.fire(Event.PREDICT_END)
    assert all(torch.equal(value, training[name]) for name, value in model.state_dict().items())


def test_the_models_tensors_stay_the_same_objects_with_the_same_memory():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    descend(model, optimizer)
    run = Run(EMA(smoothing=0.5), model)
    run.batch()
    before = [(id(t), t.data_ptr()) for t in [*model.parameters(), *model.buffers()]]
    run.fire(Event.EVAL_BEFORE_ALL)
    during = [(id(t), t.data_ptr()) for t in [*model.parameters(), *model.buffers()]]
    run.fire(Event.EVAL_AFTER_ALL)
    assert before == during == [(id(t), t.data_ptr()) for t in [*model.parameters(), *model.buffers()]]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize("entry", [Event.EVAL_BEFORE_ALL, Event.PREDICT_START])
@pytest.mark.parametrize("way_out", [Event.EXCEPTION, Event.CLOSE])
def test_training_weights_are_back_after_an_evaluation_that_fails(entry, way_out):
    run = Run(EMA(smoothing=0.5), Scalar())
    train(run, [1.0, 2.0])
    run.fire(entry)
    assert run.state.model.weight.item() == 1.5
    run.fire(way_out, Event.CLOSE)
    assert run.state.model.weight.item() == 2.0
    train(run, [3.0])  # and goes on from there
    assert evaluated(run) == 2.25


def test_half_precision_weights_are_averaged_in_float32_and_come_back_exactly():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    run = Run(EMA(half_life="100ba"), model)
    for value in [1.0] + [1.25] * 100:
        with torch.no_grad():
            model.weight.fill_(value)
        run.batch()
    (average,) = run.ema.state_dict()["averages"].values()
    assert average.dtype == torch.float32
    assert average.item() == pytest.approx(1.125, abs=1e-4)  # half way after a half-life
    run.fire(Event.EVAL_BEFORE_ALL)
    assert model.weight.dtype == torch.bfloat16 and model.weight.item() == 1.125
    run.fire(Event.EVAL_AFTER_ALL)
    assert model.weight.item() == 1.25


class Odd(nn.Module):
    """Tied and frozen weights, a mask, counters, and a buffer outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def change(model: Odd) -> None:
    with torch.no_grad():
        model.embedding.weight.add_(1)
        model.steps.add_(1)
        model.cache.add_(1)
        model.seen.fill_(True)


def test_what_is_averaged_and_what_follows_the_model():
    model = Odd()
    run = Run(EMA(smoothing=0.5), model)
    run.batch()
    start = model.embedding.weight.detach().clone()
    change(model)
    run.batch()
    assert set(run.ema.state_dict()["averages"]) == {"embedding.weight", "seen", "steps"}
    run.fire(Event.EVAL_BEFORE_ALL)
    torch.testing.assert_close(model.head.weight, start + 0.5)
    assert model.head.weight is model.embedding.weight
    assert (model.seen.item(), model.steps.item(), model.cache.tolist()) == (True, 1, [1, 1])
    assert model.mask.tolist() == [[0, float("-inf")], [0, 0]]
    run.fire(Event.EVAL_AFTER_ALL)
    torch.testing.assert_close(model.head.weight, start + 1)


def test_a_parameter_that_is_unfrozen_joins():
    model = Odd()
    run = Run(EMA(smoothing=0.5), model)
    run.batch()
    model.frozen.requires_grad_()
    run.epoch()
    with torch.no_grad():
        model.frozen.fill_(3.0)
    run.batch()
    assert run.ema.averaged(model)["frozen"].tolist() == [2.0, 2.0]


# --- the averaged weights


def test_averaged_is_a_state_dict_of_copies_with_every_key():
    model = Odd()
    run = Run(EMA(smoothing=0.5), model)
    run.batch()
    start = model.embedding.weight.detach().clone()
    change(model)
    run.batch()
    averaged = run.ema.averaged(model)
    assert averaged.keys() == model.state_dict().keys()
    for key in ("embedding.weight", "head.weight"):  # one tensor, two keys
        torch.testing.assert_close(averaged[key], start + 0.5)
    other = Odd()
    other.load_state_dict(averaged)
    averaged["embedding.weight"].zero_()
    torch.testing.assert_close(run.ema.averaged(model)["embedding.weight"], start + 0.5)
    torch.testing.assert_close(model.embedding.weight, start + 1)


def test_averaged_before_the_start_is_an_error():
    run = Run(EMA(smoothing=0.5, start="5ba"), Scalar())
    train(run, [1.0])
    with pytest.raises(ValueError, match=r"no average yet.*start='5ba'"):
        run.ema.averaged(run.state.model)


def test_averages_of_another_model_are_an_error():
    run = Run(EMA(smoothing=0.5), Scalar())
    train(run, [1.0])
    with pytest.raises(ValueError, match=r"has no tensors for.*: weight"):
        run.ema.averaged(network())


# --- state


def test_a_resumed_run_has_the_averages_of_an_uninterrupted_one():
    weights = torch.randn(12, generator=torch.Generator().manual_seed(0)).tolist()
    whole = Run(EMA(half_life="3sp", start="2ba"), Scalar())
    train(whole, weights, samples=2)
    for cut in (1, 2, 7):
        first = Run(EMA(half_life="3sp", start="2ba"), Scalar())
        train(first, weights[:cut], samples=2)
        state = pickle.loads(pickle.dumps(first.ema.state_dict()))
        second = Run(EMA(half_life="3sp", start="2ba"), Scalar())
        second.state.timestamp.load_state_dict(first.state.timestamp.state_dict())
        second.ema.load_state_dict(state)
        second.fire(Event.FIT_START)
        train(second, weights[cut:], samples=2)
        assert evaluated(second) == evaluated(whole)


def test_loaded_state_is_a_copy_and_unknown_keys_are_refused():
    run = Run(EMA(smoothing=0.5), Scalar())
    train(run, [1.0])
    state = run.ema.state_dict()
    other = EMA(smoothing=0.5)
    other.load_state_dict(state)
    train(run, [3.0])
    assert other.averaged(run.state.model)["weight"].item() == 1.0
    with pytest.raises(ValueError, match="'averages' and 'updated'"):
        other.load_state_dict({"weights": {}})


def test_loaded_averages_of_another_shape_are_an_error_that_names_them():
    ema = EMA(smoothing=0.5)
    ema.load_state_dict({"averages": {"weight": torch.zeros(3)}, "updated": 1})
    with pytest.raises(ValueError, match="weight"):
        Run(ema, Scalar())


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"half_life": "10ba", "smoothing": 0.9}, "half_life='10ba' and smoothing=0.9"),
        ({"smoothing": 1.0}, r"\[0, 1\)"),
        ({"smoothing": -0.1}, r"\[0, 1\)"),
        ({"half_life": "0ba"}, "positive number"),
        ({"half_life": "0.1dur"}, "batches, epochs, samples or tokens"),
        ({"half_life": "10min"}, "batches, epochs, samples or tokens"),
        ({"half_life": "10"}, "no unit"),
        ({"half_life": "10ba", "update_interval": "1ep"}, "both in one unit"),
        ({"smoothing": 0.9, "update_interval": "0ba"}, "positive number"),
        ({"start": "10min"}, "wall-clock"),
    ],
)
def test_arguments_that_make_no_average(arguments, words):
    with pytest.raises(ValueError, match=words):
        EMA(**arguments)


def test_few_converted_copies_of_weights_are_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages of 16-bit weights are float32: the same values, in several operations instead of one copy of all weights."""
    from hocket_general import ema

    values = [torch.randn(64).bfloat16() for _ in range(10)]
    whole, chunks = [each.float() + 1 for each in values], [each.float() + 1 for each in values]
    sizes: list[int] = []
    move = ema.get_ema_multi_avg_fn

    def watched(smoothing: float):
        def update(averages: list[torch.Tensor], targets: list[torch.Tensor], number: int) -> None:
            sizes.append(sum(each.nbytes for each in targets))
            move(smoothing)(averages, targets, number)

        return update

    ema.ema_update(whole, values, 0.9)
    monkeypatch.setattr(ema, "get_ema_multi_avg_fn", watched)
    monkeypatch.setattr(ema, "_CONVERTED", 3 * 64 * 4)
    ema.ema_update(chunks, values, 0.9)
    assert sizes == [3 * 64 * 4] * 3 + [64 * 4]
    assert all(map(torch.equal, whole, chunks))

"""SWA in a Trainer, against torch's AveragedModel, SWALR and update_bn in a plain loop."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from support import make_data, make_trainer, momentum, sgd
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_general import EMA, SWA
from hocket_general.functional import swa_update
from hocket_testkit import AlgorithmConformance, run_ranks

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class TestSWA(AlgorithmConformance):
    exempt = {"test_works_with_microbatches": "batch norm normalises each microbatch by itself"}

    def model(self):
        pooled = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 4))
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), pooled)

    def make(self):
        return SWA(start="0.25dur", update_interval="2ba", swa_lr=0.02, anneal="0.25dur")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def data(**options):
    return make_data(samples=64, batch_size=16, shuffle=False, **options)


def plain(epochs=4, start=2, rates=None):
    """Train; average the weights after the epochs from ``start`` on; recompute statistics with torch's update_bn."""
    model = network()
    optimizer = momentum(model.parameters())
    average = AveragedModel(model)
    number = 0
    for epoch in range(1, epochs + 1):
        for inputs, targets in data():
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            number += 1
            if rates is not None:
                optimizer.param_groups[0]["lr"] = rates[number]
        if epoch >= start:
            average.update_parameters(model)
    update_bn(data(), average)
    return model, average.module


def assert_close(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name in mine:
        if "num_batches" not in name:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-6, msg=name)


def test_weights_and_statistics_are_those_of_torch():
    swa = SWA(start="0.5dur")
    trainer = make_trainer(model=network(), train_data=data(), optimizer=momentum, duration="4ep", algorithms=[swa])
    trainer.fit()
    model, averaged = plain()
    assert_close(swa.averaged(trainer.state.model), averaged.state_dict())
    assert_close(trainer.model_state_dict(evaluated=True), averaged.state_dict())
    assert_close(trainer.model_state_dict(evaluated=False), model.state_dict())
    assert not torch.allclose(averaged[1].running_var, model[1].running_var, rtol=1e-2)  # the training's are others
    values = trainer.evaluate(data())
    averaged.eval()
    inputs, targets = (torch.cat(each) for each in zip(*data(), strict=True))
    assert values["eval/loss"] == pytest.approx(F.cross_entropy(averaged(inputs), targets).item(), rel=1e-5)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_the_learning_rate_is_the_users(strategy):
    """From 0.1 to 0.02 in 4 of 16 batches. Composer replaced swa_lr by the schedule's last rate, or by 1."""
    rates = {}
    for batch in range(1, 17):
        done = min(max(batch - 8, 0) / 4, 1.0)
        kept = (1 + math.cos(math.pi * done)) / 2 if strategy == "cos" else 1 - done
        rates[batch] = 0.1 if batch < 8 else 0.02 + 0.08 * kept
    swa = SWA(start="0.5dur", swa_lr=0.02, anneal="4ba", anneal_strategy=strategy)
    trainer = make_trainer(
        model=network(), train_data=data(), optimizer=momentum, duration="4ep", algorithms=[swa],
    )  # fmt: skip
    trainer.fit()
    assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.02
    model, averaged = plain(rates=rates)
    assert_close(trainer.model_state_dict(evaluated=False), model.state_dict())
    assert_close(swa.averaged(trainer.state.model), averaged.state_dict())


@pytest.mark.parametrize("schedule", ["cosine", lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda _: 0.9)])
def test_no_schedule_changes_the_learning_rate_after_the_start(schedule):
    rates = []

    class Rates(hocket.Callback):
        def before_forward(self, state):
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    trainer = make_trainer(
        train_data=data(), duration="4ep", algorithms=[SWA(start="8ba", swa_lr=0.03, anneal="0ba")], schedule=schedule,
        callbacks=[Rates()],
    )  # fmt: skip
    trainer.fit("3ep")
    trainer.fit("3ep")  # a longer run, for which the schedule begins anew
    assert rates[8:] == [0.03] * 16
    assert len(set(rates[:8])) == 8


def test_without_swa_lr_the_schedule_stays():
    with_it = make_trainer(train_data=data(), schedule="cosine", algorithms=[SWA(start="0.5dur")])
    without = make_trainer(train_data=data(), schedule="cosine")
    with_it.fit()
    without.fit()
    for mine, theirs in zip(with_it.state.model.parameters(), without.state.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def shuffled(workers=0):
    generator = torch.Generator().manual_seed(3)
    inputs, targets = next(iter(make_data(samples=64, batch_size=64, shuffle=False)))
    return DataLoader(
        TensorDataset(inputs, targets), 16, shuffle=True, generator=generator, num_workers=workers,
        persistent_workers=workers > 0,
    )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1])
def test_the_pass_for_statistics_disturbs_neither_data_nor_random_numbers(workers):
    """Evaluations in the middle of an epoch compute statistics from the training's own shuffled loader."""

    def run(*algorithms, **changes):
        trainer = make_trainer(
            model=nn.Sequential(nn.Dropout(0.2), network()), train_data=shuffled(workers), duration="3ep", seed=3,
            algorithms=algorithms, **changes,
        )  # fmt: skip
        trainer.fit()
        trainer.close()
        return trainer.model_state_dict(evaluated=False)

    plainly = run()
    averaged = run(SWA(start="0.3dur", update_interval="1ba"), eval_data=data(), eval_every="3ba")
    assert all(torch.equal(averaged[name], value) for name, value in plainly.items())


def test_statistics_are_computed_once_for_each_update():
    forwards = []

    class Counting(nn.BatchNorm1d):
        def forward(self, x):
            if not torch.is_grad_enabled() and self.training:
                forwards.append(len(x))
            return super().forward(x)

    model = network()
    model[1] = Counting(16)
    trainer = make_trainer(
        model=model, train_data=data(), duration="3ep", algorithms=[SWA(start="0.5dur", statistics_batches=3)],
        eval_data=data(), eval_every="1ba",
    )  # fmt: skip
    trainer.fit()
    trainer.evaluate()
    trainer.predict(data())
    assert forwards == [16] * 3 * 2  # two updates: after epochs 2 and 3


class _Sharpening(hocket.Task):
    """A task with a transform of its own, in the event that follows the loader."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def after_dataloader(self, state):
        inputs, targets = state.batch
        state.batch = (inputs * 3 + 1, targets)

    def forward(self, batch):
        return self.network(batch[0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])


class _Skipping(_Sharpening):
    """Skips the last batch of the loader."""

    def after_dataloader(self, state):
        if state.batch[0].sum() == data().dataset.tensors[0][-16:].sum():
            state.request(hocket.Decision.SKIP_BATCH)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_transform": {"train": lambda batch: (batch[0] * 3 + 1, batch[1])}},
        {"model": _Sharpening, "loss": None},
        {"model": _Skipping, "loss": None, "eval_data": data(), "eval_every": "1ep"},
        {"limit_train": 2},
        {"overfit": 2, "train_data": "shuffled"},
        {"global_batch": 32},
        {"accumulate": "2ba", "limit_train": 3},
    ],
    ids=["batch-transform", "task", "skip", "limit", "overfit", "global-batch", "accumulate"],
)
def test_statistics_are_those_of_the_batches_that_training_sees(changes):
    """Torch's update_bn over what the model got in the last epoch of training."""
    seen = []

    class Look(hocket.Callback):
        def epoch_start(self, state):
            seen.clear()

        def before_forward(self, state):
            seen.append(state.batch)

    loader = shuffled() if "train_data" in changes else data()
    model = changes.get("model", network)()
    swa = SWA(start="0.5dur")
    trainer = make_trainer(
        **{**changes, "model": model, "train_data": loader, "algorithms": [swa], "callbacks": [Look()]}
    )
    trainer.fit()
    found = {name.removeprefix("network."): value for name, value in swa.averaged(trainer.state.model).items()}
    expected = network()
    expected.load_state_dict(found)
    assert seen[0][0].shape == (changes.get("global_batch", 16), 8) and trainer.state.timestamp.epoch == 2
    update_bn(seen, expected)
    assert_close(found, expected.state_dict())


def test_a_checkpoint_without_statistics_needs_training_data():
    """Those taken before an evaluation and before the end of the fit have none."""

    def make(**changes):
        algorithms = [SWA(start="0dur", update_interval="1ba")]
        return make_trainer(model=network(), algorithms=algorithms, duration="1ep", **changes)

    whole = make(train_data=data(), checkpoints=hocket.Checkpoints("runs", every="3ba"))
    whole.fit()
    early, last = "runs/ep0-ba3", "runs/ep1-ba4"
    without = make(train_data=None)
    with pytest.raises(ValueError, match=r"statistics .* train_data="):
        without.evaluate(data(), checkpoint=early)
    assert without.evaluate(data(), checkpoint=last) == whole.evaluate(data())
    with_data = make(train_data=data())
    assert with_data.evaluate(data(), checkpoint=early) == whole.evaluate(data(), checkpoint=early)


@pytest.mark.parametrize(
    "algorithm", [SWA("9ep"), EMA(start="9ep"), EMA(update_interval="1ep", half_life="1ep", start="3ep")]
)
def test_an_average_that_starts_after_the_end_is_warned_of_once(algorithm):
    trainer = make_trainer(train_data=data(), algorithms=[algorithm])
    with pytest.warns(hocket.NoEffectWarning, match="has no effect: it begins at start=") as caught:
        trainer.fit()
    assert len([each for each in caught if each.category is hocket.NoEffectWarning]) == 1


@pytest.mark.parametrize("algorithm", [SWA("0.9dur", "3ep"), EMA(start="1ep", update_interval="3ep", half_life="3ep")])
def test_an_average_without_an_update_before_the_end_is_warned_of(algorithm):
    trainer = make_trainer(train_data=data(), algorithms=[algorithm])
    with warnings.catch_warnings():
        warnings.simplefilter("error", hocket.NoEffectWarning)
        trainer.fit("1ep")  # the next fit may reach the start
    with pytest.warns(hocket.NoEffectWarning, match=f"{type(algorithm).__name__} has no average yet"):
        trainer.fit()


@pytest.mark.parametrize("algorithm", [SWA(), EMA(start="1ep", update_interval="2ep", half_life="2ep")])
def test_an_average_of_one_copy_is_warned_of(algorithm):
    """The only update is at the end of the run, or no second one comes after it: the average is a copy of the weights."""
    epochs = 1 if isinstance(algorithm, SWA) else 3
    trainer = make_trainer(train_data=data(), algorithms=[algorithm], duration=f"{epochs}ep")
    with pytest.warns(
        hocket.NoEffectWarning, match=f"{type(algorithm).__name__} averages nothing: .* at '{epochs - (epochs == 3)}ep'"
    ):
        trainer.fit()
    made = make_trainer(train_data=data(), algorithms=[SWA()], duration="5ep")  # copies at 4ep and 5ep
    with warnings.catch_warnings():
        warnings.simplefilter("error", hocket.NoEffectWarning)
        made.fit()


def test_a_resumed_average_of_one_copy_is_warned_of():
    def make():
        return make_trainer(train_data=data(), algorithms=[SWA("0.5dur", "2ep")], duration="3ep")

    first, second = make(), make()
    first.fit("2ep")
    second.load_state_dict(first.state_dict())
    with pytest.warns(hocket.NoEffectWarning, match="SWA averages nothing"):
        second.fit()


def test_a_batch_norm_in_eval_mode_keeps_its_statistics():
    model = network()
    model[1].eval()
    model[1].running_mean.fill_(0.3)
    swa = SWA(start="0.5dur")
    trainer = make_trainer(model=model, train_data=data(), algorithms=[swa])
    trainer.fit()
    assert (swa.averaged(model)["1.running_mean"] == 0.3).all()


def test_half_precision_weights_are_averaged_in_float32():
    model = nn.Linear(8, 3).bfloat16()
    seen = []

    class Keep(hocket.Callback):
        def batch_end(self, state):
            seen.append(model.weight.detach().double().clone())

    trainer = make_trainer(
        model=model, algorithms=[swa := SWA(start="0dur", update_interval="1ba")], callbacks=[Keep()],
        train_data=[(x.bfloat16(), y) for x, y in data()], loss=lambda o, t: F.cross_entropy(o.float(), t),
    )  # fmt: skip
    trainer.fit()
    average = swa.state_dict()["averages"]["weight"]
    assert average.dtype == torch.float32
    torch.testing.assert_close(average.double(), torch.stack(seen).mean(0), rtol=1e-5, atol=1e-6)


def test_a_resumed_run_evaluates_with_the_same_statistics():
    states = []

    def fresh(*callbacks):
        swa = SWA(start="0.3dur", update_interval="1ep", swa_lr=0.05)
        return swa, make_trainer(
            model=network(), train_data=shuffled(), duration="4ep", seed=5, algorithms=[swa], eval_data=data(),
            eval_every="3ba", callbacks=callbacks,
        )  # fmt: skip

    class Take(hocket.Callback):
        def batch_checkpoint(self, state):
            if state.timestamp.batch == 14:
                states.append(copy.deepcopy(whole.state_dict()))

    swa, whole = fresh(Take())
    expected = whole.fit().metrics
    again, resumed = fresh()
    resumed.load_state_dict(states[0])
    assert resumed.fit().metrics == expected
    mine, theirs = again.averaged(resumed.state.model), swa.averaged(whole.state.model)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_average_their_statistics(strategy):
    pytest.importorskip("hocket_strategies")

    def train(rank):
        swa = SWA(start="0.5dur")
        trainer = make_trainer(
            model=network(),
            train_data=data(),
            optimizer=sgd,
            duration="2ep",
            algorithms=[swa],
            strategy=strategy,
            device="cpu",
        )
        trainer.fit()
        state = trainer.model_state_dict(evaluated=True)
        return {name: value.numpy() for name, value in state.items()}

    first, second = run_ranks(train, 2)
    assert all((first[name] == second[name]).all() for name in first)
    model = network()
    model.load_state_dict({name: torch.tensor(value) for name, value in first.items()})
    update_bn(data(), model)  # batches of 16, as each rank has
    assert_close({name: torch.tensor(value) for name, value in first.items()}, model.state_dict())


def test_data_that_cannot_be_iterated_twice():
    trainer = make_trainer(model=network(), train_data=iter(list(data())), duration="2ba", algorithms=[SWA()])
    with pytest.raises(ValueError, match="second iteration"):
        trainer.fit()
    no_norm = make_trainer(
        train_data=iter(list(data())), duration="2ba", algorithms=[SWA(start="0dur", update_interval="1ba")]
    )
    no_norm.fit()  # needs no statistics


def test_statistics_are_not_stale():
    """In the middle of a fit averaged() has no statistics of the latest averages, and says so."""
    swa = SWA(start="0dur", update_interval="1ba")

    class Asks(hocket.Callback):
        def batch_checkpoint(self, state):
            with pytest.raises(ValueError, match="not computed"):
                swa.averaged(state.model)

    make_trainer(model=network(), train_data=data(), algorithms=[swa], callbacks=[Asks()], duration="1ep").fit()
    assert swa.averaged(network()).keys() == network().state_dict().keys()


@pytest.mark.parametrize("first", [0, 1])
def test_with_ema_the_first_in_the_list_that_has_started_is_evaluated(first):
    both = [SWA(start="0.5dur"), EMA(half_life="2ba")]
    algorithms = both if first == 0 else both[::-1]
    trainer = make_trainer(model=network(), train_data=data(), algorithms=algorithms, duration="2ep")
    trainer.fit()
    state, averaged = trainer.model_state_dict(evaluated=True), both[first].averaged(trainer.state.model)
    assert all(torch.equal(state[name], value) for name, value in averaged.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_updates_are_running_means(dtype):
    torch.manual_seed(0)
    values = [torch.randn(5, dtype=dtype) for _ in range(7)]
    average = values[0].clone()
    for number, value in enumerate(values[1:], 1):
        swa_update([average], [value], number)
    torch.testing.assert_close(average, torch.stack(values).mean(0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"swa_lr": -1}, "not negative"),
        ({"anneal_strategy": "none"}, "'cos' or 'linear'"),
        ({"statistics_batches": 0}, "1 or more"),
        ({"anneal": "1min"}, "fraction of the duration"),
        ({"start": "1min"}, "wall-clock"),
        ({"update_interval": "0ep"}, "positive number"),
    ],
)
def test_arguments_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        SWA(**arguments)


def test_a_negative_number_of_values():
    with pytest.raises(ValueError, match="counts the values"):
        swa_update([], [], -1)


@pytest.mark.parametrize("strategy", ["linear", "cos"])
def test_a_second_fit_keeps_learning_rates_between_the_two(strategy):
    """A longer duration moves ``start`` and ``anneal`` into the future."""
    rates = []

    class Look(hocket.Callback):
        def batch_start(self, state):
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    swa = SWA(start="0.5dur", swa_lr=0.05, anneal_strategy=strategy)
    trainer = make_trainer(algorithms=[swa], callbacks=[Look()], duration="2ep")
    trainer.fit()
    trainer.fit("6ep")
    assert all(0.05 <= rate <= 0.1 for rate in rates) and rates[-1] == pytest.approx(0.05)


@pytest.mark.parametrize("kind", ["swa", "ema"])
@pytest.mark.parametrize("duration", ["1ep", "8ba", "128sp"])
def test_averages_start_in_the_middle_of_an_epoch_and_hold_no_copies_before(kind, duration):
    """In Composer half of a run of one epoch is at its end, and SWA copies the model before it trains."""
    weights, held = [], []

    class Look(hocket.Callback):
        def batch_end(self, state):
            weights.append(state.model.weight.detach().clone())
            held.append(bool(averages.state_dict()["averages"]))

    averages = SWA("0.5dur", "1ba") if kind == "swa" else EMA(smoothing=0.5, start="0.5dur")
    trainer = make_trainer(
        model=nn.Linear(8, 3),
        train_data=make_data(128, 16),
        duration=duration,
        algorithms=[averages],
        callbacks=[Look()],
    )
    assert averages.state_dict()["averages"] == {}
    trainer.fit()
    assert held[:3] == [False] * 3 and held[4:] == [True] * 4
    expected = weights[3]  # after half of the batches
    for number, each in enumerate(weights[4:], 1):
        kept = number / (number + 1) if kind == "swa" else 0.5
        expected = kept * expected + (1 - kept) * each
    torch.testing.assert_close(averages.averaged(trainer.state.model)["weight"], expected)

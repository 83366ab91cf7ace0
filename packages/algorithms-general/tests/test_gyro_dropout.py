"""Gyro dropout: which subnetwork each sample trains, when, and that masks survive a checkpoint."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
import torch
from support import make_data, make_trainer
from torch import nn

import hocket
from hocket.surgery import NoEffectWarning
from hocket_general import GyroDropout
from hocket_general.functional import GyroSchedule, gyro_dropout
from hocket_testkit import AlgorithmConformance, run_ranks

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class TestGyroDropout(AlgorithmConformance):
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))

    def make(self):
        return GyroDropout(sigma=8, tau=2)


def layer_of(sigma, tau, p=0.5, seed=1):
    schedule = GyroSchedule(sigma, tau, seed)
    model, changed = gyro_dropout(nn.Sequential(nn.Dropout(p)), schedule)
    assert [str(each) for each in changed] == ["0: Dropout -> GyroDropoutLayer"]
    return model[0], schedule


@pytest.mark.parametrize(("sigma", "tau"), [(8, 2), (16, 16), (10, 3), (7, 5), (1, 1)])
def test_every_subnetwork_is_trained_on_as_many_samples(sigma, tau):
    """A round of tau subnetworks lasts tau / sigma of the training; the rest of sigma / tau has a shorter one."""
    schedule = GyroSchedule(sigma, tau, seed=3)
    trained, batches = Counter(), 100 * sigma
    for batch in range(batches):
        schedule.elapsed = batch / batches
        chosen = schedule.chosen()
        assert len(set(chosen)) == len(chosen) <= tau
        for each in chosen:
            trained[each] += Fraction(1, len(chosen))
    assert trained == dict.fromkeys(range(sigma), 100)
    schedule.elapsed = 1.0
    assert schedule.chosen() == chosen


def expected_masks(schedule, layer, p, *shape):
    """What the masks of a round are, by the documented seed."""
    drawn = [torch.rand(shape, generator=schedule.generator(layer, each)) >= p for each in schedule.chosen()]
    return torch.stack(drawn)


@pytest.mark.parametrize("batch", [4, 6, 7, 1, 3])
@pytest.mark.parametrize("elapsed", [0.0, 0.9])
def test_samples_are_divided_between_the_masks_whatever_the_size_of_the_batch(batch, elapsed):
    """Composer needed a multiple of tau. The last round of 8 subnetworks, 3 at a time, has two."""
    layer, schedule = layer_of(8, 3)
    layer(torch.ones(batch, 64))
    schedule.elapsed = elapsed
    outputs = layer(torch.ones(batch, 64))
    masks = expected_masks(schedule, 0, 0.5, 64)
    assert len(masks) == (2 if elapsed else 3)
    for sample in range(batch):
        torch.testing.assert_close(outputs[sample], masks[sample * len(masks) // batch].float() * 2)


def test_masks_drop_the_modules_own_share_and_keep_the_mean():
    """Composer ignored the p of the module."""
    layer, schedule = layer_of(64, 64, p=0.2)
    masks = expected_masks(schedule, 0, 0.2, 1000).float()
    assert masks.mean().item() == pytest.approx(0.8, abs=0.01)
    torch.testing.assert_close(layer(torch.ones(64, 1000)), masks / 0.8)
    given, _ = gyro_dropout(nn.Sequential(nn.Dropout(0.2)), schedule, p=0.7)
    assert given[0].p == 0.7


def test_layers_have_masks_of_their_own_and_seeds_other_ones():
    model, changed = gyro_dropout(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), GyroSchedule(4, 2, 1))
    x = torch.ones(4, 256)
    assert len(changed) == 2
    assert not torch.equal(model[0](x), model[1](x))
    assert torch.equal(model[0](x), layer_of(4, 2, seed=1)[0](x))
    assert not torch.equal(model[0](x), layer_of(4, 2, seed=2)[0](x))


def test_the_same_masks_until_the_round_ends():
    layer, schedule = layer_of(8, 2)
    x = torch.ones(4, 256)
    first = layer(x)
    schedule.elapsed = 0.24
    assert torch.equal(layer(x), first)
    schedule.elapsed = 0.25
    assert not torch.equal(layer(x), first)


def test_eval_mode_changes_nothing():
    layer, _ = layer_of(4, 2)
    x = torch.randn(3, 5)
    assert layer.eval()(x) is x


def test_inputs_of_any_rank_and_dtype():
    """A sequence drops features at all positions, so its length may vary; images drop single elements."""
    layer, _ = layer_of(4, 2)
    outputs = layer(torch.ones(2, 7, 64, dtype=torch.bfloat16))
    assert outputs.dtype == torch.bfloat16
    assert (outputs == outputs[:, :1]).all() and set(outputs.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(layer(torch.ones(2, 3, 64))[:, 0], outputs[:, 0].float())
    images = torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last)
    dropped = layer(images)
    assert dropped.is_contiguous(memory_format=torch.channels_last)
    assert 0 < dropped[0, 0].mean() < 2
    with pytest.raises(ValueError, match="dimension 0"):
        layer(torch.ones(4))


def test_rows_of_flattened_sequences_belong_to_their_samples():
    layer, schedule = layer_of(4, 2)
    schedule.divide(4, 4)
    flat = layer(torch.ones(4 * 5, 64)).view(4, 5, 64)
    assert torch.equal(flat, layer(torch.ones(4, 64))[:, None].expand(4, 5, 64))


@pytest.mark.parametrize("microbatch", [None, 3, 5])
def test_microbatches_see_the_masks_of_the_batch(microbatch):
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(x.detach() != 0)
            return x

    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), Look(), nn.Linear(64, 3))
    trainer = make_trainer(
        model=model,
        train_data=make_data(32, 16),
        duration="1ep",
        microbatch=microbatch,
        algorithms=[GyroDropout(sigma=4, tau=2)],
        seed=1,
    )
    trainer.fit()
    rows = torch.cat(seen)
    assert len(rows) == 32
    for batch in rows.split(16):
        assert (batch[:8] == batch[0]).all() and (batch[8:] == batch[8]).all() and not torch.equal(batch[0], batch[8])
    assert not torch.equal(rows[0], rows[16])  # the second round


@pytest.mark.parametrize("duration", ["1ba", "1ep", "10sp", "2ep"])
def test_durations_shorter_than_the_rounds(duration):
    """Composer divided by zero where iterations * epochs < sigma, and took any duration for epochs."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    make_trainer(model=model, duration=duration, algorithms=[GyroDropout(sigma=256, tau=16)]).fit()


@pytest.mark.filterwarnings("ignore:This run is configured differently")
def test_a_resumed_run_has_the_masks_of_the_first_whatever_its_own_seed():
    def fresh(seed):
        algorithm = GyroDropout(sigma=4, tau=2)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        return make_trainer(model=model, algorithms=[algorithm], seed=seed), algorithm

    first, one = fresh(1)
    second, other = fresh(2)
    assert one.schedule.seed != other.schedule.seed
    first.fit("1ba")
    second.load_state_dict(first.state_dict())
    x = torch.ones(4, 16)
    one.schedule.active = other.schedule.active = True  # as in a fit
    assert torch.equal(*(each.state.model[1].train()(x) for each in (first, second)))


def test_masks_that_would_be_huge_are_ordinary_dropout_and_a_warning_says_so():
    """As for attention probabilities, of heads * length * length units."""
    layer, schedule = layer_of(256, 16)
    with pytest.warns(NoEffectWarning, match=r"inputs are \(N, 12, 512, 512\).*16 masks take 48 MiB, more than 32"):
        dropped = layer(torch.ones(1, 12, 512, 512))
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(layer(torch.ones(1, 12, 512, 512)), dropped)  # new units each time, and no second warning
    small = layer(torch.ones(1, 12, 8, 8))
    schedule.elapsed = 0.5
    assert not torch.equal(layer(torch.ones(1, 12, 8, 8)), small)


@pytest.mark.long
def test_rounds_and_microbatches_do_not_compile_again():
    def rank_main(rank):
        layer, schedule = layer_of(10, 3)
        plain, _ = layer_of(10, 3)
        compilations = []
        x = torch.ones(6, 64)
        layer(x)
        compiled = torch.compile(
            layer, backend=lambda graph, _: compilations.append(1) or graph.forward, fullgraph=True
        )
        for step in range(12):
            for each in (schedule, plain.schedule):
                each.elapsed = step / 12
                each.divide(12, 6, step % 2 * 6)
            assert torch.equal(compiled(x), plain(x))
        return len(compilations)

    assert run_ranks(rank_main, 1) == [1]


def test_nothing_to_replace_is_said():
    with pytest.warns(NoEffectWarning, match=r"no torch\.nn\.Dropout"):
        make_trainer(model=nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.0)), algorithms=[GyroDropout()])
    plan = hocket.Trainer(
        model=nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.1)), algorithms=["gyro-dropout"], device="cpu"
    ).plan()
    assert plan.surgery["gyro-dropout"] == ("1: Dropout -> GyroDropoutLayer",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"p": 1.0}, "between 0 and 1"), ({"tau": 300}, "from 1 to sigma"), ({"sigma": 0, "tau": 0}, "1 or more")],
)
def test_arguments_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        GyroDropout(**arguments)


@pytest.mark.parametrize("duration", ["1ep", "2ep", "8ba", "64sp"])
def test_rounds_divide_the_run_whatever_the_unit_of_its_duration(duration):
    """Composer took the number of any duration for epochs."""
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(x.detach() != 0)
            return x

    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), Look(), nn.Linear(64, 3))
    trainer = make_trainer(
        model=model, train_data=make_data(32 if duration == "2ep" else 64, 8), duration=duration, seed=1,
        algorithms=[GyroDropout(sigma=4, tau=1)],
    )  # fmt: skip
    trainer.fit()
    rounds = [batch[0] for batch in seen]
    assert len(rounds) == 8
    for first, second in zip(rounds[::2], rounds[1::2], strict=True):
        assert torch.equal(first, second)
    assert len({tuple(each.tolist()) for each in rounds}) == 4


def test_the_layer_shows_its_arguments():
    """In Composer a loaded layer has lost them."""
    layer, _ = layer_of(8, 2, p=0.3)
    assert repr(layer) == "GyroDropoutLayer(p=0.3, sigma=8, tau=2)"


@pytest.mark.filterwarnings("ignore:GyroDropout was applied")
@pytest.mark.parametrize("again", [False, True])
def test_a_second_trainer_trains_every_unit(again):
    """One mask of the first fit would leave a third of the units without gradients for ever."""

    def trainer(model, *algorithms):
        return make_trainer(
            model=model, train_data=make_data(64, 8), duration="6ep", algorithms=list(algorithms),
            optimizer="sgd(lr=0.1)",
        )  # fmt: skip

    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    trainer(model, GyroDropout(sigma=2, tau=1)).fit()
    before = model[2].weight.detach().clone()
    second = trainer(model, *([GyroDropout(sigma=2, tau=1)] if again else []))
    second.fit()
    assert (model[2].weight != before).any(0).all()
    torch.manual_seed(0)
    found = model[1].train()(torch.ones(4, 16))
    torch.manual_seed(0)
    assert found.equal(nn.functional.dropout(torch.ones(4, 16), 0.5))


def test_gyro_dropout_that_is_applied_already():
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    make_trainer(model=model, algorithms=[GyroDropout()])
    with pytest.warns(NoEffectWarning, match="was applied to this Sequential before.* Make the model anew"):
        make_trainer(model=model, algorithms=[GyroDropout()])

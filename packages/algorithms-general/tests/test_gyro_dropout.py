"""Gyro dropout: which subnetwork each sample trains, when, and that masks survive a checkpoint."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from support import make_data, make_trainer
from torch import nn

import hocket
from hocket.surgery import NoEffectWarning
from hocket.testkit import AlgorithmConformance
from hocket_general import GyroDropout
from hocket_general.functional import GyroSchedule, gyro_dropout

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


@pytest.mark.parametrize(("sigma", "tau"), [(8, 2), (16, 16), (10, 3), (1, 1)])
def test_every_subnetwork_is_trained_for_the_same_time(sigma, tau):
    """Over the rounds each is chosen once; where tau does not divide sigma, the last round fills up from the beginning."""
    schedule = GyroSchedule(sigma, tau, seed=3)
    rounds = math.ceil(sigma / tau)
    counted = Counter()
    for number in range(rounds):
        schedule.elapsed = (number + 0.5) / rounds
        chosen = schedule.chosen()
        assert len(set(chosen)) == tau
        counted.update(chosen)
    assert set(counted) == set(range(sigma))
    assert sum(counted.values()) == rounds * tau and max(counted.values()) <= 2
    schedule.elapsed = 1.0
    schedule.chosen()


@pytest.mark.parametrize("batch", [4, 6, 7, 1, 3])
def test_samples_are_divided_between_tau_masks_whatever_the_size_of_the_batch(batch):
    """Composer needed a multiple of tau."""
    layer, schedule = layer_of(8, 3)
    outputs = layer(torch.ones(batch, 64))
    masks = schedule.masks(0, 0.5, (64,))
    for sample in range(batch):
        torch.testing.assert_close(outputs[sample], masks[sample * 3 // batch].float() * 2)


def test_masks_drop_the_modules_own_share_and_keep_the_mean():
    """Composer ignored the p of the module."""
    layer, schedule = layer_of(64, 64, p=0.2)
    masks = schedule.masks(0, 0.2, (1000,)).float()
    assert masks.mean().item() == pytest.approx(0.8, abs=0.01)
    assert layer(torch.ones(64, 1000)).mean().item() == pytest.approx(1.0, abs=0.01)
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
    schedule.total = schedule.samples = 4
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
    assert torch.equal(one.schedule.masks(0, 0.5, (64,)), other.schedule.masks(0, 0.5, (64,)))


def test_nothing_to_replace_is_said():
    with pytest.warns(NoEffectWarning, match=r"torch\.nn\.Dropout"):
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

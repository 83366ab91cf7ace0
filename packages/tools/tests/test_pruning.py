"""Magnitude pruning against a plain loop and the paper's formula; masks over ranks, averages and a resume."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_testkit import run_ranks
from hocket_tools import Pruning, magnitude_masks
from hocket_tools.compression.pruning import cubic_amount

EMA = pytest.importorskip("hocket_general").EMA
SWA = pytest.importorskip("hocket_general").SWA
Distillation = pytest.importorskip("hocket_general").Distillation

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))


def data(batches=10):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batches * 8, 1, 4, 4, generator=generator)
    labels = images.flatten(1).argmax(1).remainder(5)
    return DataLoader(TensorDataset(images, labels), batch_size=8)


def trainer(*algorithms, **changes):
    arguments = {
        "model": network(), "loss": F.cross_entropy, "train_data": data(), "duration": "20ba", "device": "cpu", "seed": 3,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    }  # fmt: skip
    return hocket.Trainer(**{**arguments, **changes}, algorithms=algorithms)


def zeros(model):
    return {
        name: (each == 0).float().mean().item() for name, each in model.named_parameters() if name.endswith("weight")
    }


def test_a_plain_loop_gives_the_same_weights_bitwise():
    """With thresholds from numpy's partition, and masks that are multiplied into weights, gradients and momentum."""
    run = trainer(Pruning(amount=0.8, start="2ba", stop="12ba", interval="3ba"))
    run.fit()

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    weights = [model[0].weight, model[4].weight]
    masks = [torch.ones_like(each) for each in weights]
    for batch, (images, labels) in enumerate([*data(), *data()], 1):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        for weight, mask in zip(weights, masks, strict=True):
            weight.grad *= mask
        optimizer.step()
        with torch.no_grad():
            due = batch >= 2 and (batch % 3 == 0 or batch == 12)
            for weight, mask in zip(weights, masks, strict=True):
                weight *= mask
                if due and batch <= 12:
                    amount = 0.8 * (1 - (1 - (batch - 2) / 10) ** 3)  # equation 1 of Zhu and Gupta
                    number = round(amount * weight.numel())
                    flat = weight.abs().flatten().numpy()
                    threshold = np.partition(flat, number)[number]
                    mask *= weight.abs() >= torch.tensor(threshold)
                    weight *= mask
                    optimizer.state[weight]["momentum_buffer"] *= mask
    for mine, theirs in zip(run.state.model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert zeros(model)["4.weight"] == pytest.approx(0.8)


def test_the_schedule():
    assert cubic_amount(0.9, 0.0, initial=0.3) == pytest.approx(0.3)
    assert cubic_amount(0.9, 0.5, initial=0.3) == pytest.approx(0.9 - 0.6 / 8)
    assert cubic_amount(0.9, 7.0) == 0.9 and cubic_amount(0.9, -0.1) == 0


def test_one_threshold_for_the_model_prunes_layers_of_small_weights_more():
    weights = {"large": torch.tensor([5.0, -6.0, 7.0, 8.0]), "small": torch.tensor([0.1, -0.2, 0.3, 9.0])}
    masks = magnitude_masks(weights, 0.5, scope="model")
    assert masks["large"].tolist() == [False, True, True, True] and masks["small"].tolist() == [False] * 3 + [True]
    kept = magnitude_masks(weights, 0.25, kept={"small": torch.tensor([True, True, True, False])})
    assert kept["small"].tolist() == [True, True, True, False]  # pruned before, although it is the largest


@pytest.mark.parametrize("average", [lambda: EMA(half_life="5ba"), lambda: SWA(start="0.1dur", update_interval="1ba")])
def test_averages_are_as_sparse(average):
    averages = average()
    run = trainer(Pruning(amount=0.75, stop="10ba", interval="1ba"), averages)
    run.fit()
    evaluated = run.model_state_dict(evaluated=True)
    assert not torch.equal(evaluated["4.weight"], run.state.model[4].weight)
    assert (evaluated["4.weight"] == 0).float().mean() == 0.75
    assert torch.equal(evaluated["4.weight"] == 0, run.state.model[4].weight == 0)


def hundred_steps(rank, duration="100ba", strategy="ddp", resume=None):
    ema = EMA(half_life="5ba")
    algorithms = (Pruning(amount=0.75, stop="60ba", interval="7ba", keep=["4"]), ema)
    checkpoints = hocket.Checkpoints(
        f"runs/{strategy}{'-whole' if duration == '100ba' and resume is None else ''}", every="50ba"
    )
    kept = []

    class Watch(hocket.Callback):
        def batch_end(self, state):
            weight = state.model[0].weight
            masked = ~algorithms[0].state_dict()["masks"].get("0.weight", torch.ones_like(weight).bool())
            kept.append(bool((weight[masked] == 0).all()))

    run = trainer(
        *algorithms, duration="100ba", strategy=strategy, checkpoints=checkpoints, resume=resume, optimizer="adamw(lr=0.01)",
        callbacks=[Watch()],
    )  # fmt: skip
    run.fit(*([] if duration == "100ba" else [duration]))
    held = run.state.optimizers[0].state[run.state.model[0].weight]
    tensors = {**run.model_state_dict(evaluated=False), "average": ema.averaged(run.state.model)["0.weight"],
               "momentum": held["exp_avg"], "squares": held["exp_avg_sq"]}  # fmt: skip
    return {name: value.numpy() for name, value in tensors.items()}, kept


def check_masks(result):
    tensors, kept = result
    pruned = tensors["0.weight"] == 0
    assert pruned.mean() == 0.75 and all(kept)
    assert all((tensors[name][pruned] == 0).all() for name in ("average", "momentum", "squares"))
    assert not (tensors["4.weight"] == 0).any()  # named in keep=


@pytest.mark.long
def test_masks_hold_for_a_hundred_steps_on_two_ranks_and_a_resume():
    first, second = run_ranks(hundred_steps, 2)
    check_masks(first)
    run_ranks(hundred_steps, 2, "50ba")
    resumed, other = run_ranks(hundred_steps, 2, "100ba", "ddp", "auto")
    check_masks(resumed)
    assert len(resumed[1]) == 50
    for result in (second, resumed, other):
        assert all((first[0][name] == result[0][name]).all() for name in first[0])  # bitwise


def test_masks_hold_in_one_process_and_a_resume():
    whole = hundred_steps(0, strategy="single")
    check_masks(whole)
    hundred_steps(0, "50ba", "single")
    resumed = hundred_steps(0, "100ba", "single", "auto")
    assert len(resumed[1]) == 50 and all((whole[0][name] == resumed[0][name]).all() for name in whole[0])


def test_together_with_distillation():
    run = trainer(Pruning(amount=0.5, stop="5ba", interval="1ba"), Distillation(network()))
    run.fit()
    assert zeros(run.state.model)["4.weight"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"amount": 1.0}, "amount=1.0 is not a fraction between 0 and 1"),
        ({"amount": 0.0}, "amount=0.0 is not a fraction"),
        ({"start": "2ba", "stop": "0.5dur"}, "both as fractions"),
        ({"start": "0.5dur", "stop": "0.2dur"}, "not later"),
        ({"interval": "10sp"}, "'10ba' or '1ep'"),
        ({"scope": "all"}, "'layer' or 'model'"),
        ({"keep": "head"}, "keep=\\['head'\\]"),
        ({"keep": 5}, "keep=\\['…'\\]"),
        ({"amount": "0.5"}, "Write amount=0.5"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises((ValueError, TypeError), match=said):
        Pruning(**arguments)


def test_a_model_without_weights_to_prune():
    with pytest.raises(ValueError, match="no linear layer and no convolution"):
        trainer(Pruning(keep=["*"]))


def test_a_kept_layer_that_does_not_exist_is_named():
    model = nn.Sequential(OrderedDict(body=nn.Linear(8, 8), act=nn.ReLU(), head=nn.Sequential(nn.Linear(8, 2))))
    for keep, near in ((["bodi"], "body"), (["body", "head"], "head.0"), (["act"], "body")):
        with pytest.raises(ValueError, match=f"{keep[-1]!r} matches none of the 2 layers.*{near}"):
            trainer(Pruning(keep=keep), model=model)


def test_it_says_that_it_pruned_nothing():
    with pytest.warns(hocket.NoEffectWarning, match="shorter interval="):
        trainer(Pruning(start="10ba", stop="30ba", interval="15ba"), duration="12ba").fit()


def test_masks_of_unknown_names_and_weights_with_nan_are_refused():
    weights = {"w": torch.randn(4), "v": torch.randn(4)}
    with pytest.raises(ValueError, match=r"kept= for 'u', and weights= has w, v\. Name masks as the weights"):
        magnitude_masks(weights, 0.5, kept={"u": torch.ones(4, dtype=torch.bool)})
    with pytest.raises(ValueError, match="NaN in v"):
        magnitude_masks(weights | {"v": torch.full((4,), torch.nan)}, 0.5)

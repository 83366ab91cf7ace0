"""Layer freezing: which layers, when, and that optimizers, ranks and resumed runs are right about them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from support import make_data, make_trainer
from torch import nn

import hocket
from hocket.surgery import NoEffectWarning
from hocket_general import GradientClipping, LayerFreezing
from hocket_general.functional import freeze_layers
from hocket_testkit import AlgorithmConformance, run_ranks

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class TestLayerFreezing(AlgorithmConformance):
    def make(self):
        return LayerFreezing(start="0.25dur")


def deep(layers=5):
    torch.manual_seed(0)
    blocks = [module for _ in range(layers - 1) for module in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*blocks, nn.Linear(8, 3))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.5)


def trained(model):
    return [module.weight.requires_grad for module in model if isinstance(module, nn.Linear)]


@pytest.mark.parametrize(("fraction", "frozen"), [(0, 0), (0.24, 0), (0.25, 1), (0.74, 2), (1, 4)])
def test_the_first_layers_freeze_and_never_the_last(fraction, frozen):
    model, names = freeze_layers(deep(), fraction)
    assert trained(model) == [False] * frozen + [True] * (5 - frozen)
    assert names == ["0", "2", "4", "6"][:frozen]
    assert all(
        module.bias.requires_grad is module.weight.requires_grad for module in model if isinstance(module, nn.Linear)
    )


def test_the_same_call_again_changes_nothing_and_a_larger_fraction_continues():
    """It once counted the remaining trainable layers only, so that half of the model became three quarters."""
    model = deep()
    for fraction, frozen in [(0.5, 2), (0.5, 2), (0.75, 3), (0.25, 3), (1.0, 4), (1.0, 4)]:
        _, names = freeze_layers(model, fraction)
        assert names == ["0", "2", "4", "6"][: int(fraction * 4)]
        assert trained(model) == [False] * frozen + [True] * (5 - frozen)


def test_a_weight_shared_with_a_later_layer_stays_trainable():
    model = deep()
    model[6].weight = model[0].weight
    freeze_layers(model, 0.5)
    assert trained(model) == [True, False, True, True, True]
    assert not model[0].bias.requires_grad


def test_a_fraction_out_of_range():
    with pytest.raises(ValueError, match="fraction of the layers"):
        freeze_layers(deep(), 1.1)


@pytest.mark.parametrize("duration", ["3ep", "24ba", "192sp", "1ep"])
def test_the_number_of_layers_follows_the_formula_whatever_the_unit_of_the_duration(duration):
    """level * (done - start) / (1 - start), by batch: Composer's counted epochs, so that in one epoch nothing froze."""
    counted = []

    class Count(hocket.Callback):
        def before_forward(self, state):
            counted.append((state.elapsed(), trained(state.model).count(False)))

    trainer = make_trainer(
        model=deep(),
        train_data=make_data(64, 8),
        duration=duration,
        algorithms=[LayerFreezing("0.25dur", 0.8)],
        callbacks=[Count()],
    )
    trainer.fit()
    for done, frozen in counted:
        assert frozen == int(4 * min(0.8 * max(done - 0.25, 0) / 0.75, 1) + 1e-9), done
    assert counted[0][1] == 0 and counted[-1][1] >= 2


@pytest.mark.parametrize("optimizer", [adamw, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)])
def test_frozen_weights_do_not_move_and_the_others_train_as_in_a_plain_loop(optimizer):
    """Neither weight decay nor momentum moves them; the plain loop freezes by hand and drops parameters from its optimizer."""
    trainer = make_trainer(
        model=deep(), train_data=make_data(64, 16, shuffle=False), duration="2ep", optimizer=optimizer,
        algorithms=[LayerFreezing("0.5dur")],
    )  # fmt: skip
    trainer.fit()
    model = deep()
    stepper = optimizer(model.parameters())
    batches = [*make_data(64, 16, shuffle=False)] * 2
    for number, (inputs, targets) in enumerate(batches):
        frozen = int(4 * max(number / 8 - 0.5, 0) / 0.5 + 1e-9)
        linear = [module for module in model if isinstance(module, nn.Linear)]
        gone = {id(p) for module in linear[:frozen] for p in module.parameters()}
        stepper.param_groups[0]["params"] = [p for p in stepper.param_groups[0]["params"] if id(p) not in gone]
        stepper.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        stepper.step()
    for mine, theirs in zip(trainer.state.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert trained(trainer.state.model) == [True] * 5  # the fit is over
    assert len(trainer.state.optimizers[0].param_groups[0]["params"]) == 10  # so that its state loads again


def test_gradients_of_frozen_layers_do_not_count_in_the_norm():
    def train(*algorithms, model):
        seen = []

        class Norm(hocket.Callback):
            def batch_end(self, state):
                seen.append(float(state.gradient_norm))

        make_trainer(
            model=model,
            train_data=make_data(8, 8),
            duration="1ep",
            clip_gradients=1e9,
            callbacks=[Norm()],
            algorithms=algorithms,
        ).fit()
        return seen

    frozen, _ = freeze_layers(deep(), 0.5)
    norms = train(model=deep()), train(model=frozen)
    assert norms[1][0] < norms[0][0]


def weights_of_a_run(strategy, batch_size):
    """Train, resume the run from its fifth batch, and return the weights, which are those of both."""
    taken = []

    class Take(hocket.Callback):
        def batch_checkpoint(self, state):
            if state.timestamp.batch == 5:
                taken.append(copy.deepcopy(whole.state_dict()))

    def fresh(*callbacks):
        return make_trainer(
            model=deep(), train_data=make_data(64, batch_size, shuffle=False), duration="2ep", optimizer=adamw, device="cpu",
            strategy=strategy, algorithms=[LayerFreezing("0.25dur"), GradientClipping("norm", 0.5)], callbacks=callbacks,
        )  # fmt: skip

    whole, resumed = fresh(Take()), fresh()
    whole.fit()
    resumed.load_state_dict(taken[0])
    resumed.fit()
    expected, found = whole.model_state_dict(), resumed.model_state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return [value.numpy() for value in expected.values()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_end_as_one_process_and_resume_exactly(strategy):
    """DDP is wrapped anew when layers freeze; FSDP passes requires_grad on to the gathered weights."""
    pytest.importorskip("hocket_strategies")
    expected = weights_of_a_run("single", 16)
    for found in run_ranks(weights_of_a_run_of_rank, 2, strategy):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


def weights_of_a_run_of_rank(rank, strategy):
    return weights_of_a_run(strategy, 8)


def test_a_layer_that_the_user_froze_does_not_count():
    model = deep()
    model[0].requires_grad_(False)
    model[8].requires_grad_(False)  # the head: then the last layer to train is the one before
    frozen = []

    class Watch(hocket.Callback):
        def before_forward(self, state):
            frozen.append(trained(state.model))

    trainer = make_trainer(
        model=model, duration="2ep", train_data=make_data(64, 8), algorithms=[LayerFreezing("0dur")], callbacks=[Watch()],
        optimizer=lambda p: torch.optim.SGD([each for each in p if each.requires_grad], lr=0.1),
    )  # fmt: skip
    trainer.fit()
    assert frozen[-1] == [False, False, True, True, False]
    assert trained(model) == [False, True, True, True, False]  # the user's are frozen still


def test_a_model_with_one_layer_says_that_nothing_freezes():
    trainer = make_trainer(model=nn.Linear(8, 3), algorithms=[LayerFreezing()])
    with pytest.warns(NoEffectWarning, match="freezes no layer"):
        trainer.fit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(model=deep(3), algorithms=[LayerFreezing()]).fit()


def test_lbfgs_is_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        make_trainer(optimizer=torch.optim.LBFGS, algorithms=[LayerFreezing()])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start": "1dur"}, r"\[0, 1\)"),
        ({"start": "5ba"}, "fraction"),
        ({"level": 0}, r"\(0, 1\]"),
        ({"level": 1.5}, r"\(0, 1\]"),
    ],
)
def test_arguments_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        LayerFreezing(**arguments)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_end_of_a_fit_makes_its_layers_trainable_again(tmp_path, resumed):
    """So that a second Trainer without the algorithm trains them; what the user froze stays frozen, in a resumed run too."""
    seen = []

    class Watch(hocket.Callback):
        def before_forward(self, state):
            seen.append(trained(state.model).count(False))

    def make():
        model = deep()
        model[2].bias.requires_grad_(False)
        return make_trainer(
            model=model, train_data=make_data(64, 8), duration="2ep", algorithms=[LayerFreezing("0.25dur")],
            checkpoints=hocket.Checkpoints(tmp_path, every="12ba"), callbacks=[Watch()], resume="auto",
        )  # fmt: skip

    trainer = make()
    trainer.fit("12ba" if resumed else None)
    if resumed:
        trainer = make()
        trainer.fit()
    model = trainer.state.model
    assert seen[-1] == 3 and trained(model) == [True] * 5
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["2.bias"]
    before = copy.deepcopy(model.state_dict())
    make_trainer(model=model, train_data=make_data(64, 8), duration="1ba").fit()
    same = [name for name, value in model.state_dict().items() if value.equal(before[name])]
    assert same == ["2.bias"]


def test_what_the_user_freezes_between_two_fits_stays_frozen():
    model = deep()
    trainer = make_trainer(
        model=model, train_data=make_data(64, 8), duration="2ep", algorithms=[LayerFreezing("0.25dur")]
    )
    trainer.fit("1ep")
    model[2].requires_grad_(False)
    trainer.fit()
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["2.weight", "2.bias"]

"""SAM's action against the paper's arithmetic and a hand-written loop."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support import make_model, make_trainer, momentum, same
from torch import nn

from hocket_general import SAM
from hocket_general.functional import sam_perturbation
from hocket_testkit import AlgorithmConformance


def _state(*optimizers, batch=0, loss=None):
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return SimpleNamespace(
        timestamp=SimpleNamespace(batch=batch), loss=loss, loss_parts={}, trained_parameters=lambda: parameters
    )


def _step(sam, optimizer, gradients, batch=0):
    """What the loop does with a batch: gradients, then the action around the default step."""
    loss = gradients()
    state = _state(optimizer, batch=batch, loss=loss)
    action = sam.optimizer_step(state, gradients)
    next(action)
    optimizer.step()
    with pytest.raises(StopIteration) as end:
        action.send(True)
    assert end.value.value is True
    return state


def _scalar(value=1.0):
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def _parabola(x, optimizer):
    def gradients():
        optimizer.zero_grad()
        loss = 0.5 * x**2
        loss.backward()
        return loss.detach()

    return gradients


def test_a_step_on_the_parabola():
    """x=1, rho=0.05: the gradient at 1.05 is 1.05, so x -> 1 - 0.1 * 1.05."""
    x = _scalar()
    optimizer = torch.optim.SGD([x], lr=0.1)
    state = _step(SAM(rho=0.05), optimizer, _parabola(x, optimizer))
    assert x.item() == pytest.approx(0.895, abs=1e-12)
    assert state.loss.item() == 0.5  # of the weights themselves, not of the perturbed ones


def test_a_loss_of_zero_does_not_skip_the_step():
    x = _scalar()
    optimizer = torch.optim.SGD([x], lr=0.1)

    def gradients():
        optimizer.zero_grad()
        loss = 0.5 * x**2
        loss.backward()
        return torch.zeros(())

    _step(SAM(), optimizer, gradients)
    assert x.item() == pytest.approx(0.895, abs=1e-12)


def test_weights_come_back_bit_for_bit_and_the_optimizers_state_is_its_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs, targets = torch.randn(16, 4), torch.randint(3, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    before = [p.detach().clone() for p in model.parameters()]
    seen = []

    def gradients():
        optimizer.zero_grad()
        seen.append([p.detach().clone() for p in model.parameters()])
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss.detach()

    _step(SAM(rho=0.7), optimizer, gradients)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    distance = torch.cat([(a - b).flatten() for a, b in zip(seen[1], before, strict=True)]).norm()
    assert distance.item() == pytest.approx(0.7, rel=1e-4)
    # The momentum holds the second gradient, under the usual keys, once per parameter.
    state = optimizer.state_dict()["state"]
    assert [set(entry) for entry in state.values()] == [{"momentum_buffer"}] * 4
    for p in model.parameters():
        assert torch.equal(optimizer.state[p]["momentum_buffer"], p.grad)


def test_weights_come_back_when_the_second_gradient_fails():
    x = _scalar()
    optimizer = torch.optim.SGD([x], lr=0.1)
    _parabola(x, optimizer)()
    state = _state(optimizer)

    def fails():
        assert x.item() != 1.0
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        next(SAM().optimizer_step(state, fails))
    assert x.item() == 1.0


def test_one_norm_over_the_parameters_of_all_optimizers_and_only_those_with_gradients():
    x, y, unused = _scalar(3.0), _scalar(4.0), _scalar(7.0)
    optimizers = [torch.optim.SGD([x], lr=1.0), torch.optim.SGD([y, unused], lr=1.0)]
    x.grad, y.grad = x.detach().clone(), y.detach().clone()  # of (x² + y²) / 2; norm 5
    state = _state(*optimizers)
    at = []
    next(SAM(rho=5.0, epsilon=0.0).optimizer_step(state, lambda: at.append((x.item(), y.item(), unused.item()))))
    assert at == [(6.0, 8.0, 7.0)]
    assert (x.item(), y.item()) == (3.0, 4.0)


def test_no_gradients_is_a_plain_step():
    x = _scalar()
    optimizer = torch.optim.SGD([x], lr=0.1)
    calls = []
    state = _state(optimizer)
    next(SAM().optimizer_step(state, lambda: calls.append(1)))
    assert not calls


def test_every_third_batch():
    x = _scalar()
    optimizer = torch.optim.SGD([x], lr=0.1)
    steps = []
    for batch in range(6):
        before = x.item()
        _step(SAM(rho=0.05, interval=3), optimizer, _parabola(x, optimizer), batch=batch)
        steps.append((before - x.item()) / 0.1 - before)  # gradient used minus plain gradient
    assert steps == pytest.approx([0, 0, 0.05, 0, 0, 0.05])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rho": -0.1}, "distance"),
        ({"epsilon": -1.0}, "negative"),
        ({"eta": -1.0}, "negative"),
        ({"interval": 0}, "1 for every batch"),
    ],
)
def test_arguments_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        SAM(**arguments)


# --- adaptive (ASAM)


def test_the_adaptive_step_is_the_papers():
    """Kwon et al. 2021: ``rho * T^2 g / ||T g||`` with T = |w| + eta, computed here with one flat vector."""
    torch.manual_seed(0)
    weights = [torch.randn(3, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
    gradients = [torch.randn_like(weight) for weight in weights]
    before = [each.clone() for each in (*weights, *gradients)]
    steps = sam_perturbation(gradients, rho=0.5, epsilon=0.0, adaptive=weights, eta=0.01)
    w, g = (torch.cat([each.flatten() for each in tensors]) for tensors in (weights, gradients))
    scale = torch.diag(w.abs() + 0.01)
    expected = 0.5 * scale @ scale @ g / (scale @ g).norm()
    torch.testing.assert_close(torch.cat([step.flatten() for step in steps]), expected)
    assert all(torch.equal(now, then) for now, then in zip((*weights, *gradients), before, strict=True))


def test_the_adaptive_neighbourhood_does_not_depend_on_the_scale_of_a_layer():
    """A ReLU network with one layer times 8 and the next divided by 8 is the same function, at the worst point too."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))

    def worst_loss(first, second, adaptive):
        loss = F.cross_entropy((inputs @ first).relu() @ second, targets)
        gradients = torch.autograd.grad(loss, (first, second))
        steps = sam_perturbation(gradients, rho=0.3, adaptive=(first, second) if adaptive else None, eta=0.0)
        with torch.no_grad():
            first, second = first + steps[0], second + steps[1]
            return F.cross_entropy((inputs @ first).relu() @ second, targets).item()

    first = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    second = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    larger, smaller = ((each * factor).detach().requires_grad_() for each, factor in ((first, 8), (second, 1 / 8)))
    assert worst_loss(larger, smaller, True) == pytest.approx(worst_loss(first, second, True), rel=1e-9)
    assert worst_loss(larger, smaller, False) != pytest.approx(worst_loss(first, second, False), rel=1e-2)


def test_an_adaptive_step_on_the_parabola():
    """With one weight the norm cancels: the step is rho * T, so the gradient at 1 + 0.05 * 1.01 counts."""
    x = _scalar()
    optimizer = torch.optim.SGD([x], lr=0.1)
    _step(SAM(rho=0.05, adaptive=True), optimizer, _parabola(x, optimizer))
    assert x.item() == pytest.approx(1 - 0.1 * (1 + 0.05 * 1.01), abs=1e-12)


def test_weights_and_gradients_of_different_numbers():
    with pytest.raises(ValueError, match="one for each"):
        sam_perturbation([torch.ones(2)], adaptive=[])


class TestAdaptiveSAM(AlgorithmConformance):
    def make(self):
        return SAM(rho=0.3, adaptive=True)


def test_a_checkpoint_holds_the_state_of_the_optimizer_itself(tmp_path):
    """Composer's SAM wraps the optimizer: its checkpoints lack the momentum, which begins at zero after a resume."""

    def fresh(*algorithms):
        return make_trainer(optimizer=momentum, algorithms=algorithms, folder=tmp_path)

    whole, first, second = fresh(SAM()), fresh(SAM()), fresh(SAM())
    whole.fit()
    first.fit("1ep")
    checkpoint = copy.deepcopy(first.state_dict())
    second.load_state_dict(copy.deepcopy(checkpoint))
    loaded, plain = second.state.optimizers[0].state_dict(), momentum(make_model().parameters()).state_dict()
    assert loaded["param_groups"] == plain["param_groups"]
    assert all(entry["momentum_buffer"].any() for entry in loaded["state"].values()) and len(loaded["state"]) == 4
    second.fit("1ep")
    for mine, theirs in zip(second.state.model.parameters(), whole.state.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    without = fresh()  # a run without SAM continues from the same checkpoint
    with pytest.raises(ValueError, match="'sam'"):
        without.load_state_dict(copy.deepcopy(checkpoint))
    with pytest.warns(UserWarning, match="'sam'"):
        without.load_state_dict(checkpoint, strict=False)
    found, expected = without.state.optimizers[0].state_dict(), first.state.optimizers[0].state_dict()
    assert same(found["state"], expected["state"])

"""Every optimizer of this package: the suite for optimizers, and its formula, computed again."""

from __future__ import annotations

import copy
import importlib.util
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hocket
from hocket.surgery import NoEffectWarning
from hocket_general import LAMB, DecoupledAdamW, DecoupledSGDW, Lion, Muon
from hocket_testkit import OptimizerConformance, run_ranks


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


class TestMuon(OptimizerConformance):
    optimizer = "muon(lr=1e-2)"


class TestLAMB(OptimizerConformance):
    optimizer = "lamb(lr=1e-2)"


class TestLion(OptimizerConformance):
    optimizer = "lion(lr=1e-3, weight_decay=0.1)"


class TestDecoupledAdamW(OptimizerConformance):
    optimizer = "decoupled-adamw(lr=1e-2)"


class TestDecoupledSGDW(OptimizerConformance):
    optimizer = "decoupled-sgdw(lr=0.1, momentum=0.9, weight_decay=1e-4)"


@needs("schedulefree")
class TestScheduleFreeAdamW(OptimizerConformance):
    optimizer = "schedule-free-adamw(lr=1e-2, warmup_steps=2)"


@needs("schedulefree")
class TestScheduleFreeSGD(OptimizerConformance):
    optimizer = "schedule-free-sgd(lr=0.1)"


@needs("pytorch_optimizer")
class TestSOAP(OptimizerConformance):
    optimizer = "soap(lr=1e-2, precondition_frequency=2)"
    exempt = {"test_copies_step_alike": "pytorch_optimizer does not copy its attribute maximize"}


# --- formulas


def gradients(steps: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def stepped(make, start: Tensor, given: list[Tensor]) -> Tensor:
    weight = nn.Parameter(start.clone())
    optimizer = make([weight])
    for gradient in given:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


START = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)


def test_lamb_is_algorithm_2_of_its_paper() -> None:
    weight, m, v = START.clone(), torch.zeros_like(START), torch.zeros_like(START)
    given = gradients(4, 3, 4)
    for t, g in enumerate(given, 1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6) + 0.1 * weight
        weight = weight - 0.05 * weight.norm() / u.norm() * u
    got = stepped(lambda each: LAMB(each, lr=0.05, betas=(0.9, 0.99), weight_decay=0.1), START, given)
    torch.testing.assert_close(got, weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda each: LAMB(each, lr=0.01, weight_decay=0.0, always_adapt=False),
        lambda each: DecoupledAdamW(each, lr=0.01, betas=(0.9, 0.999), weight_decay=0.0),
        lambda each: Muon(each, lr=0.01, betas=(0.9, 0.999), weight_decay=0.0, muon=False),
    ],
)
def test_a_late_gradient_steps_as_under_adamw(make) -> None:
    """Of a layer that thaws at step 21, and of one without gradients in between: bias corrections are by tensor."""

    def train(make) -> list[Tensor]:
        random = torch.Generator().manual_seed(0)
        weights = [torch.ones(3, dtype=torch.double).requires_grad_() for _ in range(3)]
        optimizer = make(weights)
        for number in range(25):
            gradients = torch.randn(3, 3, generator=random, dtype=torch.double)
            if number == 23:  # saved and loaded
                later = make(weights)
                later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer = later
            for weight, gradient, has in zip(weights, gradients, (True, number >= 20, number % 3 == 0), strict=True):
                weight.grad = gradient.clone() if has else None
            optimizer.step()
        return [weight.detach() for weight in weights]

    expected = train(lambda each: torch.optim.AdamW(each, lr=0.01, weight_decay=0.0, eps=1e-8))
    for got, wanted in zip(train(make), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)  # LAMB adds another eps


def test_lamb_goes_on_from_a_state_with_one_count_for_all() -> None:
    weight, same = (torch.ones(3).requires_grad_() for _ in range(2))
    new, old = LAMB([weight], lr=0.01), LAMB([same], lr=0.01)
    for each, optimizer in ((weight, new), (same, old)):
        for _ in range(3):
            each.grad = torch.tensor([1.0, -2.0, 0.5])
            optimizer.step()
    state = copy.deepcopy(old.state_dict())
    state["param_groups"][0]["step"] = int(state["state"][0].pop("step"))  # as it was saved before
    old.load_state_dict(state)
    new.step(), old.step()
    assert torch.equal(weight, same) and "step" not in old.param_groups[0]


def test_lamb_does_not_scale_where_a_norm_is_0() -> None:
    got = stepped(lambda each: LAMB(each, lr=0.1, weight_decay=0.0), torch.zeros(2), [torch.tensor([3.0, -3.0])])
    torch.testing.assert_close(got, torch.tensor([-0.1, 0.1]))


@pytest.mark.parametrize("always", [True, False])
def test_lamb_scales_each_of_many_tensors_by_its_own_norms(always: bool) -> None:
    """Tensors of other shapes and dtypes in two groups, one of them without weight decay; the meta device is another one."""
    torch.manual_seed(0)
    starts = [torch.randn(4, 3), torch.randn(5), torch.zeros(2), torch.randn(3, 3, dtype=torch.float64), torch.randn(6)]
    weights = [nn.Parameter(each.clone()) for each in starts]
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))
    groups = [{"params": [*weights[:2], elsewhere, weights[2]]}, {"params": weights[3:], "weight_decay": 0.0}]
    optimizer = LAMB(groups, lr=0.1, weight_decay=0.2, always_adapt=always)
    for weight in (*weights, elsewhere):
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    for number, (start, weight) in enumerate(zip(starts, weights, strict=True)):
        u = weight.grad / (weight.grad.abs() + 1e-6) + (0.2 if number < 3 else 0.0) * start
        scaled = (number < 3 or always) and start.norm() > 0
        expected = start - 0.1 * (start.norm() / u.norm() if scaled else 1.0) * u
        torch.testing.assert_close(weight.detach(), expected)


def test_lion_is_algorithm_2_of_its_paper() -> None:
    weight, m = START.clone(), torch.zeros_like(START)
    given = gradients(4, 3, 4)
    for g in given:
        weight = weight - 0.05 * ((0.9 * m + 0.1 * g).sign() + 0.2 * weight)
        m = 0.99 * m + 0.01 * g
    got = stepped(lambda each: Lion(each, lr=0.05, weight_decay=0.2), START, given)
    torch.testing.assert_close(got, weight)


def test_decoupled_decay_follows_the_schedule_and_not_the_base_learning_rate() -> None:
    """Composer's number: lr 0.1 -> 0.05 at weight_decay 0.01 shrinks 1 to 0.995, with gradients of zero."""
    for make in (DecoupledAdamW, DecoupledSGDW):
        weight = nn.Parameter(torch.ones(1))
        optimizer = make([weight], lr=0.1, weight_decay=0.01)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
        assert optimizer.param_groups[0]["lr"] == 0.05
        weight.grad = torch.zeros(1)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.tensor([0.995]))


@pytest.mark.parametrize("make", [DecoupledAdamW, DecoupledSGDW])
def test_decoupled_decay_is_relative_to_the_rate_of_the_constructor(make) -> None:
    """OneCycleLR sets ``initial_lr`` to a 25th of its maximum, so that the decay at the peak would be 25 times too large."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = make([weight], lr=0.1, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    assert optimizer.param_groups[0]["initial_lr"] == pytest.approx(0.004)
    expected = 1.0
    for step in range(9):
        if step == 5:
            restored = make([weight], lr=0.7, weight_decay=0.3)
            restored.load_state_dict(optimizer.state_dict())
            schedule.optimizer = optimizer = restored
        expected *= 1 - 0.01 * optimizer.param_groups[0]["lr"] / 0.1
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        schedule.step()
    assert weight.item() == pytest.approx(expected, rel=1e-12) and 0.95 < expected < 0.97


def test_decoupled_groups_have_their_own_base_rate() -> None:
    """Groups with a rate of their own, a layer-wise decay of rates, and states from before ``base_lr`` was an option."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = DecoupledSGDW([{"params": weights[:1], "lr": 1.0}, {"params": weights[1:]}], lr=0.1, weight_decay=0.01)
    for weight, group in zip(weights, optimizer.param_groups, strict=True):
        group["lr"] /= 2
        weight.grad = torch.zeros(1)
    optimizer.step()
    torch.testing.assert_close(torch.cat(weights).detach(), torch.full((2,), 0.995))
    old = optimizer.state_dict()
    for group in old["param_groups"]:
        group["initial_lr"] = group.pop("base_lr")
    optimizer.load_state_dict(old)
    assert [group["base_lr"] for group in optimizer.param_groups] == [1.0, 0.1]

    decayed = {"decoupled-adamw": {"lr": 0.1, "weight_decay": 0.01, "layer_decay": 0.5}}
    groups = hocket.Trainer(model=GPT(False), optimizer=decayed, device="cpu").state.optimizers[0].param_groups
    assert len(groups) > 2 and all(group["lr"] == group["base_lr"] for group in groups)


@pytest.mark.parametrize("scheduled", [1.0, 0.3])
def test_decoupled_adamw_is_torchs_with_another_decay(scheduled: float) -> None:
    """torch's AdamW decays by ``lr * weight_decay``: the same steps with ``weight_decay / base_lr``."""
    given = gradients(4, 3, 4)

    def ours(parameters):
        made = DecoupledAdamW(parameters, lr=0.1, betas=(0.9, 0.99), weight_decay=0.02)
        made.param_groups[0]["lr"] = 0.1 * scheduled
        return made

    got = stepped(ours, START, given)
    expected = stepped(
        lambda each: torch.optim.AdamW(each, lr=0.1 * scheduled, betas=(0.9, 0.99), weight_decay=0.02 / 0.1),
        START,
        given,
    )
    torch.testing.assert_close(got, expected)


def test_decoupled_sgdw_keeps_the_decay_out_of_the_momentum() -> None:
    weight, buffer = START.clone(), None
    given = gradients(4, 3, 4)
    for g in given:
        buffer = g if buffer is None else 0.9 * buffer + g
        weight = weight * (1 - 0.02) - 0.1 * buffer
    got = stepped(lambda each: DecoupledSGDW(each, lr=0.1, momentum=0.9, weight_decay=0.02), START, given)
    torch.testing.assert_close(got, weight)


def test_a_decay_of_adamw_is_refused() -> None:
    with pytest.raises(ValueError, match="fraction by which weights shrink"):
        DecoupledAdamW([nn.Parameter(torch.ones(1))], weight_decay=1.5)
    with pytest.raises(ValueError, match="fraction by which weights shrink"):
        DecoupledAdamW([{"params": [nn.Parameter(torch.ones(1))], "weight_decay": 1.5}])


def test_step_hooks_run_once() -> None:
    for make in (DecoupledAdamW, DecoupledSGDW, partial(Muon, muon=True)):
        weight, calls = nn.Parameter(torch.ones(2, 2)), []
        torch.optim.Adam([weight]), torch.optim.SGD([weight], lr=1.0)
        optimizer = make([weight], lr=0.1)
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append(1))
        weight.grad = torch.ones(2, 2)
        optimizer.step()
        assert calls == [1]


# --- Muon


class GPT(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": nn.Linear(8, 8)}) for _ in range(2)]
        )
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block["mlp"](block["norm"](hidden))
        return self.head(hidden)


def chosen(model: nn.Module) -> set[str]:
    return {name for name, route in Muon.routes(model).items() if route["muon"]}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_hidden_matrices_only(tied: bool) -> None:
    assert chosen(GPT(tied)) == {"blocks.0.mlp.weight", "blocks.1.mlp.weight"}


def test_muon_leaves_the_first_and_the_last_layer_of_a_convolutional_network() -> None:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2)
    assert chosen(nn.Sequential(*layers)) == {"2.weight", "4.weight"}


def test_muon_says_that_there_is_no_hidden_matrix() -> None:
    with pytest.warns(NoEffectWarning, match="no hidden matrix in Linear"):
        assert chosen(nn.Linear(2, 2)) == set()


def test_groups_override_the_rule_and_the_plan_shows_it() -> None:
    optimizer = {"muon": {"groups": [{"match": "blocks.0.*weight", "muon": False}, {"match": "1d", "weight_decay": 0}]}}
    trainer = hocket.Trainer(model=GPT(False), loss=nn.functional.cross_entropy, optimizer=optimizer, device="cpu")
    assert "muon=True, weight_decay=0.1: blocks.1.mlp.weight (64 parameters)" in str(trainer.plan())


def test_a_vector_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) in a group with muon=True"):
        Muon([{"params": [nn.Parameter(torch.ones(3))], "muon": True}])


@pytest.mark.parametrize("given", [Muon, lambda parameters: Muon(parameters, lr=1e-2)])
def test_muon_by_class_needs_to_know_the_matrices(given: object) -> None:
    with pytest.raises(ValueError, match=r"which parameters are hidden matrices.*optimizer='muon\(lr=1e-3\)'"):
        hocket.Trainer(model=nn.Linear(4, 2), loss=nn.functional.mse_loss, optimizer=given, device="cpu")
    Muon([nn.Parameter(torch.ones(3))], muon=False)


def test_muon_is_torchs_muon_and_torchs_adamw() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(6, 4), torch.randn(5)
    ours, theirs = [[nn.Parameter(each.clone()) for each in (a, b)] for _ in range(2)]
    muon = Muon([{"params": [ours[0]], "muon": True}, {"params": [ours[1]]}], lr=0.02, weight_decay=0.1)
    both = (
        torch.optim.Muon([theirs[0]], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([theirs[1]], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95)),
    )
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        muon.step()
        for each in both:
            each.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "ns_steps": 3}, {"adjust_lr_fn": "original"}])
@pytest.mark.parametrize("stacked", [1, 100, 1 << 25])
def test_matrices_of_one_shape_step_as_each_alone(options, stacked: int, monkeypatch) -> None:
    """Tall, wide and square ones, a kernel, a late gradient and 16-bit weights; in stacks of one, of a few, and of all."""
    monkeypatch.setattr("hocket_general.muon._STACKED", stacked)
    torch.manual_seed(0)
    shapes = [(6, 4)] * 5 + [(4, 6)] * 2 + [(5, 5)] + [(6, 2, 3, 1)] * 3
    starts = [torch.randn(shape) for shape in shapes] + [torch.randn(6, 4).bfloat16() for _ in range(2)]
    ours, theirs = [[nn.Parameter(each.clone()) for each in starts] for _ in range(2)]
    flat = [nn.Parameter(each.detach().flatten(1)) for each in theirs]

    def groups(of: list[nn.Parameter], **more) -> list[dict]:
        settings = [{"lr": 0.05}, {}, {"weight_decay": 0.3}]
        return [
            {"params": part, **each, **more} for part, each in zip((of[:3], of[3:-2], of[-2:]), settings, strict=True)
        ]

    muon = Muon(groups(ours, muon=True), lr=0.02, **options)
    alone = torch.optim.Muon(groups(flat), lr=0.02, **{"adjust_lr_fn": "match_rms_adamw", **options})
    for number in range(4):
        for mine, other in zip(ours, flat, strict=True):
            gradient = torch.randn_like(mine)
            late = mine is ours[1] and number < 2
            mine.grad, other.grad = (None, None) if late else (gradient, gradient.flatten(1).clone())
        muon.step(), alone.step()
    for mine, other in zip(ours, flat, strict=True):
        torch.testing.assert_close(mine.detach().flatten(1), other.detach(), atol=1e-6, rtol=1e-6)


def test_a_step_of_many_layers_takes_as_many_operations_as_one_of_few() -> None:
    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += "view" not in function._schema.name
            return function(*args, **(kwargs or {}))

    def operations(layers: int) -> int:
        weights = [nn.Parameter(torch.randn(8, 4)) for _ in range(layers)]
        optimizer = Muon([{"params": weights, "muon": True}])
        for _ in range(2):
            for each in weights:
                each.grad = torch.randn(8, 4)
            with Count() as count:
                optimizer.step()
        return count.number

    assert operations(24) <= operations(2) < 60


def test_a_complex_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="complex parameter of shape"):
        Muon([{"params": [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], "muon": True}])


def test_its_update_is_orthogonal_and_has_the_size_of_adamws() -> None:
    """Moonlight, section 2.2: the root mean square of an update is about 0.2 of the learning rate, for any shape."""
    torch.manual_seed(0)
    for shape in ((64, 16), (16, 64), (32, 4, 2, 2)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape)
        Muon([{"params": [weight], "muon": True}], lr=1.0, weight_decay=0.0).step()
        matrix = weight.detach().flatten(1)
        singular = torch.linalg.svdvals(matrix) / (0.2 * math.sqrt(max(matrix.shape)))
        assert singular.min() > 0.6 and singular.max() < 1.3
        assert 0.15 < matrix.square().mean().sqrt() < 0.25


def test_the_memory_format_does_not_matter() -> None:
    torch.manual_seed(0)
    start, given = torch.randn(8, 4, 3, 3), [torch.randn(8, 4, 3, 3) for _ in range(3)]
    results = []
    for memory in (torch.contiguous_format, torch.channels_last):
        weight = nn.Parameter(start.clone(memory_format=memory))
        optimizer = Muon([{"params": [weight], "muon": True}], lr=0.1)
        for gradient in given:
            weight.grad = gradient.clone(memory_format=torch.contiguous_format)
            optimizer.step()
        assert weight.is_contiguous(memory_format=memory)
        results.append(weight.detach().contiguous())
    torch.testing.assert_close(*results, atol=0.02, rtol=0)  # torch's Newton-Schulz iteration runs in bfloat16
    assert (results[0] - start).abs().max() > 0.1


# --- Schedule-Free


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(6)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def free(**changes) -> hocket.Trainer:
    given = {"model": network(), "loss": nn.functional.mse_loss, "optimizer": "schedule-free-sgd(lr=0.2, momentum=0.8)",
             "train_data": batches(), "eval_data": batches(), "duration": "2ep", "device": "cpu", "seed": 1}  # fmt: skip
    return hocket.Trainer(**{**given, **changes})


def by_hand(epochs: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return x and y after SGD of Defazio et al. 2024, equations 2 to 4: x is the mean of z, gradients are taken at y."""
    model = network()
    x = [each.detach().clone() for each in model.parameters()]
    z, count = [each.clone() for each in x], 0
    y = x
    for _ in range(epochs):
        for inputs, targets in batches():
            y = [0.2 * fast + 0.8 * mean for fast, mean in zip(z, x, strict=True)]
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), y, strict=True):
                    parameter.copy_(value)
            given = torch.autograd.grad(nn.functional.mse_loss(model(inputs), targets), list(model.parameters()))
            z = [fast - 0.2 * each for fast, each in zip(z, given, strict=True)]
            count += 1
            x = [mean + (fast - mean) / count for fast, mean in zip(z, x, strict=True)]
    return x, [0.2 * fast + 0.8 * mean for fast, mean in zip(z, x, strict=True)]


@needs("schedulefree")
def test_schedule_free_evaluates_the_average_and_trains_the_interpolation() -> None:
    trainer = free()
    metrics = trainer.fit().metrics
    x, y = by_hand(2)
    evaluated, trained = (list(trainer.model_state_dict(evaluated=each).values()) for each in (True, False))
    torch.testing.assert_close(evaluated, x)
    torch.testing.assert_close(trained, y)
    model = network()
    model.load_state_dict(trainer.model_state_dict(evaluated=True))
    losses = [nn.functional.mse_loss(model(inputs), targets) for inputs, targets in batches()]
    assert metrics["eval/loss"] == pytest.approx(torch.stack(losses).mean().item())
    predicted = torch.cat(trainer.predict([inputs for inputs, _ in batches()]))
    torch.testing.assert_close(predicted, torch.cat([model(inputs) for inputs, _ in batches()]))


@needs("schedulefree")
def test_a_checkpoint_of_schedule_free_evaluates_as_the_run_did(tmp_path) -> None:
    trainer = free(checkpoints=hocket.Checkpoints(tmp_path / "checkpoints", every="1ep"), folder=tmp_path)
    trainer.fit("1ep")
    before = trainer.evaluate()["eval/loss"]
    trainer.fit("1ep")
    first = sorted((tmp_path / "checkpoints").glob("ep1*"))[0]
    now = trainer.evaluate()["eval/loss"]
    assert trainer.evaluate(checkpoint=first)["eval/loss"] == before != now
    assert trainer.evaluate()["eval/loss"] == now
    other = free(folder=tmp_path / "other")
    assert other.evaluate(checkpoint=first)["eval/loss"] == before


@needs("schedulefree")
def test_evaluations_do_not_change_schedule_free_training() -> None:
    often, never = free(eval_every="1ba"), free(eval_data=None)
    often.fit()
    never.fit()
    for one, other in zip(often.state.model.parameters(), never.state.model.parameters(), strict=True):
        assert torch.equal(one, other)


@needs("schedulefree")
def test_schedule_free_warns_of_a_schedule_and_of_batch_norm() -> None:
    with pytest.warns(UserWarning, match="so a schedule slows it down"):
        free(schedule="cosine")
    free(schedule="constant(warmup=2ba)")
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    with pytest.warns(UserWarning, match="running statistics of BatchNorm"):
        free(model=model).fit()


@pytest.mark.skipif(importlib.util.find_spec("schedulefree") is not None, reason="schedulefree is installed")
def test_what_to_install_is_said() -> None:
    with pytest.raises(Exception, match=r"Type: pip install .*schedulefree"):
        free()


# --- several ranks

NAMES = [
    "muon(lr=1e-2)",
    "lamb(lr=1e-2)",
    "lion(lr=1e-3)",
    "decoupled-adamw(lr=1e-2)",
    "decoupled-sgdw(lr=0.1, momentum=0.9)",
]
if importlib.util.find_spec("schedulefree"):
    NAMES += ["schedule-free-adamw(lr=1e-2)", "schedule-free-sgd(lr=0.1)"]


def trained(name: str, strategy: str, batch: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(24, 6), nn.Linear(6, 2))
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 1, 6, 6), torch.randn(64, 2))
    trainer = hocket.Trainer(
        model=model, loss=nn.functional.mse_loss, optimizer=name, duration="1ep", strategy=strategy, device="cpu",
        train_data=torch.utils.data.DataLoader(dataset, batch),
    )  # fmt: skip
    trainer.fit()
    return trainer.model_state_dict(evaluated=True)


def on_ranks(rank: int, strategy: str) -> list[dict[str, Tensor]]:
    return [trained(name, strategy, 16) for name in NAMES]


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_two_ranks_train_as_one(strategy: str) -> None:
    pytest.importorskip("hocket_strategies")
    for name, got in zip(NAMES, run_ranks(on_ranks, 2, strategy)[0], strict=True):
        expected = trained(name, "single", 32)
        for key, value in expected.items():
            torch.testing.assert_close(
                got[key], value, atol=1e-3 if "muon" in name else 1e-5, rtol=0, msg=f"{name}: {key}"
            )


def resumed_on_ranks(rank: int, folder: str) -> list[str]:
    """Return the optimizers whose run on shards differs after a resume from a sharded checkpoint within an epoch."""
    different = []
    for number, name in enumerate(NAMES):

        def make(part: str, name: str = name, number: int = number, **more) -> hocket.Trainer:
            torch.manual_seed(0)
            dataset = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
            loader = torch.utils.data.DataLoader(dataset, 4)
            model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
            return hocket.Trainer(
                model=model, loss=nn.functional.mse_loss, optimizer=name, duration="2ep", strategy="fsdp", device="cpu",
                train_data=loader, eval_data=loader, seed=3, folder=f"{folder}/{number}-{part}", **more,
            )  # fmt: skip

        kept = f"{folder}/{number}-kept"
        whole = make("whole", checkpoints=hocket.Checkpoints(kept, every="3ba", keep=None))
        loss = whole.fit().metrics["eval/loss"]
        again = make("again", resume=f"{kept}/ep0-ba3")
        again.fit()
        weights = [list(each.model_state_dict(evaluated=True).values()) for each in (whole, again)]
        same = all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
        if not same or again.evaluate(checkpoint=f"{kept}/latest")["eval/loss"] != loss:
            different.append(name)
    return different


@pytest.mark.long
def test_sharded_checkpoints_resume_bitwise(tmp_path) -> None:
    pytest.importorskip("hocket_strategies")
    assert run_ranks(resumed_on_ranks, 2, str(tmp_path), timeout=120) == [[], []]

"""float16 with loss scaling equals torch.amp.GradScaler by hand, bit for bit, overflows included."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket_strategies import FP16
from hocket_testkit.ranks import run_ranks


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def batches(number=12, size=8):
    generator = torch.Generator().manual_seed(number)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(number)
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=0.01)


def trainer(folder, precision=None, **changes):
    return hocket.Trainer(
        **{
            "model": network(),
            "loss": F.cross_entropy,
            "train_data": batches(),
            "optimizer": sgd,
            "precision": precision or FP16(),
            "strategy": "single",
            "device": "cpu",
            "duration": "1ep",
            "folder": folder,
            **changes,
        }
    )


class Watch(hocket.Callback):
    """What was logged after each batch, and the learning rate."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.skipped: list[int] = []
        self.rates: list[float] = []

    def batch_end(self, state):
        self.scales.append(float(state.logged["precision/loss_scale"]))
        self.skipped.append(int(state.logged["precision/skipped_steps"]))
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


class Overflow(hocket.Algorithm):
    """Makes a gradient infinite on the backward passes of these numbers, counted from 0."""

    events = {hocket.Event.AFTER_BACKWARD}

    def __init__(self, *passes: int) -> None:
        self.passes, self.now = passes, -1

    def apply(self, event, state):
        self.now += 1
        if self.now in self.passes:
            state.parameters[0].grad.view(-1)[0] = math.inf


def by_hand(data, *, init_scale, interval, clip=None, pieces=1, schedule=None):
    """A plain loop. Returns the model, the scale after every batch, and whether its step was taken."""
    model = network()
    optimizer = sgd(model.parameters())
    scheduler = schedule and schedule(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=interval)
    scales, taken = [], []
    for inputs, targets in data:
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * (1 / pieces) if pieces > 1 else loss).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        taken.append(scales[-1] >= before)
        if scheduler and taken[-1]:
            scheduler.step()
    return model, scales, taken


def same(model, expected):
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**22])
def test_training_equals_grad_scaler_by_hand(tmp_path, clip, pieces, init_scale):
    """With clipping after unscaling, microbatches, and at the larger scale with overflows at the beginning."""

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)

    expected, scales, taken = by_hand(
        batches(), init_scale=init_scale, interval=4, clip=clip, pieces=pieces, schedule=schedule
    )
    assert (False in taken) == (init_scale > 2**20) and True in taken
    watch = Watch()
    run = trainer(
        tmp_path,
        FP16(init_scale=init_scale, growth_interval=4),
        clip_gradients=clip,
        microbatch=8 // pieces if pieces > 1 else None,
        schedule=schedule,
        callbacks=[watch],
    )
    run.fit()
    same(run.state.model, expected)
    assert watch.scales == scales
    assert watch.skipped[-1] == taken.count(False) == run.state.precision.skipped_steps
    steps = [sum(taken[: number + 1]) for number in range(len(taken))]
    assert watch.rates == pytest.approx([0.3 * 0.7 ** (step // 2) for step in steps], rel=1e-12)


def test_the_scale_follows_the_formula(tmp_path):
    """Half after an overflow, twice after three steps in a row without; the count begins anew after either."""
    bad = (2, 3, 7)
    scale, good, expected = 1024.0, 0, []
    for batch in range(12):
        good = 0 if batch in bad else good + 1
        if batch in bad:
            scale *= 0.25
        elif good == 3:
            scale, good = scale * 8, 0
        expected.append(scale)
    watch = Watch()
    precision = FP16(init_scale=1024, growth_factor=8, backoff_factor=0.25, growth_interval=3)
    trainer(tmp_path, precision, algorithms=[Overflow(*bad)], callbacks=[watch]).fit()
    assert watch.scales == expected
    assert watch.skipped == [sum(each <= batch for each in bad) for batch in range(12)]


def test_a_skipped_step_changes_no_weight_and_no_learning_rate(tmp_path):
    class Weights(Watch):
        def __init__(self):
            super().__init__()
            self.weights = []

        def batch_end(self, state):
            super().batch_end(state)
            self.weights.append(copy.deepcopy(state.model.state_dict()))

    watch = Weights()
    trainer(tmp_path, algorithms=[Overflow(5)], callbacks=[watch], schedule="cosine").fit()
    for before, after in zip(watch.weights[4].values(), watch.weights[5].values(), strict=True):
        assert torch.equal(before, after)
    assert watch.rates[5] == watch.rates[4] and watch.rates[6] < watch.rates[5]
    assert not torch.equal(watch.weights[6]["0.weight"], watch.weights[5]["0.weight"])


def test_what_overflows_in_one_optimizer_holds_the_others_back(tmp_path):
    """Their gradients are clipped together, by a norm that is infinite then."""

    def two(parameters):
        parameters = list(parameters)
        return [sgd(parameters[:2]), torch.optim.AdamW(parameters[2:], lr=1e-2)]

    expected = network()
    optimizers = two(expected.parameters())
    for number, (inputs, targets) in enumerate(batches()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(expected(inputs), targets)
        (loss * 4096.0).backward()
        for parameter in expected.parameters():
            parameter.grad /= 4096.0  # exact: a power of two
        nn.utils.clip_grad_norm_(expected.parameters(), 0.2)
        if number not in (0, 4):
            for optimizer in optimizers:
                optimizer.step()
    run = trainer(
        tmp_path,
        FP16(init_scale=4096, backoff_factor=1 - 1e-9, growth_interval=100),  # 4096 times that is 4096 in float32
        algorithms=[Overflow(0, 4)],
        optimizer=two(model_parameters := list((model := network()).parameters())),
        model=model,
        clip_gradients=0.2,
    )
    assert len(run.state.optimizers) == 2 and len(model_parameters) == 6
    run.fit()
    same(model, expected)


def test_sharpness_aware_minimisation(tmp_path):
    """Two gradients a step: one that overflows leaves out the step, whichever it is, and the weights as they were."""
    sam = pytest.importorskip("hocket_general").SAM
    data = batches()
    expected = network()
    optimizer, scale, passes, bad = sgd(expected.parameters()), 2.0**12, -1, (2, 7)

    def gradients(inputs, targets):
        nonlocal passes
        passes += 1
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(expected(inputs), targets)
        (loss * scale).backward()
        for parameter in expected.parameters():
            parameter.grad /= scale
        return passes not in bad

    scales = []
    for batch in data:
        fine = gradients(*batch)
        if fine:
            weights = copy.deepcopy(expected.state_dict())
            norm = torch.stack([p.grad.norm() for p in expected.parameters()]).norm()
            with torch.no_grad():
                for parameter in expected.parameters():
                    parameter += parameter.grad * (0.05 / (norm + 1e-12))
            fine = gradients(*batch)
            expected.load_state_dict(weights)
        if fine:
            optimizer.step()
        else:
            scale /= 2
        scales.append(scale)
    assert scales[-1] == 2.0**10
    watch = Watch()
    run = trainer(
        tmp_path,
        FP16(init_scale=2.0**12),
        algorithms=[sam(rho=0.05), Overflow(*bad)],
        callbacks=[watch],
        train_data=data,
    )
    run.fit()
    assert watch.scales == scales
    torch.testing.assert_close(run.state.model.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)
    assert all(tensor.isfinite().all() for tensor in run.state.model.state_dict().values())


def test_an_optimizer_without_gradients_steps_too(tmp_path):
    """torch takes that for a mistake."""
    model = network()
    parameters = list(model.parameters())
    unused = model.unused = nn.Parameter(torch.ones(2))
    trainer(tmp_path, model=model, optimizer=[sgd(parameters), sgd([unused])]).fit()
    assert unused.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
def test_the_guard_leaves_overflows_to_the_scaler(tmp_path, policy, recwarn):
    """Nothing is raised, nor said, in the last batch either, whose gradients nothing comes after."""
    for clip in (None, 1.0):
        watch = Watch()
        run = trainer(tmp_path, algorithms=[Overflow(3, 11)], callbacks=[watch], nonfinite=policy, clip_gradients=clip)
        run.fit()
        assert watch.skipped[-1] == 2 and watch.scales[-1] == 2.0**14
    assert not [warning for warning in recwarn if "finite" in str(warning.message)]


def test_a_loss_that_is_not_finite_is_not_the_scalers_affair(tmp_path):
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets) * math.inf

    with pytest.raises(FloatingPointError, match="the latest loss is inf"):
        trainer(tmp_path, loss=loss).fit()
    run = trainer(tmp_path, loss=loss, nonfinite="skip")
    before = copy.deepcopy(run.state.model.state_dict())
    with pytest.warns(RuntimeWarning, match="the batch is skipped"):
        run.fit()
    torch.testing.assert_close(run.state.model.state_dict(), before, rtol=0, atol=0)


def test_gradients_that_are_never_finite_are_an_error(tmp_path):
    """Three batches: 8, 4 and 2 are scales, 1 is below the least."""
    run = trainer(tmp_path, FP16(init_scale=8, min_scale=2), algorithms=[Overflow(*range(12))])
    with pytest.raises(FloatingPointError, match=r"has fallen to 2: .*precision='bf16'") as raised:
        run.fit()
    assert raised.value.__notes__ == ["That was in batch 2."]


def test_a_batch_that_is_left_out_leaves_the_scale_alone(tmp_path):
    class Leave(hocket.Callback):
        def batch_start(self, state):
            if state.timestamp.batch == 2:
                state.request(hocket.Decision.SKIP_BATCH)

    run = trainer(tmp_path, FP16(init_scale=64, growth_interval=11), callbacks=[Leave()])
    run.fit()
    assert run.state.precision.state_dict() == {"loss_scale": 128.0, "good_steps": 0, "skipped_steps": 0}


def test_a_state_is_taken_over(tmp_path):
    """Ten batches, saved and loaded after six, are ten batches in one go."""
    whole, first, second = Watch(), Watch(), Watch()
    bad = (1, 7)

    def make(watch, **changes):
        return trainer(tmp_path, FP16(init_scale=512, growth_interval=3), callbacks=[watch], duration="12ba", **changes)

    make(whole, algorithms=[Overflow(*bad)]).fit()
    one = make(first, algorithms=[Overflow(*bad)])
    one.fit("6ba")
    saved = pickle.loads(pickle.dumps(one.state.precision.state_dict()))
    assert saved == {"loss_scale": 512.0, "good_steps": 1, "skipped_steps": 1}
    two = make(second, train_data=batches()[6:], algorithms=[Overflow(*(each - 6 for each in bad))])
    two.state.precision.load_state_dict(saved)
    two.state.model.load_state_dict(one.state.model.state_dict())
    two.fit("6ba")
    assert first.scales + second.scales == whole.scales
    assert second.skipped == whole.skipped[6:]


def test_ranks_agree(tmp_path):
    """A gradient that is infinite on one rank only holds both back; else they train what one process trains."""
    bad = (2, 5)

    def rank_main(rank):
        watch = Watch()
        run = trainer(
            tmp_path / str(rank),
            FP16(init_scale=256.0, growth_interval=100),
            strategy="ddp",
            train_data=DataLoader(TensorDataset(*map(torch.cat, zip(*batches(), strict=True)))),
            global_batch=8,
            algorithms=[OverflowOnRank(*bad)],
            callbacks=[watch],
        )
        run.fit()
        return watch.scales, run.model_state_dict()

    run = trainer(tmp_path, FP16(init_scale=256.0, growth_interval=100), algorithms=[Overflow(*bad)])
    run.fit()
    (scales, weights), (other_scales, other_weights) = run_ranks(rank_main, 2)
    assert scales == other_scales == [256.0, 256.0] + [128.0] * 3 + [64.0] * 7
    torch.testing.assert_close(weights, other_weights, rtol=0, atol=0)
    torch.testing.assert_close(weights, run.model_state_dict(), rtol=2e-2, atol=2e-3)


class OverflowOnRank(Overflow):
    def apply(self, event, state):
        self.now += 1
        if self.now in self.passes and state.strategy.rank == 1:
            state.parameters[0].grad.view(-1)[0] = math.inf


# --- what is refused


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_scale": 0},
        {"init_scale": math.inf},
        {"init_scale": 1, "min_scale": 2},
        {"min_scale": 0},
        {"growth_factor": 1},
        {"backoff_factor": 1},
        {"backoff_factor": 0},
        {"growth_interval": 0},
    ],
)
def test_arguments_out_of_range(arguments):
    with pytest.raises(ValueError, match="such as"):
        FP16(**arguments)


def test_optimizers_that_compute_gradients_themselves(tmp_path):
    with pytest.raises(ValueError, match=r"LBFGS computes gradients itself.*precision='bf16'"):
        trainer(tmp_path, optimizer=torch.optim.LBFGS)


def test_other_devices():
    precision = FP16()
    precision.device = torch.device("mps")
    with pytest.raises(ValueError, match=r"cpu and cuda, not on mps.*device='cpu'"):
        precision.convert_module(nn.Linear(2, 2))


def test_a_foreign_state():
    with pytest.raises(ValueError, match=r"'good_steps', 'loss_scale', 'skipped_steps'.*'scale'"):
        FP16().load_state_dict({"scale": 1.0})

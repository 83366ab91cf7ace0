"""What the Trainer offers: schedules, clipping, limits, policies, surgery with any optimizer, debugging switches."""

from __future__ import annotations

import copy
import math
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import make_data, make_trainer, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import hocket
from hocket import Decision


def memory() -> Any:
    return hocket.plugins.get("loggers", "memory")()


@pytest.fixture
def make() -> Callable[..., hocket.Trainer]:
    return lambda **changes: make_trainer(**{"train_data": make_data(96), "log_every": "1ba", **changes})


def rates(make: Any, **arguments: Any) -> list[float]:
    """The learning rate that each of 12 batches was trained with."""
    logger = memory()
    make(callbacks=["lr-monitor"], loggers=[logger], duration="4ep", **arguments).fit()
    return [value for _, value in logger.metrics["lr/group0"]]


# --- schedules


def test_a_schedule_is_a_function_of_time(make) -> None:
    got = rates(make, schedule="cosine(warmup=0.25dur)")
    expected = [0.1 * (t / 3 if t < 3 else (1 + math.cos(math.pi * (t - 3) / 9)) / 2) for t in range(12)]
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    "schedule",
    [lambda clock: clock.timestamp.batch / 12, lambda clock: clock.progress("4ep"), lambda clock: clock.now("ba") / 12],
)
def test_a_schedule_is_any_function_of_the_clock(make, schedule) -> None:
    assert rates(make, schedule=schedule) == pytest.approx([0.1 * t / 12 for t in range(12)])


def test_a_constant_function_is_a_schedule(make) -> None:
    assert rates(make, schedule=lambda clock: 0.5) == [0.05] * 12


@pytest.mark.parametrize(
    "schedule", [lambda optimizer: "cosine", lambda optimizer: optimizer.nothing, lr_scheduler.StepLR]
)
def test_other_functions_are_no_schedules(make, schedule) -> None:
    with pytest.raises((TypeError, AttributeError), match=r"number, or a function|no attribute 'nothing'|step_size"):
        make(schedule=schedule)


def test_a_parameter_group_that_is_added_later_has_a_base_rate_of_its_own(make, model) -> None:
    net = model()
    net[0].requires_grad_(False)

    class Unfreeze(hocket.Callback):
        def epoch_start(self, state: hocket.State) -> None:
            if state.timestamp.epoch == 1:
                net[0].requires_grad_(True)
                state.optimizers[0].add_param_group({"params": list(net[0].parameters()), "lr": 0.01})

    logger, before = memory(), net[0].weight.clone()
    make(
        model=net, optimizer=lambda parameters: sgd([p for p in parameters if p.requires_grad]), duration="4ep",
        schedule="linear", callbacks=["lr-monitor", Unfreeze()], loggers=[logger],
    ).fit()  # fmt: skip
    assert not torch.equal(before, net[0].weight)
    got = [value for _, value in logger.metrics["lr/group1"]]
    assert got[1:] == pytest.approx([0.01 * (1 - t / 12) for t in range(4, 12)])


@pytest.mark.parametrize("microbatch", [None, 8, 11])
@pytest.mark.parametrize(
    ("every", "steps_before"), [("1ba", lambda t: t), ("2ba", lambda t: t // 2), ("1ep", lambda t: t // 3)]
)
def test_torchs_schedulers_count_optimizer_steps(make, microbatch, every, steps_before) -> None:
    """Lightning 2.2-n: with accumulation, a frequency was compared with batches."""

    def factory(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.StepLR(optimizer, 1, 0.5)

    got = rates(make, schedule=factory, schedule_every=every, microbatch=microbatch)
    assert got == pytest.approx([0.1 * 0.5 ** steps_before(t) for t in range(12)])


def test_a_schedule_for_each_optimizer(make, model) -> None:
    net = model()
    logger = memory()
    make(
        model=net, optimizer=[sgd(net[0].parameters()), sgd(net[3].parameters())], schedule=["constant(alpha=0.5)", "linear"],
        callbacks=["lr-monitor"], loggers=[logger],
    ).fit()  # fmt: skip
    assert [v for _, v in logger.metrics["lr/optimizer0/group0"]] == pytest.approx([0.05] * 6)
    assert [v for _, v in logger.metrics["lr/optimizer1/group0"]] == pytest.approx(
        [0.1 * (1 - t / 6) for t in range(6)]
    )


def test_the_share_of_the_duration_advances_with_every_batch(make) -> None:
    """S7: it advanced by epochs, and what was scheduled by it too. S8: what was to be reached at the end never was."""
    seen: list[float] = []

    class Watch(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            seen.append(state.elapsed())

    for duration in ("2ep", "6ba", "192sp"):
        seen.clear()
        make(callbacks=[Watch()], duration=duration).fit()
        assert seen == pytest.approx([t / 6 for t in range(1, 7)])
        assert seen[-1] == 1.0


# --- clipping


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        (0.05, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.05)),
        (("value", 0.01), lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.01)),
    ],
)
@pytest.mark.parametrize("microbatch", [None, 7])
def test_clipping_is_of_the_whole_batchs_gradient(make, data, model, given, reference, microbatch) -> None:
    theirs = model()
    optimizer = sgd(theirs.parameters())
    for _ in range(2):
        for inputs, targets in (loader := data(96)):
            optimizer.zero_grad()
            F.cross_entropy(theirs(inputs), targets).backward()
            reference(theirs)
            optimizer.step()
        assert loader is not None
    order = data(96)
    batches = [batch for _ in range(1) for batch in order]
    ours = model()
    make(model=ours, train_data=batches, clip_gradients=given, microbatch=microbatch).fit()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_adaptive_clipping_does_not_freeze_what_begins_at_zero(make, model) -> None:
    """S16."""
    net = model()
    nn.init.zeros_(net[3].weight)
    make(model=net, clip_gradients=("adaptive", 0.1)).fit()
    assert net[3].weight.abs().min() > 0


# --- losses that are not finite


@pytest.mark.filterwarnings("default:Not finite")
@pytest.mark.parametrize("policy", ["skip", "warn"])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_policies_for_what_is_not_finite(make, policy, what) -> None:
    class Inject(hocket.Callback):
        def after_loss(self, state: hocket.State) -> None:
            if state.timestamp.batch == 2:
                bad = state.loss * float("nan") if what == "loss" else _NaNGradient.apply(state.loss)
                state.loss = bad

    steps: list[int] = []

    class Count(hocket.Callback):
        @hocket.hookimpl(wrapper=True)
        def optimizer_step(self, state: hocket.State, closure: Any) -> Any:
            steps.append(state.timestamp.batch)
            return (yield)

    # The callback changes the loss, which callbacks should not; a test may.
    trainer = make(callbacks=[Inject(), Count()], nonfinite=policy, schedule="constant")
    with pytest.warns(RuntimeWarning, match=r"Not finite in (batch 2|the weights before batch 3)") as warned:
        trainer.fit()
    assert len(warned) == 1 or policy == "warn"
    finite = all(p.isfinite().all() for p in trainer.state.model.parameters())
    assert finite is (policy == "skip")
    assert (2 in steps) is (policy == "warn")
    assert trainer.state.timestamp.batch == 6


@pytest.mark.parametrize(("policy", "batches"), [("warn", 1), ("warn", 6), ("skip", 6), ("skip", 8)])
def test_a_run_that_has_diverged_warns_at_powers_of_two_and_tells_the_number(make, policy, batches) -> None:
    class Inject(hocket.Callback):
        def after_loss(self, state: hocket.State) -> None:
            state.loss = state.loss * float("nan")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(callbacks=[Inject()], nonfinite=policy, duration=f"{batches}ba").fit()
    texts = [str(each.message) for each in caught if "finite" in str(each.message)]
    told = [at for at in (1, 2, 4, 8) if at <= batches]
    assert [re.search(r"batch (\d+)", text)[1] for text in texts[: len(told)]] == [str(at - 1) for at in told]
    assert texts[len(told) :] == ([] if batches in told else [f"A loss or gradient was not finite {batches} times."])


def test_a_gradient_that_is_not_finite_is_an_error_even_in_the_last_batch(make) -> None:
    class Inject(hocket.Callback):
        def after_loss(self, state: hocket.State) -> None:
            state.loss = _NaNGradient.apply(state.loss)

    with pytest.raises(FloatingPointError, match="gradients of batch 0"):
        make(callbacks=[Inject()], duration="1ba", log_every="10ba").fit()


@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_gradients_that_a_precision_answers_for_are_left_to_it(make, policy, clip) -> None:
    """Batches 2 and 5, the last: no step, no word, no step of the schedule; the timestamp goes on."""

    class Scales(hocket.Precision):
        def check_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
            self.parameters = optimizer.param_groups[0]["params"]
            return True

        def overflowed(self, all_reduce: Any) -> bool:
            return any(not p.grad.isfinite().all() for p in self.parameters)

    class Inject(hocket.Callback):
        def after_loss(self, state: hocket.State) -> None:
            if state.timestamp.batch in (2, 5):
                state.loss = _NaNGradient.apply(state.loss)

    class Count(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            steps.append((schedule.last_epoch, [p.detach().clone() for p in state.parameters]))

    steps: list[Any] = []
    optimizer = sgd((model := make().state.model).parameters())
    schedule = lr_scheduler.ConstantLR(optimizer)
    trainer = make(
        model=model, precision=Scales(), optimizer=optimizer, schedule=schedule, callbacks=[Inject(), Count()],
        nonfinite=policy, clip_gradients=clip,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit()
    assert trainer.state.timestamp.batch == 6
    assert [taken for taken, _ in steps] == [1, 2, 2, 3, 4, 4]
    weights = [torch.cat([p.flatten() for p in each]) for _, each in steps]
    assert [torch.equal(one, other) for one, other in zip(weights[1:], weights, strict=False)] == [
        False, True, False, False, True,
    ]  # fmt: skip


class _NaNGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


# --- decisions


def test_decisions(make, data) -> None:
    evaluated: list[int] = []
    trained: list[int] = []

    class Ask(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            if state.timestamp.batch == 1:
                state.request(Decision.SKIP_BATCH)

        def before_train_batch(self, state: hocket.State) -> None:
            trained.append(state.timestamp.batch)

        def batch_end(self, state: hocket.State) -> None:
            if state.timestamp.batch == 2:
                state.request(Decision.EVALUATE)
            if state.timestamp.batch == 4:
                state.request(Decision.STOP, "enough")

        def eval_end(self, state: hocket.State) -> None:
            evaluated.append(state.timestamp.batch)

    trainer = make(callbacks=[Ask()], eval_data=data(8), eval_every=None)
    result = trainer.fit()
    assert (trained, evaluated) == ([0, 2, 3], [2])
    assert (result.timestamp.batch, result.stop_reason) == (4, "enough")
    progress = trainer.state.progress
    assert (progress.ready, progress.started, progress.processed, progress.completed) == (4, 4, 4, 4)
    assert trainer.fit().timestamp.batch == 6, "a later fit is not stopped"


def test_progress_says_where_an_exception_was(make) -> None:
    class Fail(hocket.Callback):
        def after_forward(self, state: hocket.State) -> None:
            if state.timestamp.batch == 2:
                raise RuntimeError("stop")

    trainer = make(callbacks=[Fail()])
    with pytest.raises(RuntimeError):
        trainer.fit()
    progress = trainer.state.progress
    assert (progress.ready, progress.started, progress.processed, progress.completed) == (3, 3, 2, 2)


# --- surgery and optimizers


class Image(nn.Module):
    """A strided convolution for BlurPool to find."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).mean((2, 3)))


def test_surgery_repairs_an_optimizer(make) -> None:
    net = Image()
    groups = [
        {"params": net.head.parameters(), "lr": 0.5},
        {"params": [*net.first.parameters(), *net.second.parameters()]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    batches = [(torch.randn(4, 1, 8, 8), torch.randint(3, (4,)))]
    trainer = make(model=net, optimizer=optimizer, train_data=batches, algorithms=["blurpool"])
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert held == set(net.parameters())
    before = [p.clone() for p in net.parameters()]
    trainer.fit()
    assert not any(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert "second" in str(trainer.plan()) and type(net.second) is not nn.Conv2d


def test_surgery_does_not_follow_training(make) -> None:
    """An optimizer that has state belongs to weights that surgery might replace."""

    class Swap(hocket.Algorithm):
        events = {hocket.Event.INIT}

        def apply(self, event: hocket.Event, state: hocket.State) -> None:
            from hocket.surgery import replace_modules

            state.replacements += replace_modules(
                state.model, {nn.Linear: lambda m, i: nn.Linear(m.in_features, m.out_features)}
            )

    net = Image()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(1, 1, 8, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="already has state"):
        make(model=net, optimizer=optimizer, algorithms=[Swap()])


def test_optimizers_by_name_and_from_the_task(make, data) -> None:
    assert isinstance(make(optimizer="adamw(lr=0.5)").state.optimizers[0], torch.optim.AdamW)
    assert make(optimizer={"sgd": {"lr": 0.25}}).state.optimizers[0].param_groups[0]["lr"] == 0.25

    class Task(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 3)
            nn.init.zeros_(self.net.weight)
            nn.init.zeros_(self.net.bias)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return F.cross_entropy(outputs, batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1)

    trainer = hocket.Trainer(model=Task(), train_data=data(), duration="1ep")
    trainer.fit()
    theirs = Task()
    optimizer = theirs.configure_optimizers()
    for batch in data():

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = theirs.loss(theirs(batch), batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert torch.equal(trainer.model_state_dict()["net.weight"], theirs.net.weight)
    assert set(trainer.model_state_dict()) == {"net.weight", "net.bias"}


class Sharp(torch.optim.SGD):
    """SAM in the step of an optimizer: it calls the closure twice if it gets one, and is plain SGD otherwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is None:
            return super().step()
        loss = torch.enable_grad()(closure)()
        self._moved(closure)
        return loss

    def _moved(self, closure: Any) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        weights = [p.clone() for p in parameters]
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.5)
        torch.enable_grad()(closure)()
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
        super().step()


class MovesFirst(Sharp):
    """It moves the weights before it calls the closure, through ``.data``, and must have one."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.data.mul_(1.1)
        loss = torch.enable_grad()(closure)()
        for parameter in parameters:
            parameter.data.div_(1.1)
        torch.optim.SGD.step(self)
        return loss


class Polyak(Sharp):
    """The size of a step follows from the loss, which the closure returns."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)() if closure is not None else None
        self.param_groups[0]["lr"] = 0.01 if loss is None else 0.1 * float(loss)
        return torch.optim.SGD.step(self)


class Once(Sharp):
    """It calls the closure once, before anything else, as most optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)() if closure is not None else None
        torch.optim.SGD.step(self)
        return loss


@pytest.mark.parametrize("profile", [False, True])
@pytest.mark.parametrize(("kind", "passes"), [(Sharp, 2), (MovesFirst, 2), (Polyak, 1), (Once, 1)])
def test_optimizers_that_call_a_closure_train_as_in_a_plain_loop(make, kind, passes, profile) -> None:
    generator, calls = torch.Generator().manual_seed(0), []
    data = [(torch.randn(4, 8, generator=generator), torch.arange(4) % 3) for _ in range(6)]
    theirs = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    ours = copy.deepcopy(theirs)
    ours[0].register_forward_pre_hook(lambda *given: calls.append(1))
    optimizer = kind(theirs.parameters(), lr=0.1)
    make(
        model=ours,
        train_data=data,
        optimizer=lambda parameters: kind(parameters, lr=0.1),
        duration="2ep",
        profile_plugins=profile,
    ).fit()
    for batch in data * 2:

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(theirs(batch[0]), batch[1])
            loss.backward()
            return loss

        if kind is MovesFirst and theirs[0].weight.grad is None:
            closure()  # it moves the weights only, so gradients need not be there
        optimizer.step(closure)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
    assert len(calls) == passes * 12


def test_parameters_that_no_optimizer_holds_gather_no_gradients(make, model) -> None:
    net = model()
    make(model=net, optimizer=sgd(net[0].parameters()), duration="3ba").fit()
    last = net[3].weight.grad.clone()
    one = model()
    one.load_state_dict(net.state_dict())
    assert last.norm() < 3, "of one batch, not of three"


# --- limits and switches


def test_limits(make, data) -> None:
    trainer = make(limit_train=2, eval_data=data(64, 8), limit_eval=3)
    seen: list[int] = []

    class Watch(hocket.Callback):
        def eval_batch_end(self, state: hocket.State) -> None:
            seen.append(state.timestamp.batch)

    trainer = make(limit_train=2, eval_data=data(64, 8), limit_eval=3, callbacks=[Watch()])
    assert trainer.fit().timestamp.batch == 4
    assert seen == [2, 2, 2, 4, 4, 4]


def test_a_fast_dev_run(make, data) -> None:
    result = make(fast_dev_run=2, eval_data=data(64, 8), duration="100ep").fit()
    assert result.timestamp.batch == 2 and "eval/loss" in result.metrics


def test_overfitting_repeats_the_same_batches(make) -> None:
    seen: list[torch.Tensor] = []

    class Watch(hocket.Callback):
        def after_dataloader(self, state: hocket.State) -> None:
            seen.append(state.batch[0])

    make(overfit=2, duration="3ep", callbacks=[Watch()]).fit()
    assert len(seen) == 6
    for epoch in (1, 2):
        assert torch.equal(seen[0], seen[2 * epoch]) and torch.equal(seen[1], seen[2 * epoch + 1])


def test_anomaly_detection_and_determinism_are_of_the_fit_only(make) -> None:
    seen: list[tuple[bool, bool]] = []

    class Watch(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            seen.append((torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(detect_anomaly=True, deterministic=True, callbacks=[Watch()], duration="1ba").fit()
    assert seen == [(True, True)]
    assert not torch.is_anomaly_enabled() and not torch.are_deterministic_algorithms_enabled()


def test_compile(make, model) -> None:
    """The same result, and plain names."""
    ours, theirs = model(), model()
    trainer = make(model=ours, compile={"backend": "aot_eager"}, duration="3ba")
    trainer.fit()
    make(model=theirs, duration="3ba").fit()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert set(trainer.model_state_dict()) == set(model().state_dict())


def test_bf16_trains_and_keeps_weights_in_32_bits(make, data) -> None:
    trainer = make(precision="bf16", eval_data=data(32))
    dtypes: set[torch.dtype] = set()

    class Watch(hocket.Callback):
        def after_forward(self, state: hocket.State) -> None:
            dtypes.add(state.outputs.dtype)

    trainer = make(precision="bf16", eval_data=data(32), callbacks=[Watch()])
    trainer.fit()
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in trainer.state.model.parameters()} == {torch.float32}


def test_a_callback_wraps_an_action(make) -> None:
    class Twice(hocket.Callback):
        """Doubles every loss, from outside."""

        @hocket.hookimpl(wrapper=True)
        def loss(self, state: hocket.State, outputs: Any, batch: Any) -> Any:
            loss = yield
            return loss._replace(value=loss.value * 2)

    once, twice = memory(), memory()
    make(duration="1ba", loggers=[once]).fit()
    trainer = make(duration="1ba", loggers=[twice], callbacks=[Twice()])
    trainer.fit()
    assert twice.metrics["train/loss"][0][1] == pytest.approx(2 * once.metrics["train/loss"][0][1])
    assert trainer.plan().actions == {"loss": ("twice",)}


def test_the_plan_names_what_a_strategy_wraps(make) -> None:
    """In the order in which they are seen to act, the outermost first."""
    acted = []

    class Counting(hocket.Strategy):
        """Counts optimizer steps."""

        @hocket.hookimpl(wrapper=True)
        def optimizer_step(self, state: hocket.State, closure: Any) -> Any:
            acted.append("counting")
            return (yield)

        def batch_end(self, state: hocket.State) -> None: ...

    class Around(hocket.Callback):
        @hocket.hookimpl(wrapper=True)
        def optimizer_step(self, state: hocket.State, closure: Any) -> Any:
            acted.append("around")
            return (yield)

    trainer = make(strategy=Counting(), callbacks=[Around()])
    trainer.fit("1ba")
    assert trainer.plan().actions == {"optimizer_step": tuple(acted)} == {"optimizer_step": ("around", "counting")}
    assert trainer.plan().events["batch_end"] == ("counting",)


def test_a_device_is_a_plug_in(make) -> None:
    class Mine(hocket.Device):
        def available(self) -> bool:
            return True

        def torch_device(self, local_rank: int) -> torch.device:
            return torch.device("cpu")

        def memory(self) -> dict[str, float]:
            return {"allocated": 7.0}

    hocket.plugins.register("devices", "mine", Mine)
    try:
        logger = memory()
        make(device="mine", callbacks=[{"memory-monitor": {"every": "1ba"}}], loggers=[logger], duration="1ba").fit()
        assert logger.metrics["memory/allocated"] == [(1, 7.0)]
    finally:
        hocket.plugins.unregister("devices", "mine")


def test_costs_are_accounted_for(make) -> None:
    result = make(callbacks=["lr-monitor"], algorithms=["sam"], profile_plugins=True).fit()
    assert result.costs["lr-monitor", "after_train_batch"].calls == 12, "SAM computes gradients twice"
    assert result.costs["sam", "optimizer_step"].calls == 6
    assert all(cost.seconds > 0 for cost in result.costs.values())


def test_the_length_of_an_epoch_is_learned_from_the_first(data, model) -> None:
    """Data without a length: from then on epochs advance by batch, and the last batch of a fit ends its epoch."""
    elapsed: list[float] = []

    class Watch(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            elapsed.append(state.elapsed())

    class Stream:
        def __iter__(self) -> Any:
            yield from data(96)

    trainer = hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=Stream(), optimizer=sgd, duration="2ep", callbacks=[Watch()]
    )
    with pytest.warns(UserWarning, match="has no length.*duration='2ep' stays at 0 until the first epoch") as caught:
        trainer.fit()
    assert len(caught) == 1, "once, not in each batch"
    assert trainer.state.epoch_length == 3
    assert elapsed == pytest.approx([0.0, 0.0, 0.0, 3 / 6, 4 / 6, 5 / 6])
    assert trainer.fit("3ba").timestamp.epoch == 3


class StopSoon(hocket.Callback):
    def batch_end(self, state: hocket.State) -> None:
        state.request(Decision.STOP)


@pytest.mark.parametrize(
    ("duration", "settings", "warns"),
    [
        ("1ep", {}, False),  # nothing asks
        ("1ep", {"eval_every": "0.5dur"}, True),
        ("1ep", {"callbacks": [StopSoon()], "min_duration": "0.5dur"}, True),
        ("6ba", {"eval_every": "0.5dur"}, False),
    ],
)
def test_fractions_of_epochs_of_unknown_length_warn(data, model, duration, settings, warns) -> None:
    """An interval in ``dur`` would come at the end only, without a word."""

    class Stream:
        def __iter__(self) -> Any:
            yield from data(192)

    trainer = hocket.Trainer(
        model=model(), loss=F.cross_entropy, train_data=Stream(), eval_data=data(32), optimizer=sgd, duration=duration,
        loggers=["progress"], **settings,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit()
    assert sum("has no length" in str(each.message) for each in caught) == warns


def test_outputs_are_let_go_after_the_batch(data, model) -> None:
    outputs: list[Any] = []

    class Watch(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            outputs.append(state.outputs)

    for microbatch in (None, 16):
        hocket.Trainer(
            model=model(),
            loss=F.cross_entropy,
            train_data=data(),
            optimizer=sgd,
            callbacks=[Watch()],
            microbatch=microbatch,
        ).fit("2ba")
    assert outputs == [None] * 4


class _Shorter(hocket.Algorithm):
    """Keeps half of the tokens of each sequence, and half of the sequences."""

    events = {hocket.Event.AFTER_DATALOADER}

    def apply(self, event, state) -> None:
        state.batch = {name: value[:2, :3] for name, value in state.batch.items()}


class _Sum(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(8, 1)

    def forward(self, batch):
        return self.layer(batch["input_ids"])

    def loss(self, outputs, batch):
        return outputs.mean()


@pytest.mark.parametrize("settings", [{}, {"accumulate": "2ba"}])
def test_tokens_are_counted_as_trained_on_and_samples_as_loaded(settings) -> None:
    """Samples are the position in the data; a duration in tokens is in tokens that the model has seen."""
    data = [{"input_ids": torch.zeros(4, 6, dtype=torch.long)}] * 4
    trainer = hocket.Trainer(
        model=_Sum(), train_data=data, optimizer=sgd, duration="1ep", algorithms=[_Shorter()], device="cpu", **settings
    )
    timestamp = trainer.fit().timestamp
    assert (timestamp.sample, timestamp.token) == (16, 24)


# --- memory


class Logits(nn.Module):
    """Says in the backward pass whether the logits are still in memory, of which the loss keeps a float32 copy."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16).bfloat16()
        self.logits: Any = None
        self.held: list[bool] = []
        self.head.weight.register_hook(lambda gradient: self.held.append(self.logits() is not None))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x.bfloat16())
        self.logits = weakref.ref(logits)
        return logits

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class LogitsTask(hocket.Task):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def train_batch(self, batch: Any, step: Any) -> None:
        step(lambda batch: F.cross_entropy(self.network(batch[0]).float(), batch[1]), batch)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"microbatch": 4}, {"accumulate": "2ba"}, {"train_metrics": "accuracy"}, {"algorithms": ["sam"]},
        {"algorithms": ["label-smoothing"]}, {"algorithms": ["mixup"]}, {"precision": "bf16"}, {"clip_gradients": 1.0},
        {"model": LogitsTask, "loss": None}, {"microbatch": "auto"},
    ],
    ids=str,
)  # fmt: skip
def test_the_backward_pass_begins_without_the_outputs(options: dict[str, Any], in_an_empty_folder: None) -> None:
    model = Logits()
    data = [(torch.randn(8, 8), torch.randint(16, (8,))) for _ in range(4)]
    options = {"loss": lambda outputs, targets: F.cross_entropy(outputs.float(), targets), **options}
    hocket.Trainer(
        **{**options, "model": options.get("model", lambda same: same)(model)}, train_data=data, duration="1ep",
        optimizer="sgd(lr=0.1)", device="cpu",
    ).fit()  # fmt: skip
    assert model.held and not any(model.held)

"""Every algorithm in a Trainer, against the loop that one would write by hand in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import make_trainer, momentum as sgd
from torch import Tensor, nn

import hocket
from hocket_general import EMA, SAM, GradientClipping, LabelSmoothing

Gradients = Callable[[Tensor, Tensor], Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))


def data(samples: int = 42, batch_size: int = 16) -> list[list[Tensor]]:
    """Batches are lists, so that one that was written into would show it; the last is smaller."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(samples, 8, generator=generator), torch.randint(3, (samples,), generator=generator)
    return [[x, y] for x, y in zip(inputs.split(batch_size), targets.split(batch_size), strict=True)]


def trainer(model: nn.Module, *algorithms: Any, **changes: Any) -> hocket.Trainer:
    arguments = {"train_data": data(), "optimizer": sgd, "duration": "3ep", "device": "cpu", "algorithms": algorithms}
    return make_trainer(model=model, **{**arguments, **changes})


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def by_hand(
    model: nn.Module,
    loss: Gradients = F.cross_entropy,
    before_step: Callable[[Callable[[], None]], None] = lambda again: None,
    epochs: int = 3,
) -> Iterator[nn.Module]:
    """Train, and hand the model out after every step. ``before_step`` may compute the gradients again."""
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        for inputs, targets in data():

            def gradients(inputs: Tensor = inputs, targets: Tensor = targets) -> None:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()

            gradients()
            before_step(gradients)
            optimizer.step()
            yield model


def finish(steps: Iterator[nn.Module]) -> dict[str, Tensor]:
    *_, last = steps
    return last.state_dict()


def assert_same(ours: nn.Module, theirs: dict[str, Tensor], exact: bool = True) -> None:
    assert ours.state_dict().keys() == theirs.keys()
    for name, value in ours.state_dict().items():
        if exact:
            assert torch.equal(value, theirs[name]), name
        else:
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


# --- label smoothing


def test_label_smoothing_trains_as_torchs_argument_does():
    model = network()
    trainer(model, LabelSmoothing(0.2)).fit()
    want = finish(by_hand(network(), lambda outputs, y: F.cross_entropy(outputs, y, label_smoothing=0.2)))
    assert_same(model, want, exact=False)


def test_label_smoothing_from_start_to_stop():
    ours = network()
    trainer(ours, LabelSmoothing(0.2, start="2ba", stop="0.5dur")).fit()  # 4.5 of 9 batches
    batch = iter(range(9))

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, label_smoothing=0.2 if 2 <= next(batch) < 5 else 0.0)

    assert_same(ours, finish(by_hand(network(), loss)), exact=False)


@pytest.mark.parametrize(
    "make", [lambda: LabelSmoothing(0.2, start="2ba", stop="7ba"), lambda: SAM(start="2ba", stop="7ba")]
)
def test_a_run_resumed_within_start_and_stop_is_bitwise_identical(make):
    states = {}

    class Keep(hocket.Callback):
        def batch_checkpoint(self, state: hocket.State) -> None:
            states[state.timestamp.batch] = copy.deepcopy(state.content.state_dict())

    whole = trainer(network(), make(), callbacks=[Keep()])
    whole.fit()
    for batch in (1, 2, 4, 7):
        resumed = trainer(network(), make())
        resumed.load_state_dict(states[batch])
        resumed.fit()
        assert_same(resumed.state.model, whole.model_state_dict())


def test_metrics_and_evaluation_see_the_targets_themselves():
    class Seen:
        def __init__(self) -> None:
            self.targets: list[Tensor] = []

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.targets.append(targets)

        def compute(self) -> float:
            return float(len(self.targets))

        def reset(self) -> None:
            pass

    train, evaluated = Seen(), Seen()
    given = data()
    run = trainer(
        network(), LabelSmoothing(), train_data=given, eval_data=data(), metrics=lambda: {"seen": evaluated},
        train_metrics=lambda: {"seen": train}, microbatch=4, duration="1ep",
    )  # fmt: skip
    result = run.fit()
    want = torch.cat([y for _, y in data()])
    assert torch.equal(torch.cat(train.targets), want) and torch.equal(torch.cat(evaluated.targets), want)
    assert all(torch.equal(y, z) for (_, y), (_, z) in zip(given, data(), strict=True))
    model = run.state.model.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in data()]
    assert result.metrics["eval/loss"] == pytest.approx(sum(losses).item() / 42, rel=1e-5)


@pytest.mark.parametrize("microbatch", [None, 5])
def test_the_logged_loss_is_the_smoothed_one(microbatch):
    logger = hocket.plugins.get("loggers", "memory")()
    plain = network()
    plain[2] = nn.Identity()  # the batch norm of a microbatch is another one
    model = copy.deepcopy(plain)
    trainer(model, LabelSmoothing(0.3), loggers=[logger], log_every="1ba", duration="1ba", microbatch=microbatch).fit()
    (_, value), = logger.metrics["train/loss"]  # fmt: skip
    inputs, targets = data()[0]
    assert value == pytest.approx(F.cross_entropy(plain(inputs), targets, label_smoothing=0.3).item(), rel=1e-5)


# --- gradient clipping


def torchs(kind: str, threshold: float) -> Callable[[nn.Module], None]:
    def clip(model: nn.Module) -> None:
        if kind == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), threshold)
        elif kind == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), threshold)
        else:  # Brock et al. 2021, equation 3, unit by unit
            for parameter in model.parameters():
                units = (
                    zip(parameter, parameter.grad, strict=True)
                    if parameter.dim() > 1
                    else [(parameter, parameter.grad)]
                )
                for weight, gradient in units:
                    limit = threshold * max(weight.detach().norm().item(), 1e-3)
                    if gradient.norm() > limit:
                        gradient.mul_(limit / gradient.norm())

    return clip


@pytest.mark.parametrize(("kind", "threshold"), [("norm", 0.3), ("value", 0.02), ("adaptive", 0.02)])
def test_clipping_trains_as_torchs_does(kind, threshold):
    ours, theirs = network(), network()
    trainer(ours, GradientClipping(kind, threshold)).fit()
    clip = torchs(kind, threshold)
    want = finish(by_hand(theirs, before_step=lambda again: clip(theirs)))
    assert_same(ours, want, exact=kind != "adaptive")
    plain = finish(by_hand(network()))
    assert not torch.equal(plain["0.weight"], want["0.weight"])


def test_several_clip_one_after_the_other_and_the_trainers_own_last():
    ours, theirs = network(), network()
    run = trainer(ours, GradientClipping("value", 0.02), GradientClipping("norm", 0.1), clip_gradients=("value", 0.01))
    run.fit()

    def clip(again: Callable[[], None]) -> None:
        torchs("value", 0.02)(theirs)
        torchs("norm", 0.1)(theirs)
        torchs("value", 0.01)(theirs)

    assert_same(ours, finish(by_hand(theirs, before_step=clip)))
    assert run.state.gradient_norm is not None  # of the second one


def test_clipping_leaves_out_what_no_optimizer_holds():
    """A gradient that nobody steps with does not shrink the others', as with the Trainer's clip_gradients."""
    models = network(), network()
    only = lambda model: lambda parameters: sgd(model[3].parameters())  # noqa: E731
    trainer(models[0], GradientClipping("norm", 0.1), optimizer=only(models[0])).fit()
    trainer(models[1], clip_gradients=0.1, optimizer=only(models[1])).fit()
    assert_same(models[0], models[1].state_dict())


# --- sharpness-aware minimisation


def sam_by_hand(model: nn.Module, rho: float) -> Callable[[Callable[[], None]], None]:
    """Foret et al. 2021, algorithm 1."""

    def ascend(again: Callable[[], None]) -> None:
        parameters = list(model.parameters())
        weights = [p.detach().clone() for p in parameters]
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
        with torch.no_grad():
            for p in parameters:
                p.add_(p.grad * (rho / norm))
        again()
        with torch.no_grad():
            for p, weight in zip(parameters, weights, strict=True):
                p.copy_(weight)

    return ascend


def test_sam_trains_as_two_steps_by_hand():
    ours, theirs = network(), network()
    trainer(ours, SAM(rho=0.2)).fit()
    assert_same(ours, finish(by_hand(theirs, before_step=sam_by_hand(theirs, 0.2))), exact=False)


def test_sam_with_an_interval_is_a_plain_loop_in_between():
    ours, theirs = network(), network()
    trainer(ours, SAM(rho=0.2, interval=3)).fit()
    batch, ascend = iter(range(1, 100)), sam_by_hand(theirs, 0.2)
    want = finish(by_hand(theirs, before_step=lambda again: ascend(again) if next(batch) % 3 == 0 else None))
    assert_same(ours, want, exact=False)


def test_sam_from_start_to_stop_is_a_plain_loop_before_and_after():
    ours, theirs = network(), network()
    trainer(ours, SAM(rho=0.2, start="2ba", stop="0.5dur")).fit()  # 4.5 of 9 batches
    batch, ascend = iter(range(9)), sam_by_hand(theirs, 0.2)
    want = finish(by_hand(theirs, before_step=lambda again: ascend(again) if 2 <= next(batch) < 5 else None))
    assert_same(ours, want, exact=False)


@pytest.mark.parametrize("algorithm", [SAM, LabelSmoothing])
def test_stop_comes_after_start(algorithm):
    with pytest.raises(ValueError, match="not after start"):
        algorithm(start="0.5dur", stop="0.5dur")


def test_sam_logs_the_losses_at_the_weights_themselves():
    model = network()
    logger = hocket.plugins.get("loggers", "memory")()

    def named(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"entropy": F.cross_entropy(outputs, targets), "size": outputs.square().mean()}

    plain = {name: value.item() for name, value in named(copy.deepcopy(model)(data()[0][0]), data()[0][1]).items()}
    trainer(model, SAM(rho=2.0), loss=named, loggers=[logger], log_every="1ba", duration="1ba").fit()
    for name, value in plain.items():
        assert logger.metrics[f"train/{name}"] == [(1, pytest.approx(value, rel=1e-5))]
    assert logger.metrics["train/loss"] == [(1, pytest.approx(sum(plain.values()), rel=1e-5))]


def test_sam_and_clipping_and_smoothing_together():
    """Both gradients are of the smoothed loss and both are clipped."""
    ours, theirs = network(), network()
    trainer(ours, SAM(rho=0.2), LabelSmoothing(0.1), GradientClipping("norm", 0.3)).fit()
    clip, ascend = torchs("norm", 0.3), sam_by_hand(theirs, 0.2)

    def before_step(again: Callable[[], None]) -> None:
        clip(theirs)
        ascend(lambda: (again(), clip(theirs))[0])

    smooth = lambda outputs, y: F.cross_entropy(outputs, y, label_smoothing=0.1)  # noqa: E731
    assert_same(ours, finish(by_hand(theirs, smooth, before_step)), exact=False)


def test_sam_refuses_optimizers_that_would_not_look_at_its_gradients():
    with pytest.raises(ValueError, match=r"LBFGS computes\s+gradients itself.*such as SGD or AdamW"):
        trainer(network(), SAM(), optimizer=torch.optim.LBFGS)


# --- exponential moving average


def averages_by_hand(smoothing: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The averages and the weights after training: the first step is a copy, the others a recursion."""
    averages: dict[str, Tensor] = {}
    for model in by_hand(network()):
        for name, value in model.state_dict().items():
            if name in averages and value.is_floating_point():
                averages[name] = smoothing * averages[name] + (1 - smoothing) * value
            else:
                averages[name] = value.clone()
    return averages, model.state_dict()


def test_ema_evaluates_the_recursion_and_trains_as_without():
    model = network()
    run = trainer(model, EMA(smoothing=0.8), eval_data=data())
    result = run.fit()
    averages, weights = averages_by_hand(0.8)
    assert_same(model, weights)
    torch.testing.assert_close(run.model_state_dict(evaluated=True), averages)
    averaged = network()
    averaged.load_state_dict(averages)
    averaged.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(averaged(x), y, reduction="sum") for x, y in data()]
        outputs = run.predict([x for x, _ in data()])
        for output, (x, _) in zip(outputs, data(), strict=True):
            torch.testing.assert_close(output, averaged(x))
    assert result.metrics["eval/loss"] == pytest.approx(sum(losses).item() / 42, rel=1e-5)
    assert run.evaluate(data())["eval/loss"] == result.metrics["eval/loss"]
    assert_same(model, weights)


class Interrupt(hocket.Callback):
    """Raises on the second call of a hook, whatever that is."""

    def __init__(self, hook: str, error: type[BaseException]) -> None:
        self._calls, self._error = 0, error
        setattr(self, hook, self._listen)

    def _listen(self, state: hocket.State) -> None:
        self._calls += 1
        if self._calls == 2:
            raise self._error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["eval_after_forward", "eval_batch_end", "predict_after_forward"])
def test_ema_gives_the_weights_back_whatever_ends_an_evaluation(hook, error):
    model = network()
    run = trainer(model, EMA(smoothing=0.8), callbacks=[Interrupt(hook, error)])
    run.fit()
    _, weights = averages_by_hand(0.8)
    with pytest.raises(error):
        run.evaluate(data())
        run.predict([x for x, _ in data()])
    assert_same(model, weights)
    run.fit("1ep")  # and goes on from there
    assert_same(model, finish(by_hand(network(), epochs=4)))


def test_evaluations_in_the_middle_of_an_epoch_change_nothing():
    model = network()
    trainer(model, EMA(smoothing=0.8), eval_data={"a": data(), "b": data(10)}, eval_every="2ba").fit()
    assert_same(model, averages_by_hand(0.8)[1])


def test_of_several_emas_evaluation_sees_the_first_and_the_weights_come_back():
    model = network()
    first, second, late = EMA(smoothing=0.8), EMA(smoothing=0.5), EMA(smoothing=0.1, start="1ep")
    run = trainer(model, late, first, second, eval_data=data(), eval_every="1ba")
    run.fit("2ba")
    seen = run.model_state_dict(evaluated=True)
    torch.testing.assert_close(seen, first.averaged(model))  # `late` has not begun
    run.fit("7ba")
    averages, weights = averages_by_hand(0.5)
    assert_same(model, weights)
    torch.testing.assert_close(second.averaged(model), averages)
    torch.testing.assert_close(run.model_state_dict(evaluated=True), late.averaged(model))
    assert_same(model, weights)


class Median(hocket.Algorithm):
    """What a stranger could write: evaluates with something else than EMA, and does not ask who else does."""

    events = {hocket.Event.EVAL_BEFORE_ALL, hocket.Event.EVAL_AFTER_ALL}
    phase = hocket.Phase.WEIGHTS

    def apply(self, event: hocket.Event, state: hocket.State) -> None:
        if event is hocket.Event.EVAL_BEFORE_ALL:
            state.borrow(self, [(p, p.median().expand_as(p)) for p in state.model.parameters()])
        else:
            state.give_back(self)


def test_ema_makes_way_for_a_stranger_and_is_named_where_that_one_does_not():
    model = network()
    first = trainer(model, Median(), EMA(smoothing=0.8))
    first.fit("3ba")
    before = copy.deepcopy(model.state_dict())
    alone = trainer(copy.deepcopy(model), Median()).evaluate(data())
    assert first.evaluate(data()) == alone  # not of the averages
    assert_same(model, before)

    second = trainer(network(), EMA(smoothing=0.8), Median())
    second.fit("3ba")
    with pytest.raises(
        hocket.plugins.ConflictError, match=r"algorithm 'median' cannot put .* while algorithm 'ema' has"
    ):
        second.evaluate(data())
    assert_same(second.state.model, before)
    second.fit("1ba")  # and goes on


def test_ema_of_a_state_that_was_loaded_goes_on_exactly():
    """The state of the algorithm and the weights, without which no averages can be resumed."""
    whole = network()
    uninterrupted = trainer(whole, EMA(half_life="3ba"))
    uninterrupted.fit()
    first = trainer(network(), ema := EMA(half_life="3ba"))
    first.fit("1ep")
    state = copy.deepcopy((ema.state_dict(), first.state.optimizers[0].state_dict(), first.model_state_dict()))

    model = network()
    second = trainer(model, ema := EMA(half_life="3ba"))
    model.load_state_dict(state[2])
    second.state.optimizers[0].load_state_dict(state[1])
    second.state.timestamp.load_state_dict(first.state.timestamp.state_dict())
    ema.load_state_dict(state[0])
    second.fit("2ep")
    assert_same(model, whole.state_dict())
    ours, theirs = (run.model_state_dict(evaluated=True) for run in (second, uninterrupted))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("algorithm", [EMA(smoothing=0.5), SAM(), LabelSmoothing(), GradientClipping("norm", 0.1)])
def test_bf16_autocast(algorithm):
    model = network()
    run = trainer(model, algorithm, precision="bf16", eval_data=data(), microbatch=6)
    before = copy.deepcopy(model.state_dict())
    loss = run.evaluate()["eval/loss"]
    assert run.fit().metrics["eval/loss"] < loss
    assert all(value.dtype == before[name].dtype for name, value in model.state_dict().items())

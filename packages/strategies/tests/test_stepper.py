"""`Runtime.stepper`: the steps of a custom loop, against the same loop in plain PyTorch."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import hocket
from hocket_testkit import run_ranks
from hocket_testkit.ranks import RankError

SIZE, CLIP = 7, 0.5


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def real_or_not(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


class Nets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator, self.critic = mlp(4, 6), mlp(6, 1)

    def optimizers(self) -> dict[str, Optimizer]:
        parts = {"generator": self.generator, "critic": self.critic}
        return {name: Adam(part.parameters(), lr=0.01) for name, part in parts.items()}


#: A step: the loss function, its batch, and the optimizer's name.
Step = Callable[[Callable[[Any], Any], Any, str], Any]


def dcgan(nets: Nets, batch: Any, step: Step, number: int) -> None:
    def critic_loss(batch: Any) -> Tensor:
        return real_or_not(nets.critic(batch["real"]), True) + real_or_not(nets.critic(batch["fake"]), False)

    def generator_loss(batch: Any) -> Tensor:
        return real_or_not(nets.critic(batch["fake"]), True)

    fake = nets.generator(batch["z"])
    step(critic_loss, {"real": batch["real"], "fake": fake.detach()}, "critic")
    step(generator_loss, {"fake": fake}, "generator")


def wgan_gp(nets: Nets, batch: Any, step: Step, number: int) -> None:
    def critic_loss(batch: Any) -> dict[str, Tensor]:
        fake = nets.generator(batch["z"]).detach()
        between = (batch["mix"] * batch["real"] + (1 - batch["mix"]) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(nets.critic(between).sum(), between, create_graph=True)
        distance = nets.critic(fake).mean() - nets.critic(batch["real"]).mean()
        return {"distance": distance, "penalty": 10 * ((slope.norm(2, 1) - 1) ** 2).mean()}

    def generator_loss(batch: Any) -> Tensor:
        return -nets.critic(nets.generator(batch["z"])).mean()

    step(critic_loss, batch, "critic")
    if number % 3 == 2:
        step(generator_loss, {"z": batch["z"]}, "generator")


LOOPS = [dcgan, wgan_gp]


def batches() -> list[dict[str, Tensor]]:
    """Three ranks have slices of 3, 2 and 2 samples, of the last batch 1, 1 and none."""
    generator = torch.Generator().manual_seed(4)
    drawn: list[dict[str, Tensor]] = []
    for size in (*[SIZE] * 8, 2):
        real = torch.randn(size, 6, generator=generator) + 1
        noise, mix = torch.randn(size, 4, generator=generator), torch.rand(size, 1, generator=generator)
        drawn.append({"real": real, "z": noise, "mix": mix})
    return drawn


def by_hand(loop: Any, half: bool = False) -> dict[str, Tensor]:
    nets = Nets()
    optimizers = nets.optimizers()
    scalers = {name: torch.amp.GradScaler("cpu", enabled=half) for name in optimizers}

    def context() -> Any:
        return torch.autocast("cpu", dtype=torch.float16) if half else nullcontext()

    def step(loss_function: Any, batch: Any, name: str) -> None:
        nets.zero_grad()
        with context():
            loss = loss_function(batch)
        loss = loss if isinstance(loss, Tensor) else torch.stack([*loss.values()]).sum()
        scalers[name].scale(loss).backward()
        scalers[name].unscale_(optimizers[name])
        torch.nn.utils.clip_grad_norm_([p for p in optimizers[name].param_groups[0]["params"]], CLIP)
        scalers[name].step(optimizers[name])
        scalers[name].update()

    for number, batch in enumerate(batches()):
        loop(nets, batch, step, number)
    return {name: value.detach() for name, value in nets.state_dict().items()}


def trained(loop: Any, microbatch: int | None = None, **options: Any) -> dict[str, Tensor]:
    runtime = hocket.Runtime(device="cpu", **options)
    nets = Nets()
    model, generator, critic = runtime.setup(nets, *nets.optimizers().values())
    step = runtime.stepper(model, generator=generator, critic=critic, microbatch=microbatch, clip=CLIP)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Every rank reads all of the list")
        data = runtime.setup_data(batches(), global_batch=None if runtime.world_size == 1 else SIZE)
    for number, batch in enumerate(data):
        loop(nets, batch, step, number)
    return runtime.model_state(model)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_same_bits_as_by_hand(loop: Any) -> None:
    assert difference(trained(loop), by_hand(loop)) == 0
    assert difference(by_hand(loop), {name: value.detach() for name, value in Nets().state_dict().items()}) > 1e-3


@pytest.mark.parametrize("loop", LOOPS)
def test_the_same_weights_in_microbatches(loop: Any) -> None:
    assert difference(trained(loop, microbatch=3), by_hand(loop)) < 2e-6


def test_each_step_has_a_loss_scale() -> None:
    """At first the scale overflows, in some steps and not in others."""
    assert difference(trained(dcgan, precision="fp16"), by_hand(dcgan, half=True)) == 0


@pytest.mark.parametrize("microbatch", [pytest.param(None, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "loop, strategy, ranks",
    [
        (dcgan, "ddp", 3),
        pytest.param(wgan_gp, "ddp", 2, marks=pytest.mark.long),
        (wgan_gp, {"fsdp": {"wrap": ["Sequential"]}}, 2),
    ],
)
def test_the_same_weights_over_ranks(loop: Any, strategy: Any, ranks: int, microbatch: int | None) -> None:
    """Each has a slice of each batch."""
    first, *others = run_ranks(lambda rank: trained(loop, microbatch, strategy=strategy), ranks)
    assert all(difference(first, each) == 0 for each in others)
    assert difference(first, by_hand(loop)) < 2e-6


@pytest.mark.parametrize("precision", ["fp32", pytest.param({"fp16": {"init_scale": 16.0}}, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_loss_functions_may_call_the_model_that_setup_returned(strategy: str, precision: Any) -> None:
    """Under ddp, the model outside of steps waits for gradients of all parameters. Optimizers without names are numbered."""

    def halves(net: nn.Sequential) -> list[Optimizer]:
        return [SGD(net[0].parameters(), lr=0.1), SGD(net[2].parameters(), lr=0.1)]

    def rank(number: int) -> dict[str, Tensor]:
        runtime = hocket.Runtime(device="cpu", strategy=strategy, precision=precision)
        torch.manual_seed(3)
        net = mlp(6, 1)
        model, *optimizers = runtime.setup(net, *halves(net))
        step = runtime.stepper(model, *optimizers, microbatch=2)
        for count, inputs in enumerate(DATA):
            mine = inputs[number::2] if runtime.world_size == 2 else inputs
            result = step(lambda part: model(part).square().mean(), mine, str(count % 2))
            assert result.taken and result.loss.dtype is torch.float32
        return runtime.model_state(model)

    torch.manual_seed(3)
    plain = mlp(6, 1)
    optimizers = halves(plain)
    for count, inputs in enumerate(DATA):
        plain.zero_grad()
        plain(inputs).square().mean().backward()
        optimizers[count % 2].step()
    for weights in run_ranks(rank, 1 if strategy == "single" else 2):
        assert difference(weights, dict(plain.state_dict())) < (2e-6 if precision == "fp32" else 3e-3)


DATA = list(torch.randn(4, SIZE, 6, generator=torch.Generator().manual_seed(5)))


def test_steps_and_backward_in_one_loop() -> None:
    """Each has a loss scale; the step overflows, which halves its scale and skips it."""
    runtime = hocket.Runtime(device="cpu", precision={"fp16": {"init_scale": 16.0}})
    model, optimizer = runtime.setup(net := mlp(6, 1), SGD(net.parameters(), lr=0.1))
    step = runtime.stepper(model, all=optimizer)

    def overflowing(batch: Tensor) -> Tensor:
        return _Infinite.apply(model(batch)).mean()

    before = net[0].weight.detach().clone()
    assert not step(overflowing, DATA[0], "all").taken and torch.equal(net[0].weight, before)
    scales = runtime.precision.state_dict()
    assert (scales["loss_scale"], scales["steps"]["all"]["loss_scale"]) == (16.0, 8.0)
    runtime.backward(model(DATA[0]).mean())
    assert net[0].weight.grad is not None
    plain = torch.autograd.grad(net(DATA[0]).mean(), net[0].weight)[0]
    torch.testing.assert_close(net[0].weight.grad / 16, plain, rtol=1e-2, atol=1e-3)
    assert runtime.step(optimizer) and not torch.equal(net[0].weight, before)


class _Infinite(torch.autograd.Function):
    """Has a finite value and an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


def test_a_killed_loop_resumes_bitwise(tmp_path: Path) -> None:
    """With scales that still overflow where it was saved."""

    def loop(begin: int, folder: Path, kill: bool) -> dict[str, Tensor]:
        runtime = hocket.Runtime(device="cpu", precision="fp16")
        nets = Nets()
        model, generator, critic = runtime.setup(nets, *nets.optimizers().values())
        step = runtime.stepper(model, generator=generator, critic=critic, clip=CLIP)
        things = {"model": model, "generator": generator, "critic": critic}
        if begin:
            runtime.load(folder / str(begin), **things)
        for number, batch in enumerate(batches()):
            if number >= begin:
                dcgan(nets, batch, step, number)
                runtime.save(folder / str(number + 1), **things)
                if kill and number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
        return runtime.model_state(model)

    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(lambda rank: loop(0, tmp_path, kill=True), 1)
    expected = by_hand(dcgan, half=True)
    for begin in (1, 2, 3):  # after the first step of each network scales have overflowed
        assert (
            difference(loop(begin, tmp_path, kill=False) if begin == 3 else loop(begin, tmp_path, False), expected) == 0
        )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_loss_that_is_not_finite_is_refused_or_skipped(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that computes asynchronously, as a CPU pretends to here, reports it ten steps later or at a save."""

    def start(nonfinite: str) -> Any:
        runtime = hocket.Runtime(device="cpu")
        monkeypatch.setattr(type(runtime.device_kind), "asynchronous", asynchronous)
        model, optimizer = runtime.setup(net := mlp(6, 1), SGD(net.parameters(), lr=0.1))
        return runtime, net, runtime.stepper(model, all=optimizer, nonfinite=nonfinite)

    runtime, net, step = start("raise")
    bad = lambda part: net(part).mean() * float("nan")  # noqa: E731
    if asynchronous:
        step(bad, DATA[0])
        with pytest.raises(FloatingPointError, match=r"a step before 1, within the last 10 steps.*clip=1\.0"):
            runtime.save(tmp_path / "a", step=1)
        runtime, net, step = start("raise")
        with pytest.raises(FloatingPointError, match="a step before 10"):
            for number in range(10):
                assert number < 10 and step(bad, DATA[0])
    else:
        with pytest.raises(FloatingPointError, match=r"not finite in step 0 \(all\): the latest loss is nan"):
            step(bad, DATA[0], "all")
    runtime, net, step = start("skip")
    with pytest.warns(RuntimeWarning, match="in step 0.*the step is skipped"):
        assert not step(bad, DATA[0]).taken
    assert step(lambda part: net(part).mean(), DATA[0]).taken


def test_a_task_counts_splits_and_joins_its_batches() -> None:
    """Here a hidden state of shape (layers, samples, features), in batches with time as dimension 0."""

    class Recurrent(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.rnn, self.out = nn.GRU(3, 5), nn.Linear(5, 3)

        def count(self, batch: Any) -> int:
            return int(batch.size(1))

        def split(self, batch: Any, size: int) -> Any:
            return list(batch.split(size, 1))

        def join(self, parts: Any) -> Any:
            return torch.cat(parts, 1)

        def text_loss(self, text: Tensor, hidden: Any) -> hocket.Loss:
            outputs, hidden = self.rnn(text[:-1], hidden)
            return hocket.Loss(F.mse_loss(self.out(outputs), text[1:]), kept=hidden)

    texts = torch.randn(4, 7, SIZE, 3, generator=torch.Generator().manual_seed(6))
    runtime = hocket.Runtime(device="cpu")
    task, plain = Recurrent(), Recurrent()
    model, optimizer = runtime.setup(task, SGD(task.parameters(), lr=0.1))
    step = runtime.stepper(model, optimizer, microbatch=3)
    expected = SGD(plain.parameters(), lr=0.1)
    carried = hidden = None
    for text in texts:
        carried = step(task.text_loss, text, carry=carried).kept
        plain.zero_grad()
        loss = plain.text_loss(text, hidden)
        loss.value.backward()
        expected.step()
        hidden = loss.kept.detach()
    assert difference(dict(task.state_dict()), dict(plain.state_dict())) < 2e-6
    torch.testing.assert_close(carried, hidden, rtol=0, atol=2e-6)


def test_misuse_is_an_error_that_says_what_to_do() -> None:
    runtime = hocket.Runtime(device="cpu")
    nets = Nets()
    model, generator, critic = runtime.setup(nets, *nets.optimizers().values())
    other = mlp(6, 1)
    for wrong, error, said in (
        (lambda: runtime.stepper(nets, generator), TypeError, r"given Nets.*what setup returned"),
        (lambda: runtime.stepper(model), ValueError, r"given no optimizer.*stepper\(model, name=optimizer\)"),
        (lambda: runtime.stepper(model, generator, critic=critic), TypeError, "with and without names"),
        (
            lambda: runtime.stepper(model, SGD(other.parameters(), lr=1)),
            ValueError,
            "'0' holds 4 of 4 parameters.*ModuleDict",
        ),
        (lambda: runtime.stepper(model, lr=0.1), TypeError, r"given lr=0\.1, which is not an optimizer"),
        (lambda: runtime.stepper(model, generator, clip=0), ValueError, "clip=0 is neither a positive norm"),
        (
            lambda: runtime.stepper(model, generator, microbatch="auto"),
            ValueError,
            r"for hocket\.Trainer.*microbatch=8",
        ),
        (lambda: runtime.stepper(model, generator, nonfinite="stop"), ValueError, "nonfinite='stop' is not a policy"),
    ):
        with pytest.raises(error, match=said):
            wrong()  # type: ignore[no-untyped-call]
    step = runtime.stepper(model, generator=generator, critic=critic)
    with pytest.raises(ValueError, match=r"'c'\) does not name an optimizer; there are 'generator', 'critic'"):
        step(lambda part: nets.critic(part).mean(), DATA[0], "c")
    nets.critic(DATA[0]).mean().backward()
    with pytest.raises(RuntimeError, match=r"backward\(\) was called before step.*runtime.step\(optimizer\)"):
        step(lambda part: nets.critic(part).mean(), DATA[0], "critic")
    nets.zero_grad()
    with pytest.raises(RuntimeError, match="is called in the training loop, not in a loss function"):
        step(lambda part: step(lambda inner: nets.critic(inner).mean(), part, "critic").loss, DATA[0], "critic")
    assert step(lambda part: nets.critic(part).mean(), DATA[0], "critic").taken
    assert all(parameter.grad is None and parameter.requires_grad for parameter in nets.parameters())


def test_a_part_called_outside_of_loss_functions_is_refused_where_it_is_sharded() -> None:
    with pytest.raises(RankError, match=r"A part of the model was called .*strategy='fsdp' has sharded"):
        run_ranks(lambda rank: trained(dcgan, strategy="fsdp"), 2)

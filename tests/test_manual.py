"""Steps by hand (`step.manual`) against the same loops in plain PyTorch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

import hocket
from hocket.basics.plugin_errors import PlanError
from hocket_testkit.ranks import RankError, run_ranks

BATCHES, SIZE = 6, 8


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Plain:
    """A plain loop's optimizers, autocast, and a loss scale for each optimizer."""

    def __init__(self, task: hocket.Task, half: bool) -> None:
        self.optimizers: dict[str, Optimizer] = task.configure_optimizers()
        self.half = half
        self.scalers = {name: torch.amp.GradScaler("cpu", enabled=half) for name in self.optimizers}
        self.losses: dict[str, list[float]] = {name: [] for name in self.optimizers}

    def loss(self, compute: Callable[[], Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16) if self.half else nullcontext():
            return compute()

    def backward(self, name: str, loss: Tensor) -> None:
        self.losses[name].append(float(loss.detach()))
        self.scalers[name].scale(loss).backward()

    def clip(self, name: str, norm: float) -> None:
        self.scalers[name].unscale_(self.optimizers[name])
        held = [parameter for group in self.optimizers[name].param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(held, norm)

    def step(self, name: str) -> None:
        self.scalers[name].step(self.optimizers[name])
        self.scalers[name].update()
        self.optimizers[name].zero_grad()


class GAN(hocket.Task):
    """A GAN as people write it by hand, with two backwards for the discriminator and clipping for the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(4, 6), mlp(6, 1)

    def configure_optimizers(self) -> Any:
        parts = {"generator": self.generator, "discriminator": self.discriminator}
        return {name: Adam(part.parameters(), lr=0.01) for name, part in parts.items()}

    def score(self, samples: Tensor, real: bool) -> Tensor:
        scores = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))

    def train_batch(self, batch: Any, step: Any) -> None:
        with step.manual("discriminator") as by_hand:
            by_hand.backward(self.score(batch[:, 4:], True))
            by_hand.backward(self.score(self.generator(batch[:, :4]).detach(), False))
            by_hand.step()
        with step.manual("generator") as by_hand:
            by_hand.backward(self.score(self.generator(batch[:, :4]), True))
            by_hand.clip(norm=0.01)
            by_hand.step()

    def by_hand(self, batch: Any, plain: Plain, number: int) -> None:
        plain.backward("discriminator", plain.loss(lambda: self.score(batch[:, 4:], True)))
        plain.backward("discriminator", plain.loss(lambda: self.score(self.generator(batch[:, :4]).detach(), False)))
        plain.step("discriminator")
        plain.backward("generator", plain.loss(lambda: self.score(self.generator(batch[:, :4]), True)))
        plain.clip("generator", 0.01)
        plain.step("generator")
        plain.optimizers["discriminator"].zero_grad()


class Accumulating(GAN):
    """The discriminator steps in every batch, the generator in every second, on the mean over both."""

    def train_batch(self, batch: Any, step: Any) -> None:
        step(self.discriminator_loss, batch, "discriminator")
        with step.manual("generator") as by_hand:
            by_hand.backward(self.score(self.generator(batch[:, :4]), True) / 2)
            if step.batch % 2:
                by_hand.step()

    def discriminator_loss(self, batch: Any) -> Tensor:
        return self.score(batch[:, 4:], True) + self.score(self.generator(batch[:, :4]).detach(), False)

    def by_hand(self, batch: Any, plain: Plain, number: int) -> None:
        waiting = [parameter.grad for parameter in self.generator.parameters()]
        plain.optimizers["discriminator"].zero_grad()
        plain.backward("discriminator", plain.loss(lambda: self.discriminator_loss(batch)))
        plain.step("discriminator")
        for parameter, gradient in zip(self.generator.parameters(), waiting, strict=True):
            parameter.grad = gradient
        plain.backward("generator", plain.loss(lambda: self.score(self.generator(batch[:, :4]), True) / 2))
        if number % 2:
            plain.step("generator")


class Several(hocket.Task):
    """Two losses of one forward pass, three steps in one block, and gradients changed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(4, 6)

    def configure_optimizers(self) -> Any:
        return {"all": SGD(self.parameters(), lr=0.1, momentum=0.9)}

    def train_batch(self, batch: Any, step: Any) -> None:
        with step.manual() as by_hand:
            for number in range(3):
                outputs = self.network(batch[:, :4])
                by_hand.backward((outputs - batch[:, 4:]).square().mean(), retain_graph=True)
                by_hand.backward(outputs.abs().mean() * 0.1)
                by_hand.clip(norm=float("inf"))
                for parameter in self.network.parameters():
                    parameter.grad *= number + 1
                by_hand.step()

    def by_hand(self, batch: Any, plain: Plain, number: int) -> None:
        for number in range(3):
            with torch.autocast("cpu", dtype=torch.float16) if plain.half else nullcontext():
                outputs = self.network(batch[:, :4])
                first, second = (outputs - batch[:, 4:]).square().mean(), outputs.abs().mean() * 0.1
            plain.scalers["all"].scale(first).backward(retain_graph=True)
            plain.backward("all", second)
            plain.scalers["all"].unscale_(plain.optimizers["all"])
            for parameter in self.network.parameters():
                parameter.grad *= number + 1
            plain.step("all")


KINDS = [GAN, Accumulating, Several]


def make(kind: type[Any]) -> Any:
    torch.manual_seed(3)
    return kind()


def batches(rows: slice = slice(None)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(SIZE, 10, generator=generator)[rows] for _ in range(BATCHES)]


def by_hand(kind: type[Any], half: bool = False) -> dict[str, Tensor]:
    task = make(kind)
    plain = Plain(task, half)
    for number, batch in enumerate(batches()):
        task.by_hand(batch, plain, number)
    return {name: value.detach() for name, value in task.state_dict().items()}


def made(model: Any, folder: Path, rows: slice = slice(None), **options: Any) -> hocket.Trainer:
    options = {"device": "cpu", "duration": "1ep", "folder": folder, "train_data": batches(rows), **options}
    return hocket.Trainer(model=model, **options)


def trained(kind: type[Any], folder: Path, rows: slice = slice(None), **options: Any) -> dict[str, Tensor]:
    with made(make(kind), folder, rows, **options) as trainer:
        trainer.fit()
        return trainer.model_state_dict()


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# --- exactly the loop by hand


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_as_by_hand(kind: type[Any], tmp_path: Path) -> None:
    assert difference(trained(kind, tmp_path), by_hand(kind)) == 0
    assert difference(by_hand(kind), {name: value.detach() for name, value in make(kind).state_dict().items()}) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_with_a_loss_scale(kind: type[Any], tmp_path: Path) -> None:
    # The scale overflows at first; the plain loop has a scale for each optimizer too.
    precision = {"fp16": {"init_scale": 2.0**16}}
    half = by_hand(kind, half=True)
    assert difference(trained(kind, tmp_path, precision=precision), half) == 0
    assert difference(half, by_hand(kind)) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_over_two_ranks_with_batches_of_two_sizes(kind: type[Any], tmp_path: Path) -> None:
    def rank(number: int) -> dict[str, Tensor]:
        rows = slice(0, 5) if number == 0 else slice(5, 8)
        return trained(kind, tmp_path, rows, strategy={"ddp": {"split_data": False}})

    first, second = run_ranks(rank, 2)
    assert difference(first, second) == 0
    assert difference(first, by_hand(kind)) < 2e-6


@pytest.mark.parametrize("kind", [GAN, Accumulating])
def test_a_rank_without_samples_adds_nothing(kind: type[Any], tmp_path: Path) -> None:
    """The second rank has one batch less, and computes on padding in the last one."""

    def rank(number: int) -> dict[str, Tensor]:
        data = batches(slice(0, 5)) if number == 0 else batches(slice(5, 8))[:-1]
        return trained(kind, tmp_path, train_data=data, strategy={"ddp": {"split_data": False}})

    task = make(kind)
    plain, whole = Plain(task, False), batches()
    for number, batch in enumerate([*whole[:-1], whole[-1][:5]]):
        task.by_hand(batch, plain, number)
    first, second = run_ranks(rank, 2)
    assert difference(first, second) == 0
    assert difference(first, {name: value.detach() for name, value in task.state_dict().items()}) < 2e-6


def test_ranks_that_step_alone_cannot_let_gradients_wait(tmp_path: Path) -> None:
    def rank(number: int) -> dict[str, Tensor]:
        return trained(Accumulating, tmp_path, strategy={"local-sgd": {"split_data": False, "every": 2}})

    with pytest.raises(RankError, match="gradients cannot wait for a later batch"):
        run_ranks(rank, 2)


class Kill(hocket.Callback):
    def batch_checkpoint(self, state: hocket.State) -> None:
        if state.timestamp.batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", [GAN, Accumulating])
def test_a_killed_run_resumes_bitwise(kind: type[Any], asynchronous: bool, tmp_path: Path) -> None:
    """Killed after batch 4, it resumes after batch 3, between the two batches of a step."""

    def options(*callbacks: Any) -> dict[str, Any]:
        where = hocket.Checkpoints(tmp_path / "checkpoints", every="1ba", asynchronous=asynchronous)
        return {"checkpoints": where, "resume": "auto", "callbacks": callbacks, "seed": 3, "precision": "fp16"}

    child = os.fork()
    if not child:
        trained(kind, tmp_path / "runs", **options(Kill()))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert difference(trained(kind, tmp_path / "runs", **options()), by_hand(kind, half=True)) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_wait_are_loaded_on_another_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    def trainer(ranks: int) -> hocket.Trainer:
        data = torch.utils.data.DataLoader(torch.cat(batches()), SIZE)  # type: ignore[arg-type]
        strategy = "single" if ranks == 1 else "ddp"
        return made(make(Accumulating), tmp_path, train_data=data, global_batch=SIZE, strategy=strategy)

    def first(number: int) -> Any:
        with trainer(ranks) as one, pytest.warns(UserWarning, match="no by_hand.step"):
            one.fit("3ba")
            return one.state_dict()

    def second(number: int) -> dict[str, Tensor]:
        with trainer(3 - ranks) as other:
            other.load_state_dict(tree)
            other.fit()
            return other.model_state_dict()

    tree = first(0) if ranks == 1 else run_ranks(first, 2)[0]
    weights = second(0) if ranks == 2 else run_ranks(second, 2)[0]
    assert difference(weights, by_hand(Accumulating)) < 2e-6


def test_gradients_that_wait_are_refused_by_other_parameters(tmp_path: Path) -> None:
    with made(make(Accumulating), tmp_path) as trainer, pytest.warns(UserWarning):
        trainer.fit("1ba")
        tree = trainer.state_dict()
    tree["by_hand"][0]["gradients"].pop()
    with pytest.raises(ValueError, match="gradients of 'generator' that no"):
        made(make(Accumulating), tmp_path).load_state_dict(tree)


# --- what a step brings


def test_losses_and_learning_rates_are_those_of_the_steps(tmp_path: Path) -> None:
    schedule = {"generator": lambda clock: 1.0, "discriminator": lambda clock: 0.5**clock.timestamp.batch}
    with made(make(Accumulating), tmp_path, log_every="1ba") as trainer:
        history = trainer.fit().history
    task = make(Accumulating)
    plain = Plain(task, False)
    for number, batch in enumerate(batches()):
        task.by_hand(batch, plain, number)
    generator = plain.losses["generator"]
    assert history["train/discriminator/loss"] == pytest.approx(plain.losses["discriminator"])
    pairs = [a + b for a, b in zip(*[iter(generator)] * 2, strict=True)]
    assert [loss for loss in history["train/generator/loss"] if loss == loss] == pytest.approx(pairs)
    with made(make(GAN), tmp_path, schedule=schedule) as trainer:
        trainer.fit("3ba")
        assert [optimizer.param_groups[0]["lr"] for optimizer in trainer.state.optimizers] == [0.01, 0.01 / 8]


def test_the_loss_is_that_of_all_ranks_and_backwards(tmp_path: Path) -> None:
    class Net(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def configure_optimizers(self) -> Optimizer:
            return SGD(self.parameters(), lr=0.0)

        def train_batch(self, batch: Tensor, step: Any) -> None:
            with step.manual() as by_hand:
                by_hand.backward({"mean": (self.weight * batch).mean()})
                by_hand.backward(((self.weight * batch[:, :2]).mean(), 2 * len(batch)))
                by_hand.backward(hocket.Loss((self.weight * batch).sum(), reduction="sum"))
                by_hand.step()

    def rank(number: int) -> Any:
        rows = slice(0, 5) if number == 0 else slice(5, 8)
        with made(Net(), tmp_path, rows, strategy={"ddp": {"split_data": False}}, log_every="1ba") as trainer:
            return {name: result for name, result in trainer.fit().history.items() if name.startswith("train/")}

    first = run_ranks(rank, 2)[0]
    expected = [float(each.mean() + each[:, :2].mean() + each.sum()) for each in batches()]
    assert first["train/loss"] == pytest.approx(expected, abs=1e-5)
    assert first["train/mean"] == pytest.approx([float(each.mean()) for each in batches()], abs=1e-6)


class Guarded(Several):
    """The second of two batches has a loss that is not finite."""

    def train_batch(self, batch: Any, step: Any) -> None:
        with step.manual() as by_hand:
            loss = (self.network(batch[:, :4]) - batch[:, 4:]).square().mean()
            by_hand.backward(loss * float("nan") if step.batch == 1 else loss)
            self.taken = by_hand.step()


def test_the_guard_skips_or_raises(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        made(make(Guarded), tmp_path).fit()
    task = make(Guarded)
    with made(task, tmp_path, nonfinite="skip") as trainer:
        trainer.fit("1ba")
        before = trainer.model_state_dict()
        before = {name: value.clone() for name, value in before.items()}
        with pytest.warns(RuntimeWarning, match="is skipped"):
            trainer.fit("1ba")
        assert not task.taken
        assert difference(before, trainer.model_state_dict()) == 0
        trainer.fit("1ba")
        assert task.taken


def test_the_clipping_of_trainer_and_algorithm_acts(tmp_path: Path) -> None:
    class Unclipped(Several):
        def train_batch(self, batch: Any, step: Any) -> None:
            with step.manual() as by_hand:
                by_hand.backward((self.network(batch[:, :4]) - batch[:, 4:]).square().mean())
                by_hand.step()

    class Stepping(Unclipped):
        def train_batch(self, batch: Any, step: Any) -> None:
            step(self.mine, batch)

        def mine(self, batch: Any) -> Tensor:
            return (self.network(batch[:, :4]) - batch[:, 4:]).square().mean()

    for options in (
        {"clip_gradients": 0.01},
        {"algorithms": [{"gradient-clipping": {"kind": "norm", "threshold": 0.02}}]},
    ):
        assert difference(trained(Unclipped, tmp_path, **options), trained(Stepping, tmp_path, **options)) == 0
        assert difference(trained(Unclipped, tmp_path, **options), trained(Unclipped, tmp_path)) > 0


class Events(hocket.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []
        for name in ("before_train_batch", "after_loss", "before_backward", "after_backward", "after_train_batch"):
            vars(self)[name] = lambda state, name=name: self.seen.append(f"{name} {state.step.name}")


def test_events_come_for_each_backward(tmp_path: Path) -> None:
    events = Events()
    with made(make(GAN), tmp_path, callbacks=[events]) as trainer:
        trainer.fit("1ba")
    backward = ["after_loss", "before_backward", "after_backward"]
    assert events.seen == [
        f"{name} {step}"
        for step, names in {
            "discriminator": ["before_train_batch", *backward, *backward, "after_train_batch"],
            "generator": ["before_train_batch", *backward, "after_train_batch"],
        }.items()
        for name in names
    ]


# --- plug-ins that cannot act


class Forward(hocket.Callback):
    @hocket.hookimpl(wrapper=True)
    def loss(self, state: Any, outputs: Any, batch: Any) -> Any:
        raise AssertionError("train_batch computes the loss")
        yield


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"algorithms": ["sam"]}, "Algorithm 'sam' does not act .* computes gradients a second time"),
        ({"algorithms": ["label-smoothing"]}, "Algorithm 'label-smoothing' does not act .* acts on before_loss"),
        ({"callbacks": [Forward()]}, "Callback 'forward' does not act .* acts on loss"),
        ({"train_metrics": "mse"}, "train_metrics do not see"),
        ({"compile": True}, "compile= compiles loss functions, and not"),
    ],
)
def test_who_cannot_act_is_said_once(options: Any, said: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=said) as caught:
        weights = trained(GAN, tmp_path, **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert difference(weights, by_hand(GAN)) == 0


# --- what is refused


def stepping(body: Callable[[Any, Any, Any], None], **options: Any) -> Any:
    return type("Wrong", (GAN,), {"train_batch": body, **options})


def refused(body: Callable[[Any, Any, Any], None], folder: Path, match: str, **options: Any) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError, PlanError), match=match):
        made(make(stepping(body)), folder, **options).fit()


def loss_of(task: Any, batch: Any) -> Tensor:
    return task.score(task.generator(batch[:, :4]), True)


def test_misuse_is_an_error(tmp_path: Path) -> None:
    def unknown(task: Any, batch: Any, step: Any) -> None:
        with step.manual("critic"):
            pass

    def nested(task: Any, batch: Any, step: Any) -> None:
        with step.manual("generator"), step.manual("discriminator"):
            pass

    def inside(task: Any, batch: Any, step: Any) -> None:
        with step.manual("generator"):
            step(task.loss_of, batch)

    def in_a_loss_function(task: Any, batch: Any, step: Any) -> None:
        def loss_function(batch: Any) -> None:
            with step.manual("generator"):
                pass

        step(loss_function, batch, "discriminator")

    def nothing(task: Any, batch: Any, step: Any) -> None:
        with step.manual("generator") as by_hand:
            by_hand.step()

    def unstepped(task: Any, batch: Any, step: Any) -> None:
        with step.manual("generator") as by_hand:
            by_hand.backward(loss_of(task, batch))
            by_hand.clip(norm=1.0)

    def late(task: Any, batch: Any, step: Any) -> None:
        with step.manual("generator") as by_hand:
            by_hand.backward(loss_of(task, batch))
            by_hand.clip(norm=1.0)
            by_hand.backward(loss_of(task, batch))

    def outside(task: Any, batch: Any, step: Any) -> None:
        with step.manual("generator") as by_hand:
            by_hand.backward(loss_of(task, batch))
        by_hand.step()

    def mixed(task: Any, batch: Any, step: Any) -> None:
        with step.manual("generator") as by_hand:
            by_hand.backward(loss_of(task, batch))
        step(lambda batch: loss_of(task, batch), batch, "generator")

    def simple(task: Any, batch: Any, step: Any) -> None:
        with step.manual("generator") as by_hand:
            by_hand.backward(loss_of(task, batch))
            by_hand.step()

    refused(unknown, tmp_path, "does not name an optimizer; there are 'generator', 'discriminator'")
    refused(nested, tmp_path, "in the block of another")
    refused(inside, tmp_path, "in the block of another")
    refused(in_a_loss_function, tmp_path, "not in a loss function")
    refused(nothing, tmp_path, "no gradients to step with")
    refused(unstepped, tmp_path, "ends after by_hand.clip")
    refused(late, tmp_path, "called after by_hand.clip")
    refused(outside, tmp_path, "outside of its block")
    refused(mixed, tmp_path, "Step by hand first")
    refused(simple, tmp_path, "computes on the batch as a whole", microbatch=2)
    refused(simple, tmp_path, "computes on the batch as a whole", microbatch="auto")
    refused(simple, tmp_path, "computes on the batch as a whole", accumulate="2ba")


def test_an_optimizer_that_computes_gradients_itself_is_refused(tmp_path: Path) -> None:
    class Closure(GAN):
        def configure_optimizers(self) -> Any:
            return LBFGS(self.parameters())

        def train_batch(self, batch: Any, step: Any) -> None:
            with step.manual():
                pass

    with pytest.raises(ValueError, match="LBFGS computes gradients itself"):
        made(make(Closure), tmp_path).fit()


@pytest.mark.parametrize(("strategy", "said"), [("fsdp", "shards them"), ("ddp", "Ranks make different calls")])
def test_ranks_that_cannot_are_told(strategy: str, said: str, tmp_path: Path) -> None:
    class Different(GAN):
        def train_batch(self, batch: Any, step: Any) -> None:
            with step.manual("generator") as by_hand:
                if int(os.environ["RANK"]) == 0:
                    by_hand.backward(loss_of(self, batch))

    def rank(number: int) -> None:
        os.environ["RANK"] = str(number)
        trained(Different, tmp_path, strategy={strategy: {"split_data": False}})

    with pytest.raises(RankError, match=said):
        run_ranks(rank, 2)


def test_a_fit_does_not_go_on_after_an_exception_that_would_add_gradients_twice(tmp_path: Path) -> None:
    class Raising(Accumulating):
        def train_batch(self, batch: Any, step: Any) -> None:
            with step.manual("generator") as by_hand:
                by_hand.backward(loss_of(self, batch) / 2)
            raise KeyError("after the block")

    trainer = made(make(Raising), tmp_path)
    with pytest.raises(KeyError):
        trainer.fit()
    with pytest.raises(RuntimeError, match="cannot be continued from there"):
        trainer.fit()


def test_a_fit_goes_on_after_an_exception_in_a_first_block(tmp_path: Path) -> None:
    class Once(GAN):
        raised = False

        def train_batch(self, batch: Any, step: Any) -> None:
            if step.batch == 0 and not self.raised:
                self.raised = True
                with step.manual("generator") as by_hand:
                    by_hand.backward(loss_of(self, batch))
                    raise KeyError("in the block")
            super().train_batch(batch, step)

    trainer = made(make(Once), tmp_path)
    with pytest.raises(KeyError):
        trainer.fit()
    with pytest.warns(UserWarning, match="before the optimizer stepped"):
        trainer.fit()
    assert difference(trainer.model_state_dict(), by_hand(GAN)) == 0

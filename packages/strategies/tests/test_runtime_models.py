"""Several models in a `hocket.Runtime`, and what passes through the models that `setup` returns; against plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

import hocket
from hocket_testkit import run_ranks
from hocket_testkit.ranks import RankError

INPUTS = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))


class Coder(nn.Module):
    config = {"width": 5}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 3)
        self.scale = 2.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(self.encode(inputs)) * self.scale

    def encode(self, inputs: Tensor) -> Tensor:
        return self.encoder(inputs)

    def error(self, inputs: Tensor, power: int = 1) -> Tensor:
        return (self(inputs) - inputs).abs().pow(power).mean()

    def cache(self) -> dict[str, Any]:
        return vars(self).setdefault("kept", {})


def alone(model: Any, inputs: Tensor) -> Iterator[Tensor]:
    yield model(inputs).square().mean()
    yield model(inputs).mean()


def before_both(model: Any, inputs: Tensor) -> Iterator[Tensor]:
    yield from [model(inputs).square().mean(), model(inputs).mean()]


def methods(model: Any, inputs: Tensor) -> Iterator[Tensor]:
    yield model.error(inputs, power=2)
    yield model.encode(inputs).mean()


def method_and_model(model: Any, inputs: Tensor) -> Iterator[Tensor]:
    yield model.encode(inputs).mean()
    yield model(inputs).square().mean()


def parts(model: Any, inputs: Tensor) -> Iterator[Tensor]:
    yield model.decoder(model.encoder[1](model.encoder[0](inputs))).square().mean()


LOSSES = (alone, before_both, methods, method_and_model, parts)


def by_hand(losses: Any) -> dict[str, Tensor]:
    model = Coder()
    optimizer = SGD(model.parameters(), lr=0.1)
    for inputs in INPUTS:
        for loss in losses(model, inputs):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("strategy, ranks", [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_losses_of_one_batch_add_up_however_they_are_computed(strategy: str, ranks: int) -> None:
    """With every call of the model before every backward, past its forward, and within blocks too; on two ranks of a batch's
    3 and 1 samples."""

    def rank_main(rank: int) -> dict[Any, dict[str, Tensor]]:
        found = {}
        for losses in LOSSES:
            for blocks in (False, True):
                runtime = hocket.Runtime(strategy=strategy, device="cpu")
                model, optimizer = runtime.setup(net := Coder(), SGD(net.parameters(), lr=0.1))
                for inputs in INPUTS:
                    mine = inputs if ranks == 1 else inputs[:3] if rank == 0 else inputs[3:]
                    with runtime.accumulate(model) if blocks else contextlib.nullcontext():
                        for loss in losses(model, mine):
                            runtime.backward(loss, weight=len(mine))
                    runtime.step(optimizer)
                found[losses.__name__, blocks] = runtime.model_state(model)
        return found

    for found in run_ranks(rank_main, ranks):
        for (name, _), weights in found.items():
            assert difference(weights, by_hand(globals()[name])) <= (0 if ranks == 1 else 2e-6), name


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_two_losses_of_one_forward_pass(strategy: str) -> None:
    """The first retains the graph; the gradients of the third are for the inputs that it names only."""

    def rank_main(rank: int) -> dict[str, Tensor]:
        runtime = hocket.Runtime(strategy=strategy, device="cpu")
        model, optimizer = runtime.setup(net := Coder(), SGD(net.parameters(), lr=0.1))
        outputs = model(INPUTS[0, rank::2] if runtime.world_size == 2 else INPUTS[0])
        runtime.backward(outputs.mean(), retain_graph=True)
        runtime.backward(outputs.square().mean())
        runtime.step(optimizer)
        if strategy == "single":
            runtime.backward(model(INPUTS[1]).mean(), inputs=[net.decoder.bias])
            assert [name for name, each in net.named_parameters() if each.grad is not None] == ["decoder.bias"]
        return runtime.model_state(model)

    model = Coder()
    outputs = model(INPUTS[0])
    (outputs.mean() + outputs.square().mean()).backward()
    SGD(model.parameters(), lr=0.1).step()
    for weights in run_ranks(rank_main, 1 if strategy == "single" else 2):
        assert difference(weights, dict(model.state_dict())) < 2e-6


class Margin(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.classes = nn.Parameter(torch.randn(3, 3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ self.classes, targets)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("later", [pytest.param(False, marks=pytest.mark.long), True])
def test_one_optimizer_of_a_model_and_a_loss(strategy: str, later: bool) -> None:
    """Set up in any order, or the optimizer after both; two ranks have 2 and 1 samples of each batch."""
    batches = [(inputs[:3], torch.tensor([0, 2, 1])) for inputs in INPUTS]

    def rank_main(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        runtime = hocket.Runtime(strategy=strategy, device="cpu")
        net, margin = Coder(), Margin()
        adam = Adam([*net.parameters(), *margin.parameters()], lr=0.01)
        if later:
            loss, model = runtime.setup(margin), runtime.setup(net)
            optimizer = runtime.setup(adam)
        else:
            optimizer, loss, model = runtime.setup(adam, margin, net)
        assert loss.module is margin and model.module is net and isinstance(optimizer, Adam)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Every rank reads all of the list")
            data = runtime.setup_data(batches, global_batch=None if strategy == "single" else 3)
        for inputs, targets in data:
            runtime.backward(loss(model(inputs), targets))
            runtime.step(optimizer)
        return runtime.model_state(model), runtime.model_state(loss)

    net, margin = Coder(), Margin()
    optimizer = Adam([*net.parameters(), *margin.parameters()], lr=0.01)
    for inputs, targets in batches:
        optimizer.zero_grad()
        margin(net(inputs), targets).backward()
        optimizer.step()
    for found in run_ranks(rank_main, 1 if strategy == "single" else 2):
        for weights, module in zip(found, (net, margin), strict=True):
            assert difference(weights, dict(module.state_dict())) <= (0 if strategy == "single" else 1e-5)


# --- a GAN of two models


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return generator, nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 1))


def real_or_not(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def dcgan(generator: Any, critic: Any, real: Tensor, noise: Tensor, backward: Any, step: Callable[[int], Any]) -> None:
    """As in PyTorch's tutorial: two backwards before the critic's step."""
    critic.zero_grad()
    backward(real_or_not(critic(real), True))
    fake = generator(noise)
    backward(real_or_not(critic(fake.detach()), False))
    step(1)
    generator.zero_grad()
    backward(real_or_not(critic(fake), True))
    step(0)


def gan_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(7, 3, generator=generator), torch.randn(7, 4, generator=generator)) for _ in range(6)]


def gan_by_hand() -> list[dict[str, Tensor]]:
    nets = networks()
    optimizers = [Adam(net.parameters(), lr=0.01) for net in nets]
    for real, noise in gan_batches():
        dcgan(*nets, real, noise, lambda loss: loss.backward(), lambda number: optimizers[number].step())
    return [dict(net.state_dict()) for net in nets]


def gan(folder: Path, begin: int = 0, end: int = 6, kill: bool = False, **options: Any) -> list[dict[str, Tensor]]:
    """Train from batch ``begin``, with a checkpoint after each batch."""
    runtime = hocket.Runtime(device="cpu", **options)
    generator, critic = networks()
    generator, first = runtime.setup(generator, Adam(generator.parameters(), lr=0.01))
    critic, second = runtime.setup(critic, Adam(critic.parameters(), lr=0.01))
    things = {"generator": generator, "critic": critic, "first": first, "second": second}
    if begin:
        assert runtime.load(folder / str(begin), **things) == {"batch": begin}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Every rank reads all of the list")
        data = runtime.setup_data(gan_batches(), global_batch=None if runtime.world_size == 1 else 7)
    for number, (real, noise) in enumerate(data, 1):
        if begin < number <= end:
            dcgan(generator, critic, real, noise, runtime.backward, lambda which: runtime.step((first, second)[which]))
            runtime.save(folder / str(number), **things, batch=number)
            if kill and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
    return [runtime.model_state(model) for model in (generator, critic)]


def test_a_killed_gan_resumes_bitwise(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        gan(tmp_path, kill=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    for ours, expected in zip(gan(tmp_path, begin=3), gan_by_hand(), strict=True):
        assert difference(ours, expected) == 0


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_gan_goes_on_with_other_ranks(strategy: str, tmp_path: Path) -> None:
    """One process, then two with 4 and 3 samples of each batch, then one."""
    gan(tmp_path, end=2)
    run_ranks(lambda rank: gan(tmp_path, begin=2, end=4, strategy=strategy), 2)
    for ours, expected in zip(gan(tmp_path, begin=4), gan_by_hand(), strict=True):
        assert difference(ours, expected) < 1e-5


# --- what passes through


def test_attributes_and_methods_are_those_of_the_module() -> None:
    runtime = hocket.Runtime(device="cpu", precision="bf16")
    model = runtime.setup(net := Coder())
    seen: list[torch.dtype] = []
    net.encoder[0].register_forward_hook(lambda part, inputs, outputs: seen.append(outputs.dtype))
    assert model.encode(INPUTS[0]).dtype is model.encoder(INPUTS[0]).dtype is torch.float32
    assert seen == [torch.bfloat16] * 2, "they compute in the precision"
    assert model.config is Coder.config and model.decoder.weight is net.decoder.weight
    assert model.cache() is net.cache()
    assert isinstance(model, Coder) and isinstance(model.encoder, nn.Sequential)
    model.scale = 3.0
    assert net.scale == 3.0 and model.eval() is model and not net.training and not model.training
    assert model.train().training and net.decoder.training
    del model.scale
    assert not hasattr(net, "scale") and not hasattr(model, "scale")
    assert list(model.state_dict()) == list(net.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
    model.load_state_dict({name: torch.zeros_like(value) for name, value in net.state_dict().items()})
    assert not net.decoder.weight.any()


def test_a_copy_is_for_evaluation_until_it_is_set_up() -> None:
    runtime = hocket.Runtime(device="cpu")
    model, optimizer = runtime.setup(net := Coder(), SGD(net.parameters(), lr=0.1))
    average = copy.deepcopy(model)
    before = average(INPUTS[0])
    runtime.backward(model(INPUTS[0]).mean())
    runtime.step(optimizer)
    assert torch.equal(average(INPUTS[0]), before) and not torch.equal(model(INPUTS[0]), before)
    runtime.backward(average(INPUTS[0]).mean())
    with pytest.raises(ValueError, match="SGD holds 4 of 4 parameters that are not in the model"):
        runtime.step(SGD(average.parameters(), lr=0.1))
    average, second = runtime.setup(average, SGD(average.parameters(), lr=0.1))
    runtime.backward(average(INPUTS[0]).mean())
    assert runtime.step(second)


def test_what_cannot_pass_is_refused() -> None:
    runtime = hocket.Runtime(device="cpu")
    model, optimizer = runtime.setup(net := Coder(), SGD(net.parameters(), lr=0.1))
    other = nn.Linear(2, 2)
    for wrong, error, said in (
        (lambda: pickle.dumps(model), TypeError, r"runtime.save\(path, model=model\)"),
        (lambda: setattr(model, "head", other), TypeError, r"Set it before: coder.head = …, then runtime.setup"),
        (lambda: model.no_sync, AttributeError, r"'Coder' object has no attribute 'no_sync'. Write with runtime.acc"),
        (lambda: model.nothing, AttributeError, "'Coder' object has no attribute 'nothing'$"),
        (lambda: runtime.gather, AttributeError, r"Runtime has no 'gather'; it has .*runtime.all_gather\(values\)"),
        (lambda: runtime.is_main_process, AttributeError, r"Write if runtime.rank == 0"),
        (lambda: runtime.setup(), TypeError, "given nothing"),
        (lambda: runtime.setup(net), ValueError, "Coder has parameters of a model that was set up before"),
        (lambda: runtime.setup(other, other), ValueError, "Linear has parameters of a model that was set up before"),
        (lambda: runtime.setup(other, [1]), TypeError, r"given data \(list\).*data = runtime.setup_data\(loader\)"),
        (lambda: runtime.setup(model=net), TypeError, r"Write runtime.setup\(model, optimizer\), by position"),
        (
            lambda: runtime.setup(torch.optim.lr_scheduler.StepLR(optimizer, 1)),
            TypeError,
            r"a schedule \(StepLR\).*schedule.step\(\) after runtime.step",
        ),
        (
            lambda: runtime.setup(nn.Linear(2, 2), SGD(other.parameters(), lr=1)),
            ValueError,
            r"SGD holds 2 of 2 parameters that are not in the model.*model, loss, optimizer = runtime.setup",
        ),
        (lambda: runtime.stepper(model.decoder, optimizer), TypeError, "stepper was given Linear. Give it what setup"),
        (
            lambda: runtime.save("a", data=runtime.setup_data([INPUTS])),
            TypeError,
            r"given data \(data=…\).*epoch=epoch",
        ),
    ):
        with pytest.raises(error, match=said):
            wrong()  # type: ignore[no-untyped-call]
    step = runtime.stepper(model, optimizer)
    with pytest.raises(TypeError) as raised:
        step(lambda part: model(part).mean())
    assert "was not given a batch" in raised.value.__notes__[0]


def test_a_step_after_a_block_that_is_not_the_last_is_refused() -> None:
    runtime = hocket.Runtime(device="cpu")
    model, optimizer = runtime.setup(net := Coder(), SGD(net.parameters(), lr=0.1))
    with runtime.accumulate(model, last=False):
        runtime.backward(model(INPUTS[0]).mean())
    with pytest.raises(RuntimeError, match="A step follows an accumulate block with last=False"):
        runtime.step(optimizer)


def test_a_step_of_the_optimizer_itself_is_refused() -> None:
    """It would neither average nor unscale gradients. Of means it is exact."""
    runtime = hocket.Runtime(device="cpu", precision={"fp16": {"init_scale": 16.0}})
    model, optimizer = runtime.setup(net := Coder(), SGD(net.parameters(), lr=0.1))
    runtime.backward(model(INPUTS[0]).mean())
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) was called .* Write runtime.step\(optimizer\)"):
        optimizer.step()
    runtime.clip_gradients(model, optimizer, norm=1e6)
    optimizer.step()
    optimizer.zero_grad()
    runtime.backward(model(INPUTS[0]).mean())
    assert runtime.step(optimizer) and not optimizer._optimizer_step_pre_hooks


def test_losses_past_the_prepared_model_are_refused() -> None:
    """Their gradients are averaged by nobody."""

    def rank_main(rank: int) -> None:
        runtime = hocket.Runtime(strategy="ddp", device="cpu")
        _, optimizer = runtime.setup(net := Coder(), SGD(net.parameters(), lr=0.1))
        runtime.backward(net(INPUTS[rank]).mean())
        runtime.step(optimizer)

    with pytest.raises(RankError, match=r"gradients of SGD differ between ranks.*with what setup returned"):
        run_ranks(rank_main, 2)


def test_sharded_models_say_what_gathers_them() -> None:
    def rank_main(rank: int) -> list[str]:
        runtime = hocket.Runtime(strategy="fsdp", device="cpu")
        model = runtime.setup(Coder())
        said = []
        for wrong in (model.state_dict, lambda: model.load_state_dict({}), lambda: copy.deepcopy(model)):
            with pytest.raises(RuntimeError) as raised:
                wrong()
            said.append(str(raised.value))
        return said

    for said in run_ranks(rank_main, 2):
        assert "runtime.model_state(model)" in said[0] and "runtime.load_model_state(model, state)" in said[1]
        assert "before setup" in said[2]


def test_losses_of_two_loaders() -> None:
    """Each says its weight; a guess is said."""
    small, large = [(INPUTS[0][:3],), (INPUTS[1][:1],)], [(INPUTS[2],), (INPUTS[3],)]

    def run(said: bool) -> dict[str, Tensor]:
        runtime = hocket.Runtime(device="cpu")
        model, optimizer = runtime.setup(net := Coder(), SGD(net.parameters(), lr=0.1))
        first, second = runtime.setup_data(small), runtime.setup_data(large)
        for number, ((a,), (b,)) in enumerate(zip(first, second, strict=True)):
            with runtime.accumulate(model, last=number == 1):
                runtime.backward(model(torch.cat([a, b])).mean(), **{"weight": len(a) + len(b)} if said else {})
        runtime.step(optimizer)
        return runtime.model_state(model)

    with pytest.warns(UserWarning, match=r"Several loaders .* runtime.backward\(loss, weight=data.samples\)"):
        run(said=False)
    model = Coder()
    model(torch.cat([each for (each,) in (*small, *large)])).mean().backward()
    SGD(model.parameters(), lr=0.1).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert difference(run(said=True), dict(model.state_dict())) < 2e-6


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs).square().mean()


@pytest.mark.parametrize("how", ["method", "forward", "raw without gradients", "raw after the first step"])
def test_the_first_step_accepts_calls_of_the_prepared_model(how: str) -> None:
    runtime = hocket.Runtime(device="cpu", precision="bf16")
    model, optimizer = runtime.setup(net := Inner(), SGD(net.parameters(), lr=0.1))
    if how == "raw without gradients":
        with torch.no_grad():
            net(ROWS)
    for _ in range(2):
        runtime.backward(model.score(ROWS) if how == "method" else model(ROWS).square().mean())
        assert runtime.step(optimizer)
    assert not net._forward_pre_hooks, "later steps cost nothing"
    if how == "raw after the first step":
        runtime.backward(net(ROWS).square().mean())
        assert runtime.step(optimizer)


def test_clipping_of_scaled_gradients_is_noticed_once() -> None:
    for clip, said in (("torch", 1), ("runtime", 0), ("none", 0)):
        runtime = hocket.Runtime(device="cpu", precision="fp16")
        model, optimizer = runtime.setup(net := nn.Linear(4, 2), SGD(net.parameters(), lr=0.1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                runtime.backward(model(ROWS).square().mean())
                if clip == "torch":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                elif clip == "runtime":
                    runtime.clip_gradients(model, optimizer, value=1e-3)
                runtime.step(optimizer)
        texts = [str(each.message) for each in caught if "loss scale" in str(each.message)]
        assert len(texts) == said, (clip, texts)
        assert all("runtime.clip_gradients(model, optimizer, norm=1.0)" in each for each in texts)
        assert all(each.filename == __file__ for each in caught if "loss scale" in str(each.message))


def test_load_without_objects_says_what_it_returns(tmp_path: Path) -> None:
    runtime = hocket.Runtime(device="cpu")
    model = runtime.setup(nn.Linear(4, 2))
    runtime.save(tmp_path / "a", model=model, epoch=3, names={"a": 1})
    with pytest.warns(UserWarning, match=r"the state of model as values\. Write .*a', model=model\)") as caught:
        rest = runtime.load(tmp_path / "a")
    assert caught[0].filename == __file__
    assert set(rest) == {"model", "epoch", "names"}


def test_a_model_is_iterated_over_as_the_given_one_and_a_runtime_closes_as_a_context() -> None:
    with hocket.Runtime(device="cpu") as runtime:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model = runtime.setup(net)
        inputs = ROWS
        for layer in model:
            inputs = layer(inputs)
        assert torch.equal(inputs, net(ROWS)) and len(list(model)) == 2
        assert list(runtime.setup(nn.ModuleDict({"one": nn.Linear(1, 1)}))) == ["one"]
        with pytest.raises(TypeError, match=r"a model \(Linear\), which is not several values"):
            list(runtime.setup(nn.Linear(1, 1)))

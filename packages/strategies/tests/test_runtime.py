"""Loops of one's own on `hocket.Runtime`: the bits of a plain loop alone, the same weights however batches are shared out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.checkpoints import CheckpointError
from hocket_testkit import run_ranks


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def loader(samples: int = 52, batch: int = 8) -> DataLoader[Any]:
    """The last batch has half as many samples."""
    generator = torch.Generator().manual_seed(1)
    return DataLoader(
        TensorDataset(torch.randn(samples, 8, generator=generator), torch.randint(3, (samples,), generator=generator)),
        batch,
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(pieces: int = 1, norm: float | None = None) -> dict[str, Tensor]:
    """The loop without hocket: a step for every so many batches, on the mean over their samples."""
    model = network()
    optimizer = adam(model)
    batches = list(loader())
    for start in range(0, len(batches), pieces):
        group = batches[start : start + pieces]
        inputs, targets = (torch.cat(part) for part in zip(*group, strict=True))
        F.cross_entropy(model(inputs), targets).backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def own(pieces: int = 1, norm: float | None = None, **arguments: Any) -> dict[str, Tensor]:
    """The same with a Runtime; a step for every so many batches."""
    runtime = hocket.Runtime(**arguments)
    model = network()
    model, optimizer = runtime.setup(model, adam(model))
    data = runtime.setup_data(loader(), global_batch=8)
    for number, (inputs, targets) in enumerate(data, 1):
        last = number % pieces == 0 or number == len(data)
        with runtime.accumulate(model, last=last):
            runtime.backward(F.cross_entropy(model(inputs), targets))
        if last:
            if norm is not None:
                runtime.clip_gradients(model, optimizer, norm=norm)
            assert runtime.step(optimizer)
    return runtime.model_state(model)


@pytest.mark.parametrize("norm", [None, 0.1])
def test_alone_it_is_the_plain_loop_to_the_bit(norm: float | None) -> None:
    expected = plain(norm=norm)
    weights = own(norm=norm, strategy="single", device="cpu")
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("pieces", [2, 3, 5])
def test_accumulated_batches_count_by_their_samples(pieces: int) -> None:
    """The last batch is half as large and the last step has fewer batches: the mean is over samples, not over batches."""
    _close(own(pieces, strategy="single", device="cpu"), plain(pieces))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("pieces, norm", [(1, None), (3, 0.1)])
def test_ranks_are_one_process_on_the_whole(ranks: int, pieces: int, norm: float | None) -> None:
    """Shares of 3, 3 and 2 samples of a batch of 8; of the last batch of 4, shares of 2, 1 and 1."""
    for weights in run_ranks(lambda rank: own(pieces, norm, strategy="ddp", device="cpu"), ranks):
        _close(weights, plain(pieces, norm))


def two_losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Each of a forward pass of its own, after backward of the one before: ddp wants as many as there are backwards."""
    yield F.cross_entropy(model(inputs), targets)
    yield model(inputs).square().mean()


@pytest.mark.parametrize("ranks, precision", [(1, "fp32"), (2, "fp32"), (2, {"fp16": {"init_scale": 16.0}})])
@pytest.mark.parametrize("pieces", [pytest.param(None, marks=pytest.mark.long), 3])
def test_losses_of_one_batch_add_up(ranks: int, precision: Any, pieces: int | None) -> None:
    """As gradients in PyTorch do, within a microbatch too; only microbatches, of 8, 8 and 4 samples, are averaged."""
    batches = list(loader(20))
    inputs, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    reference = network()
    for loss in two_losses(reference, inputs, targets):
        loss.backward()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()

    def rank_main(rank: int) -> Any:
        runtime = hocket.Runtime(strategy="ddp" if ranks > 1 else "single", device="cpu", precision=precision)
        model, optimizer = runtime.setup(model := network(), torch.optim.SGD(model.parameters(), lr=1.0))
        for number, (x, y) in enumerate(batches if pieces else [(inputs, targets)]):
            own = slice(0, len(x) // 4) if ranks > 1 and rank == 0 else slice(len(x) // 4 * (ranks > 1), None)
            block = runtime.accumulate(model, last=number == 2) if pieces else contextlib.nullcontext()
            with block:
                for loss in two_losses(model, x[own], y[own]):
                    runtime.backward(loss, weight=len(y[own]))
        runtime.clip_gradients(model, optimizer, norm=1e6)
        assert runtime.step(optimizer)
        return runtime.model_state(model)

    for weights in run_ranks(rank_main, ranks):
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-5 if precision == "fp32" else 3e-3)


def test_two_plain_backwards_are_those_of_pytorch_to_the_bit() -> None:
    """With batches of `setup_data` of different sizes, too."""
    ours, theirs = network(), network()
    runtime = hocket.Runtime(device="cpu")
    model, optimizer = runtime.setup(ours, adam(ours))
    expected = adam(theirs)
    for number, (inputs, targets) in enumerate(runtime.setup_data(loader(28)), 1):
        for loss in two_losses(model, inputs, targets):
            runtime.backward(loss, **{"weight": 5} if number == 3 else {})
        for loss in two_losses(theirs, inputs, targets):
            loss.backward()
        if number % 2 == 0:
            runtime.step(optimizer)
            expected.step()
            expected.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_each_model_is_averaged_over_its_own_blocks() -> None:
    """A critic's three blocks of two losses, and an actor's one loss that reaches the critic, before the steps or between them;
    an encoder and a decoder with blocks around both."""
    inputs, _ = (torch.cat(part) for part in zip(*loader(24), strict=True))

    def train(nested: bool, blocks: Any, backward: Any, step: Any, actor: nn.Module, critic: nn.Module) -> list[Tensor]:
        real = torch.ones(8, 8)
        for _ in range(2):
            if nested:
                for x in inputs.split(8) if blocks else [inputs]:
                    with blocks(actor, critic) if blocks else contextlib.nullcontext():
                        backward(critic(actor(x)).square().mean())
                step(0)
            else:
                for x in inputs.split(8) if blocks else [inputs]:
                    with blocks(critic) if blocks else contextlib.nullcontext():
                        backward(critic(actor(x).detach()).square().mean())
                        backward(-critic(real).mean())
                step(1)
                critic.zero_grad()
                backward(critic(actor(inputs)).mean())
                step(0)
                critic.zero_grad()
                continue
            step(1)
        return [p.detach().clone() for each in (actor, critic) for p in each.parameters()]

    def models() -> tuple[nn.Module, nn.Module]:
        return nn.Sequential(network(), nn.Linear(3, 8)).apply(_constant), network()

    for nested in (False, True):
        plain = models()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]

        def plain_step(number: int, optimizers: Any = optimizers) -> None:
            optimizers[number].step()
            optimizers[number].zero_grad()

        expected = train(nested, None, lambda loss: loss.backward(), plain_step, *plain)
        runtime = hocket.Runtime(device="cpu")
        pairs = [runtime.setup(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models()]

        @contextlib.contextmanager
        def blocks(*models: nn.Module, runtime: Any = runtime) -> Any:
            with contextlib.ExitStack() as stack:
                for model in models:
                    stack.enter_context(runtime.accumulate(model))
                yield

        ours = train(
            nested, blocks, runtime.backward, lambda n, p=pairs, r=runtime: r.step(p[n][1]), pairs[0][0], pairs[1][0]
        )
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def _constant(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and module.in_features == 3:
        nn.init.constant_(module.weight, 0.2)
        nn.init.zeros_(module.bias)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mean_over_nothing_counts_nothing(ranks: int) -> None:
    """First on all ranks, then on one only; the mean is 0 / 0."""
    masks = torch.tensor([[0.0] * 4, [1.0, 0.0, 1.0, 1.0], [0.0] * 4] + [[0.0, 1.0, 0.0, 0.0]] * (ranks - 1))

    def masked_mean(outputs: Tensor, mask: Tensor) -> Tensor:
        return (outputs.square().sum(1) * mask).sum() / mask.sum()

    inputs = torch.linspace(-1, 1, masks.numel() * 8).view(*masks.shape, 8)
    reference = network()
    masked_mean(reference(inputs.flatten(0, 1)), masks.flatten()).backward()
    expected = [p - p.grad for p in reference.parameters()]

    def rank_main(rank: int) -> Any:
        runtime = hocket.Runtime(strategy="ddp" if ranks > 1 else "single", device="cpu")
        model, optimizer = runtime.setup(model := network(), torch.optim.SGD(model.parameters(), lr=1.0))
        mine = range(rank, len(masks), ranks)
        for number in mine:
            with runtime.accumulate(model, last=number == mine[-1]):
                runtime.backward(masked_mean(model(inputs[number]), masks[number]), weight=masks[number].sum().item())
        runtime.step(optimizer)
        return list(runtime.model_state(model).values())

    for weights in run_ranks(rank_main, ranks):
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-5)


def test_losses_without_one_mean_are_refused() -> None:
    def start() -> tuple[Any, Any, Any]:
        runtime = hocket.Runtime(device="cpu")
        return runtime, *runtime.setup(model := network(), adam(model))

    runtime, model, optimizer = start()
    loss = lambda: model(torch.ones(2, 8)).square().mean()  # noqa: E731
    with runtime.accumulate(model):
        runtime.backward(loss(), weight=3)
        runtime.backward(loss(), weight=2)
    with runtime.accumulate(model):
        runtime.backward(loss(), weight=6)
        runtime.backward(loss(), weight=4)
    with runtime.accumulate(model):
        runtime.backward(loss(), weight=6)
        with pytest.raises(RuntimeError, match=r"Loss 2 .* mean over 3 and the first one over 6.*backward\(a \+ b\)"):
            runtime.backward(loss(), weight=3)

    runtime, model, optimizer = start()
    with runtime.accumulate(model, last=False):
        outside = loss()
    with pytest.raises(RuntimeError, match="Call it within the block"):
        runtime.backward(outside)

    runtime, model, optimizer = start()
    for _ in range(2):
        with runtime.accumulate(model):
            runtime.backward(loss())
    runtime.backward(loss())
    with pytest.raises(RuntimeError, match=r"The gradients of AdamW .* put every backward in a block"):
        runtime.step(optimizer)


def test_weights_of_ones_own() -> None:
    """Means over tokens: weighted by how many there were, on each rank and in each microbatch."""
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randn(length, 8, generator=generator) for length in (3, 9, 4, 7)]

    def rank_main(rank: int) -> dict[str, Tensor]:
        runtime = hocket.Runtime(strategy="ddp", device="cpu")
        model = network()
        model, optimizer = runtime.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        mine = texts[2 * rank : 2 * rank + 2]
        for text in mine:
            with runtime.accumulate(model, last=text is mine[-1]):
                runtime.backward(model(text).square().mean(), weight=len(text))
        runtime.step(optimizer)
        return runtime.model_state(model)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.cat(texts)).square().mean().backward()
    optimizer.step()
    for weights in run_ranks(rank_main, 2):
        _close(weights, model.state_dict())


def test_precision_is_around_the_model_and_losses_are_in_32_bits() -> None:
    seen: list[torch.dtype] = []
    model = network()
    model[0].register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))
    runtime = hocket.Runtime(precision="bf16", device="cpu")
    called = runtime.setup(model)
    assert called(torch.randn(2, 8)).dtype is torch.float32 and seen == [torch.bfloat16]
    assert called.module is model and model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("ranks", [1, 2])
def test_scaled_losses_are_those_of_grad_scaler(ranks: int) -> None:
    """Two batches a step; the third step overflows on one rank, is left out on all, and halves the scale."""

    def blow_up(step: int) -> float:
        return float("inf") if step == 2 else 1.0

    def rank_main(rank: int) -> Any:
        runtime = hocket.Runtime(
            strategy="ddp" if ranks > 1 else "single", device="cpu", precision={"fp16": {"init_scale": 16.0}}
        )
        model = network()
        model, optimizer = runtime.setup(model, adam(model))
        taken = []
        for step, (first, second) in enumerate(pairs):
            for number, (inputs, targets) in enumerate((first, second)):
                inputs, targets = inputs[rank::ranks], targets[rank::ranks]
                with runtime.accumulate(model, last=number == 1):
                    loss = F.cross_entropy(model(inputs), targets)
                    runtime.backward(loss * blow_up(step) if rank == 0 else loss, weight=len(targets))
            runtime.clip_gradients(model, optimizer, norm=0.1)
            taken.append(runtime.step(optimizer))
        return taken, runtime.precision.state_dict(), runtime.model_state(model)

    batches = list(loader(48))
    pairs = list(zip(batches[::2], batches[1::2], strict=True))
    model = network()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=16.0)
    for step, pair in enumerate(pairs):
        for inputs, targets in pair:
            with torch.autocast("cpu", torch.float16):
                outputs = model(inputs)
            scaler.scale(F.cross_entropy(outputs.float(), targets) * blow_up(step) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for taken, state, weights in run_ranks(rank_main, ranks):
        assert taken == [True, True, False]
        assert (
            state == {"loss_scale": scaler.get_scale(), "good_steps": 0, "skipped_steps": 1}
            and state["loss_scale"] == 8
        )
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-3)  # ranks round halves in float16


def test_the_loss_scale_is_in_the_checkpoint(tmp_path: Any) -> None:
    def make() -> tuple[Any, ...]:
        runtime = hocket.Runtime(device="cpu", precision={"fp16": {"init_scale": 16.0, "growth_interval": 2}})
        model = network()
        return runtime, *runtime.setup(model, adam(model))

    runtime, model, optimizer = make()
    for inputs, targets in list(loader())[:3]:
        runtime.backward(F.cross_entropy(model(inputs), targets))
        runtime.step(optimizer)
    runtime.save(tmp_path / "ckpt", model=model)
    other, model, _ = make()
    other.load(tmp_path / "ckpt", model=model)
    assert other.precision.state_dict() == {"loss_scale": 32.0, "good_steps": 1, "skipped_steps": 0}


@pytest.mark.parametrize("precision", ["tf32", "bf16-true"])
def test_precisions_around_forward_and_backward(precision: str) -> None:
    """Under tf32 both passes allow it, and nothing else does; under bf16-true what is handed out has 32 bits."""
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return inputs.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return gradient

    class Looking(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return Look.apply(inputs)

    before = torch.get_float32_matmul_precision()
    runtime = hocket.Runtime(device="cpu", precision=precision)
    network_ = nn.Sequential(network(), Looking())
    model, optimizer = runtime.setup(network_, adam(network_))
    loss = model(torch.randn(2, 8)).square().mean()
    assert loss.dtype is torch.float32
    runtime.backward(loss)
    assert runtime.step(optimizer)
    assert seen == ["high" if precision == "tf32" else before] * 2 and torch.get_float32_matmul_precision() == before


def test_two_optimizers_step_on_their_own() -> None:
    """Each has its parameters; the second finds its gradients as they were."""
    ours, theirs = network(), network()
    runtime = hocket.Runtime(device="cpu")
    model, *optimizers = runtime.setup(ours, *_two(ours))
    expected = _two(theirs)
    for inputs, targets in loader():
        runtime.backward(F.cross_entropy(model(inputs), targets))
        F.cross_entropy(theirs(inputs), targets).backward()
        for optimizer in optimizers:
            runtime.step(optimizer)
        for optimizer in expected:
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def _two(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.01)]


def test_collectives_and_speech(capsys: pytest.CaptureFixture[str]) -> None:
    def rank_main(rank: int) -> Any:
        runtime = hocket.Runtime(strategy="ddp", device="cpu", seed=5)
        runtime.barrier()
        sums = runtime.all_reduce(torch.tensor([1.0, rank]), "sum").tolist()
        mean = runtime.all_reduce(torch.tensor(float(rank))).item()
        return sums, mean, runtime.broadcast(f"from {rank}"), runtime.all_gather(rank), torch.rand(()).item()

    first, second = run_ranks(rank_main, 2)
    assert first[:4] == second[:4] == ([2.0, 1.0], 0.5, "from 0", [0, 1])
    assert first[4] != second[4], "each rank draws its own random numbers"
    runtime = hocket.Runtime(device="cpu")
    runtime.print("here", 1)
    assert capsys.readouterr().out == "here 1\n"
    assert (runtime.rank, runtime.world_size, runtime.all_gather(3)) == (0, 1, [3])


def test_weights_load_back() -> None:
    runtime = hocket.Runtime(device="cpu")
    model = runtime.setup(network())
    state = {name: value.clone() + 1 for name, value in runtime.model_state(model).items()}
    runtime.load_model_state(model, state)
    assert all(torch.equal(value, state[name]) for name, value in model.module.state_dict().items())
    with pytest.raises(RuntimeError, match="no_such_key"):
        runtime.load_model_state(model, {**state, "no_such_key": torch.zeros(1)})


@pytest.mark.parametrize("strategy, ranks", [("single", 1), ("ddp", 2)])
def test_a_loop_goes_on_from_what_it_saved(tmp_path: Any, strategy: str, ranks: int) -> None:
    """To the bit, random numbers and a plain torch schedule included."""

    def loop(runtime: hocket.Runtime, begin: int, end: int, resume: bool) -> dict[str, Tensor]:
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))
        model, optimizer = runtime.setup(model, adam(model))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        for number, (inputs, targets) in enumerate(runtime.setup_data(loader(), global_batch=8)):
            if resume and number == begin:
                kept = runtime.load(tmp_path / "ckpt", model=model, optimizer=optimizer, schedule=schedule)
                assert kept == {"step": begin}
            if begin <= number < end:
                runtime.backward(F.cross_entropy(model(inputs), targets))
                runtime.step(optimizer)
                schedule.step()
            if not resume and number == end - 1:
                runtime.save(tmp_path / "ckpt", model=model, optimizer=optimizer, schedule=schedule, step=end)
        return runtime.model_state(model)

    def rank_main(rank: int) -> Any:
        runtime = hocket.Runtime(strategy=strategy, device="cpu", seed=5)
        loop(runtime, 0, 3, resume=False)
        # Made alike but for weights and random numbers, which come from the checkpoint.
        return loop(hocket.Runtime(strategy=strategy, device="cpu", seed=6), 3, 6, resume=True)

    def whole(rank: int) -> Any:
        return loop(hocket.Runtime(strategy=strategy, device="cpu", seed=5), 0, 6, resume=False)

    stopped = run_ranks(rank_main, ranks)[0]
    expected = run_ranks(whole, ranks)[0]
    assert all(torch.equal(stopped[name], value) for name, value in expected.items())


def test_what_a_checkpoint_does_not_hold(tmp_path: Any) -> None:
    runtime = hocket.Runtime(device="cpu")
    model, optimizer = runtime.setup(model := network(), adam(model))
    runtime.save(tmp_path / "ckpt", model=model, losses=[1.0, 2.0])
    assert runtime.load(tmp_path / "ckpt", model=model) == {"losses": [1.0, 2.0]}
    with pytest.raises(CheckpointError, match=r"does not contain optimizer\. It contains: losses, model"):
        runtime.load(tmp_path / "ckpt", model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="AdamW holds 4 of 4 parameters that are not in the model"):
        runtime.save(tmp_path / "other", model=model, optimizer=adam(network()))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        runtime.save(tmp_path / "file" / "ckpt", model=model)


def test_misuse_is_an_error_that_says_what_to_do() -> None:
    runtime = hocket.Runtime(device="cpu")
    model, optimizer = runtime.setup(model := network(), adam(model))
    with pytest.raises(RuntimeError, match=r"Write runtime.backward\(loss\)"):
        runtime.step(optimizer)
    with pytest.raises(ValueError, match="give one of them"):
        runtime.clip_gradients(model, optimizer)
    with pytest.raises(ValueError, match="global_batch=8 is for training data"):
        runtime.setup_data(loader(), train=False, global_batch=8)
    for parts in ({"precision": "int8"}, {"strategy": "local-sgd"}):
        with pytest.raises(ValueError, match="only the Trainer's loop has"):
            hocket.Runtime(device="cpu", **parts)
    with pytest.raises(hocket.plugins.PluginError, match="ddp"):
        hocket.Runtime(strategy="dpp")


def _close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(weights) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-5)

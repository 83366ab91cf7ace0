"""The rows of the tables in docs/reference/accelerate.md: each row's `before` uses Accelerate, its `after` hocket.

A row returns what has to be equal. Started on several ranks with ``before FOLDER`` or ``after FOLDER``, this program runs the
rows that several ranks can run, and saves what each rank got.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hocket

#: By the first code of a row: the row.
ROWS: dict[str, Any] = {}
INPUTS, TARGETS = (torch.randn(24, size, generator=torch.Generator().manual_seed(size)) for size in (4, 1))


def row(name: str, ranks: bool = True, long: bool = False) -> Callable[[type], type]:
    """Register a row.

    Args:
        name: the first code of the row on the page.
        ranks: whether several ranks run it too, with an Accelerator and a Runtime in common.
        long: whether it starts processes.
    """

    def register(cls: type) -> type:
        cls.ranks, cls.long = ranks, long
        ROWS[name] = cls
        return cls

    return register


def objects() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4),
    )


def accelerated(accelerator):
    return accelerator.prepare(*objects())


def set_up(runtime):
    model, optimizer, loader = objects()
    return *runtime.setup(model, optimizer), runtime.setup_data(loader)


def weights(model):
    return {name.removeprefix("module."): each.detach().clone() for name, each in model.state_dict().items()}


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def train_accelerated(accelerator, model, optimizer, loader):
    losses = []
    for inputs, targets in loader:
        loss = mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(runtime, model, optimizer, loader):
    losses = []
    for inputs, targets in loader:
        loss = mse_loss(model(inputs), targets)
        runtime.backward(loss)
        runtime.step(optimizer)
        losses.append(loss.item())
    return losses


# --- Compare the numbers of both


def last_window(sizes, slopes, steps):
    """Return the gradient of the last step of a weight, with batches of these sizes and gradients, both ways."""
    from accelerate import Accelerator

    class Batches(torch.utils.data.Dataset):
        def __len__(self):
            return sum(sizes)

        def __getitem__(self, number):
            return torch.tensor([slope for size, slope in zip(sizes, slopes, strict=True) for _ in range(size)])[number]

    found = []
    loader = DataLoader(Batches(), batch_size=sizes[0])
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.unsqueeze(1)).mean())
            if accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 100.0)))
            optimizer.step()
            optimizer.zero_grad()
    runtime = hocket.Runtime(device="cpu")
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = runtime.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    batches, others = runtime.setup_data(loader), []
    for number, batch in enumerate(batches):
        last = number % 2 == 1 or number == len(batches) - 1
        with runtime.accumulate(model, last=last):
            runtime.backward(model(batch.unsqueeze(1)).mean())
        if last:
            others.append(float(runtime.clip_gradients(model, optimizer, norm=100.0)))
            runtime.step(optimizer)
    assert len(found) == len(others) == steps
    return found[-1], others[-1]


def learning_rate(side, shared):
    """Return the learning rate after six batches of a schedule that halves it, on each of several ranks."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4)
    if side == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, loader, scheduler = shared.prepare(model, optimizer, loader, scheduler)
    else:
        model, optimizer = shared.setup(model, optimizer)
        scheduler, loader = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), shared.setup_data(loader)
    for inputs, targets in loader:
        loss = mse_loss(model(inputs), targets)
        shared.backward(loss)
        optimizer.step() if side == "before" else shared.step(optimizer)
        scheduler.step()
    return optimizer.param_groups[0]["lr"]


# --- Create


@row('Accelerator(mixed_precision="bf16", cpu=True)', ranks=False)
class Precision:
    def before(accelerator, folder):
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        model, optimizer, loader = accelerated(accelerator)
        losses = train_accelerated(accelerator, model, optimizer, loader)
        return accelerator.mixed_precision, losses, weights(model), model(INPUTS[:2]).dtype

    def after(runtime, folder):
        runtime = hocket.Runtime(precision="bf16", device="cpu")
        model, optimizer, loader = set_up(runtime)
        losses = train(runtime, model, optimizer, loader)
        return "bf16", losses, weights(model), model(INPUTS[:2]).dtype


@row("Accelerator(cpu=True)", ranks=False)
class Cpu:
    def before(accelerator, folder):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        return accelerator.device.type

    def after(runtime, folder):
        runtime = hocket.Runtime(device="cpu")
        return runtime.device.type


@row("DataLoaderConfiguration(split_batches=True)")
class SplitBatches:
    def before(accelerator, folder):
        from accelerate import Accelerator, DataLoaderConfiguration

        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
        assert accelerator.split_batches
        return [inputs for inputs, _ in accelerator.prepare(objects()[2])]

    def after(runtime, folder):
        loader = objects()[2]
        loader = runtime.setup_data(loader, global_batch=4)
        return [inputs for inputs, _ in loader]


@row("set_seed(1, device_specific=True)")
class Seed:
    def before(accelerator, folder):
        import random

        from accelerate.utils import set_seed

        set_seed(1, device_specific=True)
        return torch.rand(2), random.random()

    def after(runtime, folder):
        import random

        hocket.Runtime(seed=1, device="cpu")
        return torch.rand(2), random.random()


# --- Prepare and train


@row("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)")
class Prepare:
    def before(accelerator, folder):
        model, optimizer, loader = objects()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = train_accelerated(accelerator, model, optimizer, loader)
        return len(loader), losses, weights(model)

    def after(runtime, folder):
        model, optimizer, loader = objects()
        model, optimizer = runtime.setup(model, optimizer)
        loader = runtime.setup_data(loader)
        losses = train(runtime, model, optimizer, loader)
        return len(loader), losses, weights(model)


@row("accelerator.prepare_model(model)")
class PrepareParts:
    def before(accelerator, folder):
        model, optimizer, loader = objects()
        model = accelerator.prepare_model(model)
        optimizer = accelerator.prepare_optimizer(optimizer)
        loader = accelerator.prepare_data_loader(loader)
        return train_accelerated(accelerator, model, optimizer, loader), weights(model)

    def after(runtime, folder):
        model, optimizer, loader = objects()
        model = runtime.setup(model)
        optimizer = runtime.setup(optimizer)
        loader = runtime.setup_data(loader)
        return train(runtime, model, optimizer, loader), weights(model)


@row("accelerator.prepare_scheduler(scheduler)", ranks=False)
class Scheduler:
    def before(accelerator, folder):
        model, optimizer, loader = accelerated(accelerator)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2)
        scheduler = accelerator.prepare_scheduler(scheduler)
        for inputs, targets in loader:
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return weights(model), optimizer.param_groups[0]["lr"]

    def after(runtime, folder):
        model, optimizer, loader = set_up(runtime)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for inputs, targets in loader:
            runtime.backward(mse_loss(model(inputs), targets))
            runtime.step(optimizer)
            scheduler.step()
        return weights(model), optimizer.param_groups[0]["lr"]


@row("accelerator.backward(loss)")
class Backward:
    def before(accelerator, folder):
        model, _, loader = accelerated(accelerator)
        inputs, targets = next(iter(loader))
        loss = mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        return gradients(model)

    def after(runtime, folder):
        model, _, loader = set_up(runtime)
        inputs, targets = next(iter(loader))
        loss = mse_loss(model(inputs), targets)
        runtime.backward(loss)
        return gradients(model)


@row("optimizer.step()")
class Step:
    def before(accelerator, folder):
        model, optimizer, loader = accelerated(accelerator)
        inputs, targets = next(iter(loader))
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        return weights(model), [parameter.grad for parameter in model.parameters()]

    def after(runtime, folder):
        model, optimizer, loader = set_up(runtime)
        inputs, targets = next(iter(loader))
        runtime.backward(mse_loss(model(inputs), targets))
        runtime.step(optimizer)
        return weights(model), [parameter.grad for parameter in model.parameters()]


@row("with accelerator.accumulate(model):", ranks=False)
class Accumulate:
    def before(accelerator, folder):
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        model, optimizer, loader = accelerated(accelerator)
        stepped = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                stepped.append(accelerator.sync_gradients)
                assert accelerator.gradient_state.sync_gradients == accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.gradient_accumulation_steps == 2
        return weights(model), stepped

    def after(runtime, folder):
        model, optimizer, loader = set_up(runtime)
        stepped = []
        for number, (inputs, targets) in enumerate(loader):
            last = number % 2 == 1 or number == len(loader) - 1
            with runtime.accumulate(model, last=last):
                runtime.backward(mse_loss(model(inputs), targets))
            if last:
                runtime.step(optimizer)
            stepped.append(last)
        return weights(model), stepped


@row("with accelerator.no_sync(model):")
class NoSync:
    def before(accelerator, folder):
        model, optimizer, loader = accelerated(accelerator)
        (first, one), (second, other), *_ = [*loader, *loader]
        with accelerator.no_sync(model):
            accelerator.backward(mse_loss(model(first), one) / 2)
        accelerator.backward(mse_loss(model(second), other) / 2)
        optimizer.step()
        return weights(model)

    def after(runtime, folder):
        model, optimizer, loader = set_up(runtime)
        (first, one), (second, other), *_ = [*loader, *loader]
        with runtime.accumulate(model, last=False):
            runtime.backward(mse_loss(model(first), one))
        with runtime.accumulate(model, last=True):
            runtime.backward(mse_loss(model(second), other))
        runtime.step(optimizer)
        return weights(model)


@row("with accelerator.trigger_sync_in_backward(model):")
class TriggerSync:
    def before(accelerator, folder):
        model, optimizer, loader = accelerated(accelerator)
        (first, one), (second, other), *_ = [*loader, *loader]
        with accelerator.no_sync(model):
            accelerator.backward(mse_loss(model(first), one) / 2)
            loss = mse_loss(model(second), other) / 2
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
        optimizer.step()
        return weights(model)

    def after(runtime, folder):
        model, optimizer, loader = set_up(runtime)
        (first, one), (second, other), *_ = [*loader, *loader]
        with runtime.accumulate(model, last=False):
            runtime.backward(mse_loss(model(first), one))
        with runtime.accumulate(model, last=True):
            runtime.backward(mse_loss(model(second), other))
        runtime.step(optimizer)
        return weights(model)


@row("accelerator.clip_grad_norm_(model.parameters(), 0.1)")
class ClipNorm:
    def before(accelerator, folder):
        model, _, loader = accelerated(accelerator)
        inputs, targets = next(iter(loader))
        accelerator.backward(mse_loss(model(inputs), targets))
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        return float(norm), gradients(model)

    def after(runtime, folder):
        model, optimizer, loader = set_up(runtime)
        inputs, targets = next(iter(loader))
        runtime.backward(mse_loss(model(inputs), targets))
        norm = runtime.clip_gradients(model, optimizer, norm=0.1)
        return float(norm), gradients(model)


@row("accelerator.clip_grad_value_(model.parameters(), 0.1)")
class ClipValue:
    def before(accelerator, folder):
        model, _, loader = accelerated(accelerator)
        inputs, targets = next(iter(loader))
        accelerator.backward(mse_loss(model(inputs), targets))
        accelerator.clip_grad_value_(model.parameters(), 0.1)
        return gradients(model)

    def after(runtime, folder):
        model, optimizer, loader = set_up(runtime)
        inputs, targets = next(iter(loader))
        runtime.backward(mse_loss(model(inputs), targets))
        runtime.clip_gradients(model, optimizer, value=0.1)
        return gradients(model)


@row("accelerator.optimizer_step_was_skipped", ranks=False)
class Skipped:
    """Accelerate gives CPUs no GradScaler, so that of torch takes its place."""

    def before(accelerator, folder):
        accelerator.scaler = torch.amp.GradScaler("cpu")
        model, optimizer, _ = accelerated(accelerator)
        skipped = []
        for size in (1e30, 1.0):
            accelerator.backward(mse_loss(model(INPUTS * size), TARGETS))
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
        return skipped

    def after(runtime, folder):
        runtime = hocket.Runtime(precision="fp16", device="cpu")
        model, optimizer, _ = set_up(runtime)
        skipped = []
        for size in (1e30, 1.0):
            runtime.backward(mse_loss(model(INPUTS), TARGETS * size))
            skipped.append(not runtime.step(optimizer))
        return skipped


@row("with accelerator.autocast():", ranks=False)
class Autocast:
    def before(accelerator, folder):
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        model = accelerator.prepare(objects()[0])
        with accelerator.autocast():
            return (model(INPUTS) @ INPUTS.T[:1]).float()

    def after(runtime, folder):
        runtime = hocket.Runtime(precision="bf16", device="cpu")
        model = runtime.setup(objects()[0])
        with runtime.precision.forward_context():
            return (model(INPUTS) @ INPUTS.T[:1]).float()


# --- Models


@row("accelerator.unwrap_model(model)")
class Unwrap:
    def before(accelerator, folder):
        model = objects()[0]
        given = model
        model = accelerator.prepare(model)
        return accelerator.unwrap_model(model) is given, accelerator.unwrap_model(model).in_features

    def after(runtime, folder):
        model = objects()[0]
        given = model
        model = runtime.setup(model)
        return model.module is given, model.in_features


@row("accelerator.get_state_dict(model)")
class StateDict:
    def before(accelerator, folder):
        model, *_ = accelerated(accelerator)
        return dict(accelerator.get_state_dict(model))

    def after(runtime, folder):
        model, *_ = set_up(runtime)
        return runtime.model_state(model)


@row("accelerator.save_model(model, folder)", ranks=False)
class SaveModel:
    def before(accelerator, folder):
        model, *_ = accelerated(accelerator)
        accelerator.save_model(model, folder)
        return hocket.checkpoints.read_weights(f"{folder}/model.safetensors")

    def after(runtime, folder):
        from safetensors.torch import save_file

        model, *_ = set_up(runtime)
        state = runtime.model_state(model)
        if runtime.rank == 0:
            save_file(state, f"{folder}/model.safetensors")
        return hocket.checkpoints.read_weights(f"{folder}/model.safetensors")


@row("accelerator.save(thing, path)")
class Save:
    def before(accelerator, folder):
        thing, path = {"rank": accelerator.process_index}, f"{folder}/thing.pt"
        accelerator.save(thing, path)
        accelerator.wait_for_everyone()
        return torch.load(path)

    def after(runtime, folder):
        thing, path = {"rank": runtime.rank}, f"{folder}/thing.pt"
        if runtime.rank == 0:
            torch.save(thing, path)
        runtime.barrier()
        return torch.load(path)


# --- Checkpoints


@row("accelerator.save_state(folder)")
class State:
    def before(accelerator, folder):
        torch.manual_seed(5)
        accelerator.free_memory()  # of other rows, which have the Accelerator too
        model, optimizer, loader = accelerated(accelerator)
        train_accelerated(accelerator, model, optimizer, loader)
        accelerator.save_state(folder)
        number = torch.rand(1)
        expected = train_accelerated(accelerator, model, optimizer, loader)
        accelerator.load_state(folder)
        assert torch.equal(number, torch.rand(1))
        assert train_accelerated(accelerator, model, optimizer, loader) == expected
        return expected, weights(model)

    def after(runtime, folder):
        torch.manual_seed(5)
        model, optimizer, loader = set_up(runtime)
        train(runtime, model, optimizer, loader)
        runtime.save(folder, model=model, optimizer=optimizer)
        number = torch.rand(1)
        expected = train(runtime, model, optimizer, loader)
        runtime.load(folder, model=model, optimizer=optimizer)
        assert torch.equal(number, torch.rand(1))
        assert train(runtime, model, optimizer, loader) == expected
        return expected, weights(model)


@row("accelerator.register_for_checkpointing(scheduler)", ranks=False)
class Register:
    def before(accelerator, folder):
        optimizer = objects()[1]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        optimizer.step()
        accelerator.register_for_checkpointing(scheduler)
        state = scheduler.state_dict()
        accelerator.save_state(folder)
        scheduler.step()
        accelerator.load_state(folder)
        return scheduler.state_dict() == state

    def after(runtime, folder):
        optimizer = objects()[1]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        optimizer.step()
        state = scheduler.state_dict()
        runtime.save(folder, scheduler=scheduler)
        scheduler.step()
        runtime.load(folder, scheduler=scheduler)
        return scheduler.state_dict() == state


@row("accelerator.skip_first_batches(loader, 2)")
class SkipFirst:
    def before(accelerator, folder):
        loader = accelerator.prepare(objects()[2])
        return [inputs for inputs, _ in accelerator.skip_first_batches(loader, 2)]

    def after(runtime, folder):
        from itertools import islice

        loader = runtime.setup_data(objects()[2])
        return [inputs for inputs, _ in islice(loader, 2, None)]


# --- Ranks


@row("accelerator.process_index")
class Rank:
    def before(accelerator, folder):
        assert accelerator.state.process_index == accelerator.process_index
        assert accelerator.state.device == accelerator.device
        return (
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.is_main_process,
            accelerator.is_last_process,
        )

    def after(runtime, folder):
        return runtime.rank, runtime.world_size, runtime.rank == 0, runtime.rank == runtime.world_size - 1


@row("accelerator.local_process_index")
class LocalRank:
    def before(accelerator, folder):
        return accelerator.local_process_index, accelerator.is_local_main_process

    def after(runtime, folder):
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        return local_rank, local_rank == 0


@row("accelerator.use_distributed")
class Several:
    def before(accelerator, folder):
        assert accelerator.multi_device is False  # on CPUs
        return accelerator.use_distributed, accelerator.distributed_type != "NO"

    def after(runtime, folder):
        return runtime.world_size > 1, runtime.world_size > 1


@row("accelerator.device")
class Device:
    def before(accelerator, folder):
        return accelerator.device.type

    def after(runtime, folder):
        return runtime.device.type


@row('accelerator.print("once")')
class Print:
    def before(accelerator, folder):
        return printed(lambda: accelerator.print("once"))

    def after(runtime, folder):
        return printed(lambda: runtime.print("once"))


@row("accelerator.wait_for_everyone()")
class Wait:
    def before(accelerator, folder):
        Path(folder, f"{accelerator.process_index}").touch()
        accelerator.wait_for_everyone()
        return sorted(os.listdir(folder))

    def after(runtime, folder):
        Path(folder, f"{runtime.rank}").touch()
        runtime.barrier()
        return sorted(os.listdir(folder))


@row("with accelerator.main_process_first():")
class MainFirst:
    def before(accelerator, folder):
        file = Path(folder, "file")

        def prepare():
            found = file.exists()
            file.touch()
            return found

        with accelerator.main_process_first():
            return prepare()

    def after(runtime, folder):
        file = Path(folder, "file")

        def prepare():
            found = file.exists()
            file.touch()
            return found

        if runtime.rank > 0:
            runtime.barrier()
        found = prepare()
        if runtime.rank == 0:
            runtime.barrier()
        return found


@row("with accelerator.local_main_process_first():")
class LocalMainFirst:
    def before(accelerator, folder):
        file = Path(folder, "file")

        def prepare():
            found = file.exists()
            file.touch()
            return found

        with accelerator.local_main_process_first():
            return prepare()

    def after(runtime, folder):
        file = Path(folder, "file")

        def prepare():
            found = file.exists()
            file.touch()
            return found

        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank > 0:
            runtime.barrier()
        found = prepare()
        if local_rank == 0:
            runtime.barrier()
        return found


@row("@accelerator.on_main_process")
class OnMain:
    def before(accelerator, folder):
        called = []

        @accelerator.on_main_process
        def report():
            called.append(1)

        report()
        return called

    def after(runtime, folder):
        called = []

        def report():
            called.append(1)

        if runtime.rank == 0:
            report()
        return called


@row("@accelerator.on_last_process")
class OnOthers:
    def before(accelerator, folder):
        called = []

        @accelerator.on_last_process
        def report():
            called.append("last")

        @accelerator.on_process(process_index=0)
        def first():
            called.append("first")

        report(), first()
        return called

    def after(runtime, folder):
        called = []
        if runtime.rank == runtime.world_size - 1:
            called.append("last")
        if runtime.rank == 0:
            called.append("first")
        return called


@row("@accelerator.on_local_main_process")
class OnLocal:
    def before(accelerator, folder):
        called = []

        @accelerator.on_local_main_process
        def report():
            called.append("main")

        @accelerator.on_local_process(local_process_index=0)
        def other():
            called.append("0")

        report(), other()
        return called

    def after(runtime, folder):
        called = []
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank == 0:
            called += ["main", "0"]
        return called


@row("accelerator.gather(tensor)")
class Gather:
    def before(accelerator, folder):
        tensor = torch.ones(2, 3) * accelerator.process_index
        return accelerator.gather(tensor)

    def after(runtime, folder):
        tensor = torch.ones(2, 3) * runtime.rank
        return torch.cat(runtime.all_gather(tensor))


@row("accelerator.gather_for_metrics(outputs)")
class GatherForMetrics:
    """Of 22 samples in batches of 4, whose order over ranks is another one."""

    def before(accelerator, folder):
        loader = accelerator.prepare(DataLoader(INPUTS[:22], batch_size=4))
        found = []
        for inputs in loader:
            outputs = inputs.sum(1)
            found.append(accelerator.gather_for_metrics(outputs))
        return torch.cat(found).sort().values

    def after(runtime, folder):
        loader = DataLoader(INPUTS[:22], batch_size=4)
        loader = runtime.setup_data(loader, train=False)
        outputs = [inputs.sum(1) for inputs in loader]
        return torch.cat([each for of_rank in runtime.all_gather(outputs) for each in of_rank]).sort().values


@row('accelerator.reduce(tensor.clone(), "sum")')
class Reduce:
    def before(accelerator, folder):
        tensor = torch.arange(3.0) + accelerator.process_index
        return accelerator.reduce(tensor.clone(), "sum"), accelerator.reduce(tensor.clone(), "mean")

    def after(runtime, folder):
        tensor = torch.arange(3.0) + runtime.rank
        return runtime.all_reduce(tensor, "sum"), runtime.all_reduce(tensor, "mean")


@row("accelerator.pad_across_processes(tensor)")
class Pad:
    def before(accelerator, folder):
        tensor = torch.ones(2 + accelerator.process_index, 3)
        return accelerator.gather(accelerator.pad_across_processes(tensor))

    def after(runtime, folder):
        from torch.nn.utils.rnn import pad_sequence

        tensor = torch.ones(2 + runtime.rank, 3)
        return pad_sequence(runtime.all_gather(tensor), batch_first=True).flatten(0, 1)


@row("accelerator.set_trigger()")
class Trigger:
    def before(accelerator, folder):
        found = [accelerator.check_trigger()]
        if accelerator.is_last_process:
            accelerator.set_trigger()
        return [*found, accelerator.check_trigger(), accelerator.check_trigger()]

    def after(runtime, folder):
        stop = False
        found = [bool(runtime.all_reduce(stop, "max"))]
        if runtime.rank == runtime.world_size - 1:
            stop = True
        found.append(bool(runtime.all_reduce(stop, "max")))
        stop = False
        return [*found, bool(runtime.all_reduce(stop, "max"))]


@row("with accelerator.split_between_processes(tensor) as part:")
class SplitBetween:
    def before(accelerator, folder):
        tensor = torch.arange(5)
        with accelerator.split_between_processes(tensor) as part:
            return part

    def after(runtime, folder):
        tensor = torch.arange(5)
        part = tensor.tensor_split(runtime.world_size)[runtime.rank]
        return part


# --- Log and end


@row('accelerator.log({"loss": 0.5}, step=1)', ranks=False)
class Log:
    def before(accelerator, folder):
        from accelerate import Accelerator
        from accelerate.tracking import GeneralTracker, on_main_process

        class Lines(GeneralTracker):
            name, requires_logging_directory = "lines", False

            @property
            def tracker(self):
                return self

            @on_main_process
            def store_init_configuration(self, values):
                pass

            @on_main_process
            def log(self, values, step=None, **kwargs):
                with open(f"{folder}/log.jsonl", "a") as file:
                    print(json.dumps({"step": step, **values}), file=file)

        tracker = Lines()
        accelerator = Accelerator(log_with=tracker, project_dir=folder, cpu=True)
        accelerator.init_trackers("project")
        accelerator.log({"loss": 0.5}, step=1)
        assert accelerator.get_tracker("lines") is tracker
        accelerator.end_training()
        return Path(folder, "log.jsonl").read_text()

    def after(runtime, folder):
        if runtime.rank == 0:
            with open(f"{folder}/log.jsonl", "a") as file:
                print(json.dumps({"step": 1, "loss": 0.5}), file=file)
        runtime.close()
        return Path(folder, "log.jsonl").read_text()


@row("accelerator.free_memory(model, optimizer, loader)", ranks=False)
class FreeMemory:
    def before(accelerator, folder):
        import weakref

        model, optimizer, loader = accelerated(accelerator)
        there = weakref.ref(model)
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        assert accelerator.clear() == []
        return there() is None

    def after(runtime, folder):
        import gc
        import weakref

        model, optimizer, loader = set_up(runtime)
        there = weakref.ref(model)
        del model, optimizer, loader
        gc.collect()
        return there() is None


# --- Start


@row("accelerate launch --num_processes 1 train.py", ranks=False, long=True)
class Launch:
    """On two ranks in `test_two_ranks`, of which Accelerate's launcher starts only one on CPUs."""

    def before(accelerator, folder):
        return launched(
            folder, "accelerate.commands.accelerate_cli", "accelerate launch --num_processes 1 train.py", "--cpu"
        )

    def after(runtime, folder):
        return launched(folder, "hocket", "hocket launch -n 1 train.py")


@row("notebook_launcher(train, (2,), num_processes=2)", ranks=False, long=True)
class Notebook:
    def before(accelerator, folder):
        return in_script(
            folder,
            "from accelerate import notebook_launcher, PartialState as State\nrank = lambda: State(cpu=True).process_index",
            "notebook_launcher(train, (2,), num_processes=2)",
        )

    def after(runtime, folder):
        return in_script(
            folder, "import hocket\nrank = lambda: hocket.Runtime(device='cpu').rank", "hocket.launch(train, 2, 2)"
        )


@row("@find_executable_batch_size(starting_batch_size=16)", ranks=False)
class BatchSize:
    """A device that has memory for six samples: what fits, and the samples that a step has."""

    def before(accelerator, folder):
        from accelerate.utils import find_executable_batch_size

        seen = []

        @find_executable_batch_size(starting_batch_size=16)
        def train(batch_size):
            seen.append(batch_size)
            Small()(INPUTS[:batch_size])
            return batch_size

        return train() <= 6

    def after(runtime, folder):
        model = Small()
        trainer = hocket.Trainer(
            model=model,
            loss="mse_loss",
            train_data=[(INPUTS[:16], TARGETS[:16])],
            optimizer="sgd(lr=0.1)",
            duration="1ba",
            microbatch="auto",
            device="cpu",
        )
        trainer.fit()
        return trainer.state.timestamp.sample == 16 and model.largest <= 6


class Small(nn.Linear):
    largest = 0

    def __init__(self):
        super().__init__(4, 1)

    def forward(self, inputs):
        if len(inputs) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        self.largest = max(self.largest, len(inputs))
        return super().forward(inputs)


def printed(function):
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as text:
        function()
    return text.getvalue()


def launched(folder, module, command, *options):
    """Run a command line of a launcher, by the module of its program and with further options."""
    import subprocess

    Path(folder, "train.py").write_text("import sys; print(sys.argv[1:], flush=True)")
    _, launch, *given = command.split()
    command = [sys.executable, "-m", module, launch, *options, *given, "--lr", "0.1"]
    return subprocess.run(command, check=True, cwd=folder, text=True, stdout=subprocess.PIPE, timeout=100).stdout


def in_script(folder, imports, call):
    """Return what the ranks that a call starts write, in a process of its own, which has used no threads of torch yet."""
    import subprocess

    text = f"""{imports}
from pathlib import Path
def train(number):
    Path({str(folder)!r}, str(rank())).write_text(str(number))
if __name__ == "__main__":
    {call}
"""
    Path(folder, "script.py").write_text(text)
    subprocess.run(
        [sys.executable, f"{folder}/script.py"], check=True, timeout=100, env={**os.environ, "ACCELERATE_USE_CPU": "1"}
    )
    return {name: Path(folder, name).read_text() for name in ("0", "1")}


def main(side: str, folder: str) -> None:
    """Run the rows of several ranks, and save what this rank got."""
    if side == "before":
        from accelerate import Accelerator

        shared: Any = Accelerator(cpu=True)
        rank, wait = shared.process_index, shared.wait_for_everyone
    else:
        shared = hocket.Runtime(device="cpu")
        rank, wait = shared.rank, shared.barrier
    found = {"learning rate": learning_rate(side, shared)}
    for number, (name, each) in enumerate(ROWS.items()):
        if each.ranks:
            own = Path(folder, side, str(number))
            own.mkdir(parents=True, exist_ok=True)
            wait()
            found[name] = getattr(each, side)(shared, own)
    torch.save(found, Path(folder, f"{side}-{rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Mistakes in custom loops with `hocket.Runtime` and its stepper."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from newcomers import INPUTS, LABELS, Mistake, loader, model
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import hocket


class Loop:
    """A Runtime with a model and an optimizer."""

    def __init__(self, **given: Any) -> None:
        self.runtime = hocket.Runtime(device="cpu", **given)
        self.net = model()
        self.both = self.runtime.setup(self.net, SGD(self.net.parameters(), 0.1))
        self.model, self.optimizer = self.both

    def loss(self, called: Any = None) -> torch.Tensor:
        return F.cross_entropy((called or self.model)(INPUTS), LABELS)

    def stepped(self, called: Any = None) -> bool:
        self.runtime.backward(self.loss(called))
        return self.runtime.step(self.optimizer)

    def own_backward(self) -> None:
        self.loss().backward()
        self.runtime.step(self.optimizer)

    def own_step(self) -> None:
        self.runtime.backward(self.loss())
        self.optimizer.step()

    def stepper(self, *given: Any, **named: Any) -> Any:
        step = self.runtime.stepper(self.model, self.optimizer, **named)
        return step(*given) if given else step

    def in_block(self, given: Any) -> None:
        with self.runtime.accumulate(given):
            self.stepped()

    def step_in_each_block(self) -> None:
        for last in (False, True):
            with self.runtime.accumulate(self.model, last=last):
                self.stepped()

    def result_again(self) -> None:
        result = self.stepper(lambda batch: F.cross_entropy(self.model(batch[0]), batch[1]), (INPUTS, LABELS))
        self.runtime.backward(result.loss)


def loop(make: Callable[[Loop], Any], **given: Any) -> Callable[[], Any]:
    """Make a mistake in a loop."""
    return lambda: make(Loop(**given))


def saved(make: Callable[[Loop, str], Any]) -> Callable[[], Any]:
    """Make a mistake with a checkpoint of a model and a number, in a folder with weights too."""

    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            one = Loop()
            one.runtime.save(Path(folder) / "a", model=one.model, epoch=3)
            torch.save(one.net.state_dict(), Path(folder) / "m.pt")
            return make(one, f"{folder}/")

    return run


def unpacked() -> Any:
    """Unpack the one model that setup returned."""
    first, second = hocket.Runtime(device="cpu").setup(model())
    return first, second


def enter(given: Any) -> Any:
    """Call a function with a loss that was computed."""
    return lambda batch: given


# fmt: off
MISTAKES = [
    # set-up
    Mistake("setup(model, 'adamw')", loop(lambda it: it.runtime.setup(model(), "adamw(lr=1e-3)")), "'adamw(lr=1e-3)'", "torch.optim.Optimizer", "torch.optim.AdamW(model.parameters(), lr=1e-3)"),
    Mistake("setup(model, SGD)", loop(lambda it: it.runtime.setup(model(), SGD)), "given SGD", "torch.optim.Optimizer", "torch.optim.SGD(model.parameters(), lr=1e-3)"),
    Mistake("setup(model, optimizer, schedule)", loop(lambda it: it.runtime.setup(StepLR(it.optimizer, 1))), "a schedule (StepLR)", "It takes models", "schedule.step() after runtime.step(optimizer)"),
    Mistake("setup(model, function)", loop(lambda it: it.runtime.setup(model(), F.cross_entropy)), "cross_entropy", "It takes models", "model, optimizer = runtime.setup(model, optimizer)"),
    Mistake("setup twice", loop(lambda it: it.runtime.setup(*it.both)), "Linear has parameters of a model that was set up", "what setup returned", "optimizer = runtime.setup(optimizer)"),
    Mistake("setup(…, scheduler=…)", loop(lambda it: it.runtime.setup(it.net, scheduler=StepLR(it.optimizer, 1))), "no argument scheduler=", "a schedule needs no set-up", "schedule.step()"),
    Mistake("the tuple of setup, called", loop(lambda it: it.both(INPUTS)), "What setup returned was called", "a tuple (model, optimizer)", "model, optimizer = runtime.setup(model, optimizer)"),
    Mistake("an attribute of the tuple of setup", loop(lambda it: it.both.parameters()), "asked for 'parameters'", "a tuple (model, optimizer)", "model, optimizer = runtime.setup(model, optimizer)"),
    Mistake("a model unpacked", unpacked, "a model (Linear)", "as many as it is given", "model, optimizer = runtime.setup("),
    Mistake("setup_data of two loaders", loop(lambda it: it.runtime.setup_data(loader(), loader())), "DataLoader(…), DataLoader(…)", "takes loader", "data = runtime.setup_data(loader), once for each"),
    Mistake("setup_data(shuffle=…)", loop(lambda it: it.runtime.setup_data(loader(), shuffle=True)), "no argument shuffle=True", "Its arguments are loader", "DataLoader(dataset, shuffle=True)"),
    # steps
    Mistake("step()", loop(lambda it: it.runtime.step()), "Runtime.step was not given optimizer", "once for each optimizer", "runtime.step(optimizer)"),
    Mistake("step(optimizer, optimizer)", loop(lambda it: it.runtime.step(it.optimizer, it.optimizer)), "given 2 values: SGD", "takes optimizer", "runtime.step(optimizer), once for each"),
    Mistake("step(loss)", loop(lambda it: it.runtime.step(it.loss())), "a tensor of shape () (a loss)", "an optimizer that setup returned", "runtime.step(optimizer), after runtime.backward(loss)"),
    Mistake("step(model)", loop(lambda it: it.runtime.step(it.model)), "(a model)", "an optimizer that setup returned", "runtime.step(optimizer)"),
    Mistake("step(None)", loop(lambda it: it.runtime.step(None)), "given None", "an optimizer that setup returned", "runtime.step(optimizer)"),
    Mistake("loss.backward()", loop(Loop.own_backward), "The gradients are not those of runtime.backward", "which weights and scales losses", "runtime.backward(loss) instead of loss.backward()"),
    Mistake("step without backward", loop(lambda it: it.runtime.step(it.optimizer)), "no gradients", "since the last step", "runtime.backward(loss)"),
    Mistake("optimizer.step()", loop(Loop.own_step), "SGD.step() was called", "neither averaged", "runtime.step(optimizer)"),
    Mistake("optimizer.step() under fp16", loop(Loop.own_step, precision="fp16"), "SGD.step() was called", "nor unscaled", "runtime.step(optimizer)"),
    Mistake("the given module called, bf16", loop(lambda it: it.stepped(it.net), precision="bf16"), "the module that was given to setup was called", "what setup returned", "outputs = model(inputs)"),
    Mistake("the given module called, fp16", loop(lambda it: it.stepped(it.model.module), precision="fp16"), "the module that was given to setup was called", "what setup returned", "outputs = model(inputs)"),
    Mistake("backward with a negative weight", loop(lambda it: it.runtime.backward(it.loss(), weight=-2)), "weight=-2", "the number of elements", "Write 0 or more"),
    Mistake("accumulate(4)", loop(lambda it: it.in_block(4)), "given 4", "a model that setup returned", "last = number % 4 == 3"),
    Mistake("accumulate(net)", loop(lambda it: it.in_block(it.net)), "given Linear", "a model that setup returned", "model = runtime.setup(model)"),
    Mistake("accumulate(steps=4)", loop(lambda it: it.runtime.accumulate(it.model, steps=4)), "no argument steps=4", "Its arguments are model, last", "last=number % 4 == 3"),
    Mistake("a step in each accumulate block", loop(Loop.step_in_each_block), "A step follows an accumulate block with last=False", "last block before a step", "last=True"),
    Mistake("clip_gradients(model, 1.0)", loop(lambda it: it.runtime.clip_gradients(it.model, 1.0)), "given 1.0 as its optimizer", "takes an optimizer", "clip_gradients(model, optimizer, norm=1.0)"),
    Mistake("clip_gradients(max_norm=…)", loop(lambda it: it.runtime.clip_gradients(it.model, it.optimizer, max_norm=1.0)), "max_norm=1.0", "Its arguments are model, optimizer, norm, value", "norm=1.0"),
    Mistake("clip_gradients(norm='1.0')", loop(lambda it: (it.runtime.backward(it.loss()), it.runtime.clip_gradients(it.model, it.optimizer, norm="1.0"))), "threshold='1.0'", "positive numbers", "norm=1.0"),
    Mistake("all_reduce(…, 'avg')", loop(lambda it: it.runtime.all_reduce(INPUTS, "avg")), "op='avg'", "use one of 'mean', 'sum'", "all_reduce(tensor, 'mean')"),
    Mistake("all_reduce(…, ReduceOp.MAX)", loop(lambda it: it.runtime.all_reduce(INPUTS, torch.distributed.ReduceOp.MAX)), "RedOpType.MAX", "use one of 'mean', 'sum'", "all_reduce(tensor, 'max')"),
    # the stepper
    Mistake("stepper(clip_norm=…)", loop(lambda it: it.stepper(clip_norm=1.0)), "clip_norm=1.0", "Its arguments are model, microbatch, clip", "clip=1.0"),
    Mistake("stepper of an unknown optimizer", loop(lambda it: it.stepper(enter(it.loss()), INPUTS, "sgd")), "'sgd'", "there is '0'", "runtime.stepper(model, sgd=optimizer)"),
    Mistake("stepper's step(loss)", loop(lambda it: it.stepper(it.loss())), "not given a batch", "the function itself", "step(loss_function, batch)"),
    Mistake("stepper's step(lambda: …, batch)", loop(lambda it: it.stepper(lambda: it.loss(), INPUTS)), "takes other arguments", "with (batch)", "lambda batch: …"),
    Mistake("stepper's step.batch", loop(lambda it: it.stepper().batch), "has no 'batch'", "it has", "for number, batch in enumerate(data)"),
    Mistake("backward after stepper's step", loop(Loop.result_again), "The loss has no gradient", "computes gradients and steps", "omit runtime.backward"),
    # checkpoints
    Mistake("save(model, path)", loop(lambda it: it.runtime.save(it.model, "d")), "given 2 values: PreparedModel(…), 'd'", "takes path", "model=model, optimizer=optimizer"),
    Mistake("save(path, model)", loop(lambda it: it.runtime.save("d", it.model)), "given 2 values: 'd', PreparedModel(…)", "takes path", "model=model, optimizer=optimizer"),
    Mistake("save(state_dict, path)", loop(lambda it: it.runtime.save(it.net.state_dict(), "m.pt")), "OrderedDict(…), 'm.pt'", "takes path", "model=model, optimizer=optimizer"),
    Mistake("save(model)", loop(lambda it: it.runtime.save(it.model)), "path=PreparedModel(…)", "a folder", "runtime.save('runs/a', model=model"),
    Mistake("load(…, epoch=epoch)", saved(lambda it, folder: it.runtime.load(folder + "a", model=it.model, epoch=0)), "epoch=0", "objects to load into", "epoch = rest['epoch']"),
    Mistake("load of what was not saved", saved(lambda it, folder: it.runtime.load(folder + "a", model=it.model, optimizer=it.optimizer)), "does not contain optimizer", "It contains: epoch, model", "model=model, optimizer=optimizer)"),
    Mistake("load of a file of weights", saved(lambda it, folder: it.runtime.load(folder + "m.pt", model=it.model)), "it is a file", "a folder with manifest.json", "runtime.load_model_state(model, torch.load("),
    Mistake("load of nothing", saved(lambda it, folder: it.runtime.load(folder + "b")), "b is not a checkpoint", "there is no such folder", "that runtime.save wrote"),
]

"""Each kind of bad plug-in fails the check that is there for it, with a message that names the fault."""

from __future__ import annotations

import argparse
import sys
import threading
import warnings
from collections import deque
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo  # the first step of an optimizer would import it, which replaces torch.manual_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket import Event, hookimpl
from hocket.hookspecs.command import Command
from hocket.loop.actions import DefaultActions
from hocket.surgery import replace_modules
from hocket_testkit import (
    ActionsConformance,
    AlgorithmConformance,
    CallbackConformance,
    CommandConformance,
    DatasetConformance,
    DeviceConformance,
    OptimizerConformance,
    PrecisionConformance,
    ScheduleConformance,
)
from hocket_testkit.observing import size
from hocket_testkit.runs import Observed


class Bad(hocket.Algorithm):
    """Do something wrong at the end of each batch."""

    events = {Event.BATCH_END}

    def apply(self, event, state):
        pass


class KeepsTheOutputs(Bad):
    events = {Event.AFTER_FORWARD}

    def apply(self, event, state):
        self.outputs = state.outputs


class KeepsTheBatch(Bad):
    events = {Event.AFTER_DATALOADER}

    def apply(self, event, state):
        self.inputs = state.batch[0].clone()


class KeepsEveryLoss(Bad):
    def __init__(self):
        self.losses = []

    def apply(self, event, state):
        self.losses.append(state.loss.detach())


class LeavesAHook(Bad):
    events = {Event.FIT_START}

    def apply(self, event, state):
        next(state.model.children()).register_forward_hook(lambda *_: None)


class AddsAHookInEachBatch(Bad):
    events = {Event.BATCH_END, Event.CLOSE}

    def __init__(self):
        self.handles = []

    def apply(self, event, state):
        if event is Event.BATCH_END:
            self.handles.append(next(state.model.parameters()).register_hook(lambda gradient: gradient))
            return
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class LeavesAFile(hocket.Callback):
    """Writes a line in each batch."""

    def fit_start(self, state):
        self.file = (state.run_folder / "log.txt").open("w")

    def batch_end(self, state):
        self.file.write("a batch\n")


class LeavesAThread(hocket.Callback):
    """Watches in a thread."""

    def fit_start(self, state):
        threading.Thread(target=_ended.wait, daemon=True, name="watching").start()


class ReplacesSilently(Bad):
    events = {Event.INIT}

    def apply(self, event, state):
        state.model[1] = nn.GELU()


class ReplacesWithoutPreview(Bad):
    events = {Event.INIT}

    def apply(self, event, state):
        state.replacements += replace_modules(state.model, {nn.ReLU: lambda old, index: nn.GELU()})


class LosesTheResult(Bad):
    @hookimpl(wrapper=True)
    def clip_gradients(self, state):
        yield


class SwallowsInAWrapper(Bad):
    @hookimpl(wrapper=True)
    def gradients(self, state):
        try:
            return (yield)
        except Exception as error:
            self.error = str(error)
            return True


class SwallowsSilently(hocket.Callback):
    """Logs what it can."""

    def batch_end(self, state):
        try:  # noqa: SIM105
            state.log({"bad/learning-rate": state.optimizers[0].no_such_attribute})
        except Exception:
            pass


class ActsOnRankZero(Bad):
    events = {Event.AFTER_TRAIN_BATCH}

    def apply(self, event, state):
        if state.strategy.rank == 0:
            next(state.model.parameters()).grad.mul_(2)


class SeedsInEachBatch(Bad):
    def apply(self, event, state):
        torch.manual_seed(0)


class DrawsAsACallback(hocket.Callback):
    """Looks at a random batch."""

    def batch_start(self, state):
        torch.rand(1)


class CountsInTheClass(Bad):
    batches: ClassVar[list[int]] = []

    def apply(self, event, state):
        self.batches.append(state.timestamp.batch)


class CountsInTheModule(Bad):
    def apply(self, event, state):
        _cache[state.timestamp.batch] = 1


class ScalesByTheMicrobatch(Bad):
    events = {Event.AFTER_LOSS}

    def apply(self, event, state):
        state.loss = state.loss * len(state.batch[1])


class NeedsFloat32(Bad):
    events = {Event.AFTER_FORWARD}

    def apply(self, event, state):
        torch.linalg.qr(state.outputs)


class PatchesTorch(Bad):
    def apply(self, event, state):
        torch.nn.functional.relu = _relu


class LeavesAHookAsAPrecision(hocket.Precision):
    """Adds a hook when a fit starts, and not in convert_module."""

    def fit_start(self, state):
        next(state.model.children()).register_forward_hook(lambda *_: None)


class KeepsLongerAndLongerHistories(Bad):
    """Keeps a few items, each longer than those before it."""

    def __init__(self):
        self.losses, self.latest = [], deque(maxlen=3)

    def apply(self, event, state):
        self.losses = [*self.losses, 1.0]
        self.latest.append(self.losses)


class CutsSequencesAfterTheyAreCounted(Bad):
    events = {Event.BEFORE_FORWARD}

    def apply(self, event, state):
        state.batch = {name: tensor[:, :4] for name, tensor in state.batch.items()}


class FailsInMicrobatches(Bad):
    events = {Event.AFTER_LOSS}

    def apply(self, event, state):
        if state.microbatch:
            warnings.warn("no effect on microbatches", hocket.NoEffectWarning, stacklevel=2)
            state.loss = state.loss * float("nan")


class FailsWhenAccumulating(Bad):
    events = {Event.BATCH_END}

    def apply(self, event, state):
        if state.batch_samples > 8:
            next(state.model.parameters()).data.fill_(float("nan"))


class FailsOnSeveralRanks(Bad):
    events = {Event.FIT_START}

    def apply(self, event, state):
        if state.strategy.world_size > 1:
            raise ZeroDivisionError("divided among too many")


class SetsAFlag(Bad):
    def apply(self, event, state):
        torch.backends.cuda.matmul.allow_tf32 = True


class CountsItsCalls:
    """Decays with each call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, clock):
        self.calls += 1
        return 0.9**self.calls


class ReturnsATensor(hocket.schedules.Schedule):
    """Decays by tensors."""

    def __init__(self):
        super().__init__([], "0ba")

    def factor(self, now, warmup, *times):
        return torch.tensor(0.5)


class NamesItsDevice(hocket.Device):
    """The processor, as a text."""

    def available(self):
        return True

    def torch_device(self, local_rank):
        return "cpu"


class LacksAnAction:
    """All actions but one."""

    def __getattr__(self, name):
        if name == "zero_grad":
            raise AttributeError(name)
        return getattr(DefaultActions(), name)


class GrowingSGD(torch.optim.SGD):
    """Keeps all gradients."""

    def step(self, closure=None):
        parameter = self.param_groups[0]["params"][0]
        self.state[parameter].setdefault("gradients", []).append(parameter.grad.clone())
        return super().step(closure)


class CountingSGD(torch.optim.SGD):
    """Counts the steps of all optimizers."""

    steps: ClassVar[int] = 0

    def step(self, closure=None):
        type(self).steps += 1
        return super().step(closure)


def shuffled_evaluation(split="train"):
    """Return shuffled samples."""
    if split not in ("train", "test"):
        raise ValueError(f"{split} is not a split")
    return DataLoader(TensorDataset(torch.arange(12.0).reshape(12, 1)), 4, shuffle=True)


def drawn_globally(split="train"):
    """Return samples that are drawn anew."""
    return [torch.rand(4, 2) for _ in range(3)]


def exits(args: argparse.Namespace) -> int:
    sys.exit(3)


def _relu(inputs: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return inputs.relu()


class _Words(nn.Module):
    """The next of 13 words, from a batch of tokens."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, 13)

    def forward(self, input_ids):
        return {"loss": nn.functional.cross_entropy(self.table(input_ids[:, :-1]).mT, input_ids[:, 1:])}


class WordsConformance(AlgorithmConformance):
    """With a model of words, and sequences of 12 tokens."""

    def model(self):
        return _Words()

    def data(self):
        return [{"input_ids": tokens} for tokens in (torch.arange(29 * 12).reshape(29, 12) % 13).split(8)]

    def loss(self):
        return None

    def arguments(self):
        return {"loss_reduction": "mean"}


_cache: dict[int, int] = {}
_ended = threading.Event()

#: The suite, the plug-in, the check that fails, its arguments, and words of the message.
_BAD: list[tuple[type, Any, str, tuple[Any, ...], str]] = [
    (AlgorithmConformance, KeepsTheOutputs, "keeps_no_tensors", (), "keeps .* with its graph"),
    (AlgorithmConformance, KeepsTheBatch, "keeps_no_tensors", (), r"of shapes \(\d, 3, 16, 16\)"),
    (AlgorithmConformance, KeepsEveryLoss, "does_not_grow", (), "4 tensors in memory"),
    (AlgorithmConformance, KeepsLongerAndLongerHistories, "does_not_grow", (), "12 values in the plug-in"),
    (WordsConformance, CutsSequencesAfterTheyAreCounted, "counts_what_the_data_hold", (),
     "counts 60 tokens, and the model gets 20. Tokens count as trained on"),
    (PrecisionConformance, LeavesAHookAsAPrecision, "removes_its_hooks", (), "hooks are left on the user's model: 0"),
    (AlgorithmConformance, FailsInMicrobatches, "works_in_every_combination", (), "'microbatch': 3} training diverges"),
    (AlgorithmConformance, FailsWhenAccumulating, "works_in_every_combination", (), "{'accumulate': '2ba'}"),
    (AlgorithmConformance, FailsOnSeveralRanks, "works_in_every_combination", (),
     "'strategy': 'ddp'.* two ranks do not train: Raised by algorithm"),
    (AlgorithmConformance, LeavesAHook, "removes_its_hooks", (), "hooks are left on the user's model: 0"),
    (AlgorithmConformance, AddsAHookInEachBatch, "does_not_grow", (), "4 hooks on the model"),
    (CallbackConformance, LeavesAFile, "closes_files_threads_and_processes", (), "the file .*log.txt"),
    (CallbackConformance, LeavesAThread, "closes_files_threads_and_processes", (), "the thread watching"),
    (AlgorithmConformance, ReplacesSilently, "records_and_previews_surgery", (), "1 were replaced, and state.replacements"),
    (AlgorithmConformance, ReplacesWithoutPreview, "records_and_previews_surgery", (), "did not preview"),
    (AlgorithmConformance, LosesTheResult, "returns_what_it_wraps", (), "LosesTheResult.clip_gradients returns None"),
    (AlgorithmConformance, SwallowsInAWrapper, "does_not_swallow_exceptions", ("forward",), "did not leave fit"),
    (CallbackConformance, SwallowsSilently, "catches_only_what_it_handles", (), "swallows every exception in line"),
    (AlgorithmConformance, ActsOnRankZero, "does_not_depend_on_the_rank", (), "On rank 1 it acts otherwise"),
    (AlgorithmConformance, SeedsInEachBatch, "leaves_global_generators_alone", (), "seeds the global generator"),
    (CallbackConformance, DrawsAsACallback, "leaves_global_generators_alone", (), "differ from those of a run without"),
    (AlgorithmConformance, CountsInTheClass, "keeps_no_state_in_the_class", (), "changed .*CountsInTheClass.batches"),
    (AlgorithmConformance, CountsInTheModule, "keeps_no_state_in_the_class", (), "test_bad_plugins._cache"),
    (AlgorithmConformance, ScalesByTheMicrobatch, "works_with_microbatches", (), "With microbatch=3 the weights differ"),
    (AlgorithmConformance, NeedsFloat32, "works_in_bf16", (), "With precision='bf16' it raises"),
    (AlgorithmConformance, PatchesTorch, "changes_nothing_unless_attached", (), "torch.nn.functional.relu"),
    (AlgorithmConformance, SetsAFlag, "changes_nothing_unless_attached", (), "TF32"),
    (ScheduleConformance, CountsItsCalls, "depends_on_the_time_only", (), "counts its calls"),
    (ScheduleConformance, ReturnsATensor, "factors_are_numbers", (), "no tensor"),
    (DeviceConformance, NamesItsDevice, "names_the_device_of_a_rank", (), "Return torch.device"),
    (ActionsConformance, LacksAnAction, "has_every_action", (), "has no zero_grad"),
    (OptimizerConformance, GrowingSGD, "does_not_grow", (), "4 tensors in memory"),
    (OptimizerConformance, CountingSGD, "keeps_no_state_in_the_class", (), "CountingSGD.steps"),
    (DatasetConformance, shuffled_evaluation, "evaluation_data_are_always_the_same", (), "Do not shuffle"),
    (DatasetConformance, drawn_globally, "leaves_nothing_behind", (), "global random numbers"),
    (CommandConformance, Command("Exit at once and say nothing", lambda parser: None, exits), "returns_its_exit_code", (),
     "calls sys.exit"),
]  # fmt: skip


def suite_of(suite, bad, folder):
    """Return an instance of a suite of a plug-in, as pytest would prepare it."""
    members = {"make": lambda self: bad if isinstance(bad, Command) or suite is DatasetConformance else bad()}
    if suite is OptimizerConformance:
        members = {"optimizer": {"bad": {"lr": 0.01}}}
    made = type("Suite", (suite,), {"name": "bad", "calls": {"": 0}, **members})()
    made.folder = folder
    return made


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def _restored():
    """Undo what bad plug-ins leave in the process."""
    relu, flag = torch.nn.functional.relu, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.nn.functional.relu, torch.backends.cuda.matmul.allow_tf32 = relu, flag
    _cache.clear()
    CountsInTheClass.batches.clear()
    _ended.set()
    _ended.clear()
    hocket.plugins.refresh()


#: Checks of one observed run, which takes seconds; of them a few plug-ins are tried in every session.
_OBSERVED = {name.removeprefix("test_") for name in vars(Observed)} | {
    "returns_what_it_wraps",
    "records_and_previews_surgery",
}
_QUICK = {KeepsTheOutputs, CountsInTheClass, ReplacesSilently}
#: Checks of processes.
_SLOW = {FailsOnSeveralRanks}


@pytest.mark.parametrize(
    ("suite", "bad", "check", "arguments", "fault"),
    [
        pytest.param(
            *each,
            marks=[pytest.mark.long] if each[1] in _SLOW or (each[2] in _OBSERVED and each[1] not in _QUICK) else [],
        )
        for each in _BAD
    ],
    ids=[f"{each[2]}-{number}" for number, each in enumerate(_BAD)],
)
def test_a_bad_plugin_is_caught_by_its_fault(suite, bad, check, arguments, fault, tmp_path, request):
    if suite is OptimizerConformance:
        hocket.plugins.register("optimizers", "bad", bad)
        request.addfinalizer(lambda: hocket.plugins.unregister("optimizers", "bad"))
    with pytest.raises(AssertionError, match=fault):
        getattr(suite_of(suite, bad, tmp_path), f"test_{check}")(*arguments)


def test_a_run_is_as_long_as_a_schedule_needs(tmp_path):
    def suite(schedule):
        return suite_of(ScheduleConformance, lambda: schedule, tmp_path)

    assert len(suite(hocket.schedules.Cosine()).data()) == 4
    assert len(suite(hocket.schedules.WSD("0.2dur", warmup="10ba")).data()) == 16
    never = suite(hocket.schedules.WSD("1dur", warmup="1ba"))
    assert len(never.data()) == 4
    with pytest.raises(ValueError, match="do not fit before"):
        never.test_factors_are_numbers()
    with pytest.raises(ValueError, match="do not fit before"):
        never.test_is_deterministic()


def test_a_bounded_deque_counts_as_if_it_were_full():
    latest = deque([[1, 2], [1, 2, 3]], maxlen=5)
    assert size(latest) == 5 * (1 + 3)
    latest.append(latest)  # a cycle ends
    assert size(latest) == 5 * (1 + 3)
    assert size(deque([[1, 2], [1, 2, 3]])) == 2 + 5

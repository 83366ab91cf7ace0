"""The kit for plug-in authors: good plug-ins pass, and each kind of bad one fails the test that is there for it."""

from __future__ import annotations

import math
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo  # the first step of an optimizer would; pytester would forget it, and it cannot be imported again
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hocket
from hocket import Event, hookimpl, plugins
from hocket.plugins import HookError
from hocket.plugins.delivery import LoggerWarning
from hocket.precision.fp32 import FP32
from hocket_testkit import (
    AlgorithmConformance,
    CallbackConformance,
    LoggerConformance,
    PrecisionConformance,
    StrategyConformance,
    SynchronisationError,
    no_sync,
)
from hocket_testkit.compare import difference
from hocket_testkit.footprint import changed, footprint

pytest_plugins = ["pytester"]


GOOD = '''
"""Weight decay, by hand. Source: Krogh and Hertz 1991, eq. 2."""
import torch
import hocket


class Decay(hocket.Algorithm):
    """Adds the weights to their gradients."""

    events = {hocket.Event.AFTER_TRAIN_BATCH}
    phase = hocket.Phase.GRADIENT

    def __init__(self, strength=0.01):
        self.strength = strength
        self.steps = 0

    def apply(self, event, state):
        self.steps += 1
        with torch.no_grad():
            for parameter in state.trained_parameters():
                parameter.grad.add_(parameter, alpha=self.strength)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        if state_dict.keys() != {"steps"}:
            raise ValueError(f"Decay keeps steps, but was given {sorted(state_dict)}")
        self.steps = state_dict["steps"]
'''
SUITE = """
import pytest
import hocket
from decay import Decay


@pytest.fixture(autouse=True, scope="module")
def registered():
    hocket.plugins.register("algorithms", "decay", Decay)
    yield
    hocket.plugins.unregister("algorithms", "decay")


class TestDecay(hocket.testkit.AlgorithmConformance):
    name = "decay"
    card = "CARD.md"

    def make(self):
        return Decay()
"""
CARD = "# Decay\n\nSource: Krogh and Hertz 1991.\n\n`strength`: 0.01."


@pytest.fixture
def author(pytester):
    """A folder with a plug-in and its suite, as an author would have it."""
    pytester.makepyfile(decay=GOOD, test_decay=SUITE)
    (pytester.path / "CARD.md").write_text(CARD)
    pytester.syspathinsert()
    return pytester


def number_of_tests(suite):
    """As pytest counts them: parametrized ones several times."""
    tests = [getattr(suite, name) for name in dir(suite) if name.startswith("test_")]
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    return len(tests) + sum(len(mark.args[1]) - 1 for mark in marks)


@pytest.mark.long
def test_a_good_algorithm_passes(author):
    result = author.runpytest_inprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=number_of_tests(AlgorithmConformance))


# --- exceptions have reasons


def test_an_exempt_test_is_skipped_with_its_reason(author):
    (author.path / "test_decay.py").write_text(
        SUITE + '    exempt = {"test_trains": "decays to nothing in so few steps"}\n'
    )
    result = author.runpytest_inprocess("-q", "-rs", "-p", "no:cacheprovider", "-k", "test_trains or test_pickles")
    result.assert_outcomes(passed=3, skipped=1, deselected=number_of_tests(AlgorithmConformance) - 4)
    result.stdout.fnmatch_lines(["SKIPPED*decays to nothing in so few steps*"])


@pytest.mark.parametrize("replacement", ["test_trains = None", "def test_trains(self): pass"])
def test_a_test_that_is_removed_without_a_reason_fails_the_suite(author, replacement):
    (author.path / "test_decay.py").write_text(SUITE + f"    {replacement}\n")
    result = author.runpytest_inprocess("-q", "-p", "no:cacheprovider")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*replaces or removes the inherited test_trains without a reason*"])


def test_a_test_that_is_replaced_with_a_reason_runs():
    class Suite(AlgorithmConformance):
        exempt = {"test_trains": "trains backwards"}

        def test_trains(self):
            return "replaced"

    assert Suite().test_trains() == "replaced"


def test_replacements_that_come_from_elsewhere_are_seen():
    class Mixin:
        test_pickles = None

    with pytest.raises(TypeError, match="Mixin replaces or removes the inherited test_pickles"):
        type("Suite", (Mixin, AlgorithmConformance), {})

    class Late(AlgorithmConformance):
        pass

    Late.test_pickles = None
    with pytest.raises(TypeError, match="Late replaces or removes the inherited test_pickles"):
        Late().test_inherited_tests_are_all_there()


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"exempt": {"test_pickles": ""}}, "test_pickles.*without a reason"),
        ({"exempt": {"test_pickels": "misspelt"}}, "Did you mean 'test_pickles'"),
        ({"tolerances": {"test_works_with_microbatches": (1e-2, " ")}}, "without a reason"),
        ({"tolerances": {"test_nothing": (1e-2, "why")}}, "does not inherit"),
    ],
)
def test_exceptions_that_make_no_sense(attributes, message):
    with pytest.raises(TypeError, match=message):
        type("Suite", (AlgorithmConformance,), attributes)


def test_exceptions_are_inherited():
    class Family(AlgorithmConformance):
        exempt = {"test_trains": "none of them trains"}

    class Member(Family):
        test_trains = None

    assert Member.test_trains is None


# --- bad plug-ins fail


class Bad(hocket.Algorithm):
    """Does something that it must not, at the end of each batch."""

    events = {Event.BATCH_END}

    def apply(self, event, state):
        pass


def suite_of(suite, make, folder, **attributes):
    """A suite as pytest would prepare it."""
    made = type("Suite", (suite,), {"make": lambda self: make(), "name": "bad", **attributes})()
    made.folder = folder
    return made


def fails(suite, make, test, folder, *arguments, match=None, error=AssertionError, **attributes):
    with pytest.raises(error, match=match):
        getattr(suite_of(suite, make, folder, **attributes), test)(*arguments)


class WritesIntoTheBatch(Bad):
    events = {Event.AFTER_DATALOADER}

    def apply(self, event, state):
        state.batch[0].mul_(0.5)


class CountsInTheClass(Bad):
    count: ClassVar[int] = 0

    def apply(self, event, state):
        type(self).count += 1
        with torch.no_grad():
            next(state.model.parameters()).add_(type(self).count * 1e-3)


class DrawsFromTheSystem(Bad):
    def apply(self, event, state):
        with torch.no_grad():
            next(state.model.parameters()).add_(int.from_bytes(os.urandom(4), "little") * 1e-12)


class LeavesAHook(Bad):
    events = {Event.FIT_START}

    def apply(self, event, state):
        _handles.append(nn.modules.module.register_module_forward_hook(lambda *_: None))


class AddsToEveryMicrobatch(Bad):
    events = {Event.AFTER_BACKWARD}

    def apply(self, event, state):
        next(state.model.parameters()).grad.add_(0.1)


class ForgetsTheGradients(Bad):
    events = {Event.AFTER_TRAIN_BATCH}

    def apply(self, event, state):
        for parameter in state.model.parameters():
            parameter.grad.zero_()


class Waits(Bad):
    events = {Event.AFTER_LOSS}

    def apply(self, event, state):
        if state.loss > 1e9:
            state.log({"big": 1.0})


class CannotBePickled(Bad):
    def __init__(self):
        self.function = lambda: None


class KeepsAnObject(Bad):
    def state_dict(self):
        return {"object": object()}


class KeepsNumbersAsKeys(Bad):
    def state_dict(self):
        return {"epochs": {1: 2.0}}


class ForgetsItsState(Bad):
    count = 0

    def apply(self, event, state):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        pass


class SwapsWeightsAndForgets(Bad):
    events = {Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL}

    def apply(self, event, state):
        with torch.no_grad():
            next(state.model.parameters()).mul_(-1)


class FailsInClose(Bad):
    events = {Event.CLOSE}

    def apply(self, event, state):
        if state.exception is not None:  # not when the interpreter ends, too
            raise RuntimeError("nothing to close")


class NamedLikeAHook(Bad):
    def on_batch_end(self, state):
        pass


class ListensToNothing(hocket.Algorithm):
    """Has no events at all."""


_handles: list[Any] = []


@pytest.fixture(autouse=True)
def no_handles():
    yield
    while _handles:
        _handles.pop().remove()


@pytest.mark.parametrize(
    "make, test, message",
    [
        (WritesIntoTheBatch, "test_leaves_the_data_alone", "Never write into state.batch"),
        (CountsInTheClass, "test_is_deterministic", "differ"),
        (CountsInTheClass, "test_two_trainers_do_not_notice_each_other", "Keep everything in self"),
        (DrawsFromTheSystem, "test_is_deterministic", "state.generator"),
        (DrawsFromTheSystem, "test_trains_the_same_when_pickled", "pickled copy"),
        (LeavesAHook, "test_changes_nothing_unless_attached", "hooks on all modules"),
        (AddsToEveryMicrobatch, "test_works_with_microbatches", "microbatch=3"),
        (ForgetsTheGradients, "test_trains", "The loss on the training data went"),
        (Bad, "test_has_an_effect", "bitwise identical"),
        (KeepsAnObject, "test_keeps_its_state", r"state_dict\(\)\['object'\] is object"),
        (KeepsNumbersAsKeys, "test_keeps_its_state", "which is int and not str"),
        (ForgetsItsState, "test_keeps_its_state", "returns a different one"),
        (SwapsWeightsAndForgets, "test_an_evaluation_leaves_the_weights_alone", "Put them back"),
        (ListensToNothing, "test_implements_known_hooks_only", "implements no hook"),
        (Bad, "test_names_its_source", "where the method comes from"),
        (type("Undocumented", (Bad,), {}), "test_has_a_summary", "first line"),
        (type("OneName", (Bad,), {"conflicts": "sam"}), "test_declares_itself_properly", r"conflicts = \('sam',\)"),
        (type("Names", (Bad,), {"events": {"batch_end"}}), "test_declares_itself_properly", "hocket.Event"),
    ],
)
def test_bad_algorithms(tmp_path, make, test, message):
    fails(AlgorithmConformance, make, test, tmp_path, match=message)


@pytest.mark.parametrize(
    "make, test, error",
    [
        (Waits, "test_does_not_wait_for_the_device", SynchronisationError),
        (NamedLikeAHook, "test_implements_known_hooks_only", HookError),
        (CannotBePickled, "test_pickles", (AttributeError, pickle.PicklingError)),
        (ForgetsItsState, "test_refuses_a_state_that_is_not_its_own", pytest.fail.Exception),
    ],
)
def test_bad_algorithms_that_raise(tmp_path, make, test, error):
    fails(AlgorithmConformance, make, test, tmp_path, error=error)


class HidesItsState(hocket.Algorithm):
    """Scales gradients by a number that it counts itself."""

    events, phase = {Event.AFTER_TRAIN_BATCH}, hocket.Phase.GRADIENT

    def __init__(self):
        self.count = 0

    def apply(self, event, state):
        self.count += 1
        for parameter in state.trained_parameters():
            parameter.grad.mul_(1 + 0.05 * (self.count % 5))


class SavesItsState(HidesItsState):
    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict.pop("count")
        super().load_state_dict(state_dict)


class HidesWhatItLogs(hocket.Callback):
    """Logs how many batches it has seen, and what time it is."""

    count = 0

    def batch_end(self, state):
        self.count += 1
        state.log({"seen": self.count, "clock": time.perf_counter()})


class LogsLater(HidesWhatItLogs):
    """Logs from its fourth batch on."""

    def batch_end(self, state):
        self.count += 1
        if self.count > 3:
            state.log({"clock": time.perf_counter()})


class LogsTheTime(hocket.Callback):
    """Logs values that never repeat."""

    def batch_end(self, state):
        state.log({"clock": time.perf_counter()})


def test_hidden_state_is_found_by_resuming(tmp_path):
    test = "test_resumes_in_the_middle"
    fails(
        AlgorithmConformance,
        HidesItsState,
        test,
        tmp_path / "a",
        match=r"after batch 6 differs .*weights.*state_dict\(\)",
    )
    fails(CallbackConformance, HidesWhatItLogs, test, tmp_path / "b", match=r"logged after it\['seen'\]")
    fails(CallbackConformance, LogsLater, test, tmp_path / "c", match=r"the batches at which values were logged")
    getattr(suite_of(AlgorithmConformance, SavesItsState, tmp_path / "d"), test)()
    getattr(suite_of(CallbackConformance, LogsTheTime, tmp_path / "e"), test)()


@pytest.mark.long
def test_a_change_of_the_process_that_stays_is_found_by_the_test_that_makes_it(author, monkeypatch):
    """Later tests would see it before and after."""
    monkeypatch.setenv("DECAY", "off")
    line = "        self.steps += 1\n"
    changing = GOOD.replace(line, line + "        os.environ['DECAY'] = 'on'\n")
    assert changing != GOOD
    (author.path / "decay.py").write_text("import os\n" + changing)
    result = author.runpytest_inprocess("-q", "-p", "no:cacheprovider", "-k", "test_trains or test_keeps_its_state")
    result.stdout.fnmatch_lines(["*test_trains leaves os.environ changed in the process*"])
    assert result.parseoutcomes()["errors"] == 1


def test_exceptions_that_leave_something_behind(tmp_path):
    test = "test_an_exception_leaves_nothing_behind"
    fails(AlgorithmConformance, FailsInClose, test, tmp_path, "before_loss", match="nothing to close")
    fails(AlgorithmConformance, LeavesAHook, test, tmp_path, "before_loss", match="hooks on all modules")
    fails(AlgorithmConformance, WritesIntoTheBatch, test, tmp_path, "batch_end", match="user's data")


def test_make_has_to_make(tmp_path):
    one = Bad()
    fails(
        AlgorithmConformance, lambda: one, "test_make_gives_a_new_plugin_each_time", tmp_path, match="one object twice"
    )
    with pytest.raises(NotImplementedError, match="needs a make"):
        AlgorithmConformance().make()


class TouchesTheEnvironment(Bad):
    def __init__(self):
        os.environ["HOCKET_TEST_LEFT"] = os.environ.get("HOCKET_TEST_LEFT", "") + "x"


def test_making_it_changes_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("HOCKET_TEST_LEFT", "")
    fails(AlgorithmConformance, TouchesTheEnvironment, "test_making_it_changes_nothing", tmp_path, match="os.environ")


def test_names(tmp_path):
    test = "test_goes_by_a_name"
    fails(AlgorithmConformance, Bad, test, tmp_path, name=None, match="No entry point declares")
    fails(AlgorithmConformance, Bad, test, tmp_path, name="Bad Name", match="not a name that can be typed")
    plugins.register("algorithms", "bad", WritesIntoTheBatch)
    try:
        fails(AlgorithmConformance, Bad, test, tmp_path, match="leads to")
        suite_of(AlgorithmConformance, WritesIntoTheBatch, tmp_path).test_goes_by_a_name()
    finally:
        plugins.unregister("algorithms", "bad")


def test_a_declared_name_is_found_where_a_package_re_exports_the_class(tmp_path):
    suite = suite_of(PrecisionConformance, FP32, tmp_path, name=None)
    assert suite.plugin_name() == "fp32"
    suite.test_goes_by_a_name()


def test_imports(tmp_path, monkeypatch):
    """Packages of these names are heavy whoever made them."""
    (tmp_path / "wandb.py").write_text("")
    (tmp_path / "light_plugin.py").write_text("class Plugin: pass\n")
    (tmp_path / "heavy_plugin.py").write_text("import wandb\nclass Plugin: pass\n")
    (tmp_path / "nosy_plugin.py").write_text(
        "import os, random\nos.environ['HOCKET_TEST_LEFT'] = '1'\nrandom.random()\nclass Plugin: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def suite(module, **attributes):
        cls = type("Plugin", (Bad,), {"__module__": module})
        return suite_of(AlgorithmConformance, cls, tmp_path, **attributes)

    suite("light_plugin").test_importing_it_brings_nothing_heavy()
    suite("light_plugin").test_importing_it_changes_nothing()
    suite("heavy_plugin", heavy={"wandb"}).test_importing_it_brings_nothing_heavy()
    with pytest.raises(AssertionError, match="imports wandb"):
        suite("heavy_plugin").test_importing_it_brings_nothing_heavy()
    with pytest.raises(AssertionError, match=r"changed os\.environ, the global random numbers"):
        suite("nosy_plugin").test_importing_it_changes_nothing()
    with pytest.raises(AssertionError, match=r"cannot be imported on its own.*no_such_plugin"):
        suite("no_such_plugin").test_importing_it_brings_nothing_heavy()


def test_cards(tmp_path):
    class Tuned(Bad):
        def __init__(self, strength=0.1, rate=0.2):
            pass

    card = tmp_path / "card.md"
    for text, message in [("strength rate", "come"), ("arXiv 1710.09412: strength", "does not mention rate")]:
        card.write_text(text)
        fails(AlgorithmConformance, Tuned, "test_has_a_card", tmp_path, card=str(card), match=message)
    card.write_text("arXiv 1710.09412: `strength` and `rate`")
    suite_of(AlgorithmConformance, Tuned, tmp_path, card=str(card)).test_has_a_card()


# --- bad callbacks and loggers


class Trains(hocket.Callback):
    """Changes the weights, which callbacks do not."""

    def batch_end(self, state):
        with torch.no_grad():
            next(state.model.parameters()).mul_(0.99)


class Stops(hocket.Callback):
    """Ends the run after a batch."""

    def batch_end(self, state):
        state.request(hocket.Decision.STOP)


class Peeks(hocket.Callback):
    """Looks at the loss in every step."""

    def after_train_batch(self, state):
        state.log({"peeked": state.loss.item()})


class LogsByTheClass(hocket.Callback):
    """Logs every second batch of whatever run."""

    batches: ClassVar[int] = 0

    def batch_end(self, state):
        type(self).batches += 1
        if type(self).batches % 3 == 0:
            state.log({"third": 1.0})


class ReadsAhead(hocket.Callback):
    """Iterates the evaluation set by itself, which draws from the generator of its loader."""

    def batch_end(self, state):
        next(iter(state.eval_sets["eval"].data))


def test_bad_callbacks(tmp_path):
    fails(
        CallbackConformance,
        ReadsAhead,
        "test_does_not_change_training",
        tmp_path,
        match="generator of the evaluation set",
    )
    fails(CallbackConformance, Trains, "test_does_not_change_training", tmp_path, match="A callback only reads")
    fails(
        CallbackConformance, Stops, "test_does_not_change_training", tmp_path, match="differs from the run without it"
    )
    fails(CallbackConformance, LogsByTheClass, "test_logs_the_same_in_turns", tmp_path, match="logs differently")
    fails(CallbackConformance, Bad, "test_is_no_algorithm", tmp_path, match="not a hocket.Callback")
    fails(CallbackConformance, Peeks, "test_does_not_wait_for_the_device", tmp_path, error=SynchronisationError)


class Lines(hocket.Logger):
    """Writes one line per value, in a way that tests make worse."""

    mode = "a"

    def log_metrics(self, state, metrics):
        for name, value in metrics.items():
            with (self.folder(state) / "values.txt").open(self.mode) as file:
                file.write(f"{name}\t{value}\n")

    def folder(self, state):
        return state.run_folder


class Forgetful(Lines):
    mode = "w"


class DropsNaN(Lines):
    def log_metrics(self, state, metrics):
        super().log_metrics(state, {name: value for name, value in metrics.items() if math.isfinite(value)})


class Outside(Lines):
    def folder(self, state):
        return state.run_folder.parent


class FileForEachName(hocket.Logger):
    """Trusts names."""

    def log_metrics(self, state, metrics):
        for name, value in metrics.items():
            (state.run_folder / f"{name.replace('/', '_')}.txt").write_text(str(value))


class OpensAtOnce(Lines):
    def init(self, state):
        (state.run_folder / "values.txt").touch()


class Mixes(Lines):
    first: ClassVar[Any] = None

    def folder(self, state):
        type(self).first = type(self).first or state.run_folder
        return type(self).first


def read(self, logger, folder):
    values: dict[str, list[float]] = {}
    for line in (folder / "values.txt").read_text().splitlines():
        name, value = line.split("\t")
        values.setdefault(name, []).append(float(value))
    return values


@pytest.mark.parametrize(
    "make, test",
    [
        (Forgetful, "test_writes_down_what_is_logged"),
        (DropsNaN, "test_values_that_are_not_finite"),
        (Outside, "test_writes_into_the_folder_of_the_run"),
        (OpensAtOnce, "test_writes_nothing_unasked"),
        (Trains, "test_is_a_logger"),
    ],
)
def test_bad_loggers(tmp_path, make, test):
    fails(LoggerConformance, make, test, tmp_path, written=read)


def test_loggers_that_raise(tmp_path):
    fails(LoggerConformance, FileForEachName, "test_unusual_names", tmp_path, "x" * 300, error=LoggerWarning)
    fails(
        LoggerConformance,
        Mixes,
        "test_two_runs_do_not_mix",
        tmp_path / "mixed",
        written=read,
        error=(AssertionError, LoggerWarning),
    )
    fails(LoggerConformance, Lines, "test_writes_down_what_is_logged", tmp_path / "written", error=NotImplementedError)


@pytest.mark.parametrize(
    "test", ["test_writes_down_what_is_logged", "test_two_runs_do_not_mix", "test_values_that_are_not_finite"]
)
def test_a_logger_that_writes(tmp_path, test):
    getattr(suite_of(LoggerConformance, Lines, tmp_path, written=read), test)()


# --- bad precisions


class ForgetsToUnscale(hocket.Precision):
    """Multiplies the loss, and leaves it at that."""

    def scale_loss(self, loss):
        return loss * 2


class NeverLeaves(hocket.Precision):
    """Switches something on."""

    def forward_context(self):
        torch.set_float32_matmul_precision("medium")
        return super().forward_context()


class CannotNest(hocket.Precision):
    """One context for all."""

    def forward_context(self):
        return self

    def __enter__(self):
        torch.set_grad_enabled(True)
        torch.autocast_increment_nesting()
        torch.set_autocast_enabled("cpu", True)

    def __exit__(self, *error):
        torch.set_autocast_enabled("cpu", False)
        torch.autocast_decrement_nesting()


class Halves(hocket.Precision):
    """Everything in bfloat16."""

    input_dtype = torch.bfloat16

    def convert_module(self, module):
        return module.bfloat16()


class ConvertsInPlace(hocket.Precision):
    """Rounds what it is given."""

    def convert_batch(self, batch):
        if isinstance(batch, dict):
            batch["floats"] = batch["floats"].bfloat16()
        return batch


class ConvertsEverything(hocket.Precision):
    """Makes floats of integers."""

    def convert_batch(self, batch):
        return {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@pytest.mark.parametrize(
    "make, test, arguments, message",
    [
        (
            ForgetsToUnscale,
            "test_the_gradient_is_close_to_that_in_float64",
            (None,),
            "unscale_gradients has to undo it",
        ),
        (Halves, "test_the_gradient_is_close_to_that_in_float64", (3,), "gradient_tolerance"),
        (Halves, "test_evaluation_is_close_to_float64", (), "in float64 it is"),
        (Halves, "test_normalisation_layers_keep_their_bits", (), "norm_bits = 16"),
        (NeverLeaves, "test_contexts_nest_and_end", (), "not as before"),
        (CannotNest, "test_contexts_nest_and_end", (), "ended the outer one"),
        (ConvertsInPlace, "test_batches_are_converted_and_not_changed", (), "Return new tensors"),
        (ConvertsEverything, "test_batches_are_converted_and_not_changed", (), "not a floating-point tensor"),
        (Bad, "test_is_a_precision", (), "not a hocket.Precision"),
    ],
)
def test_bad_precisions(tmp_path, make, test, arguments, message):
    precision = torch.get_float32_matmul_precision()
    try:
        fails(PrecisionConformance, make, test, tmp_path, *arguments, match=message)
    finally:
        torch.set_float32_matmul_precision(precision)


# --- bad strategies


class Alone(hocket.Strategy):
    """Each rank trains for itself, on everything."""

    def setup_environment(self, device):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        return super().setup_environment(device)

    def all_reduce(self, tensor, op):
        reduced = tensor.clone()
        dist.all_reduce(reduced, {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(op, dist.ReduceOp.SUM))
        return reduced

    def all_gather_object(self, item):
        items = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def broadcast_object(self, item):
        return self.all_gather_object(item)[0]

    def barrier(self):
        dist.barrier()
        return True


class Renames(hocket.Strategy):
    """Leaves a wrapper's name in the weights."""

    def model_state(self, module):
        return {f"module.{name}": value for name, value in module.state_dict().items()}

    def load_model_state(self, module, state_dict):
        module.load_state_dict({name.removeprefix("module."): value for name, value in state_dict.items()})
        return True


class LoadsAnything(hocket.Strategy):
    """Does not mind keys that do not fit."""

    def load_model_state(self, module, state_dict):
        module.load_state_dict(state_dict, strict=False)
        return True


class ForgetsTheMomentum(hocket.Strategy):
    """Loads no optimizer state."""

    def load_optimizer_state(self, module, optimizer, state_dict):
        return True


@pytest.mark.parametrize(
    "make, world_size, test, arguments, message",
    [
        (Alone, 2, "test_trains_as_one_process_does", (None, None), "rank 0|not that of the global batch|counted"),
        (Alone, 2, "test_evaluation_counts_each_sample_once", (), "every sample once|were predicted"),
        (Alone, 2, "test_collectives", (), "mean of torch.float32"),
        (Renames, 1, "test_model_state_has_plain_names", (), "names"),
        (LoadsAnything, 1, "test_model_state_has_plain_names", (), "RuntimeError"),
        (ForgetsTheMomentum, 1, "test_training_goes_on_from_the_full_state", (), "does not continue"),
    ],
)
def test_bad_strategies(tmp_path, make, world_size, test, arguments, message):
    fails(StrategyConformance, make, test, tmp_path, *arguments, match=message, world_size=world_size)


# --- no_sync

X = torch.arange(4.0)
MASK = X > 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda: X[0].item(),
        lambda: float(X[0]),
        lambda: int(X[0]),
        lambda: bool(MASK[0]),
        lambda: 1 if X.sum() > 0 else 0,
        lambda: X.tolist(),
        lambda: X.numpy(),
        lambda: X.cpu(),
        lambda: X.to("cpu"),
        lambda: str(X),
        lambda: f"{X[0]:.2f}",
        lambda: torch.equal(X, X),
        lambda: torch.allclose(X, X),
        lambda: X[MASK],
        lambda: X.clone().__setitem__(MASK, torch.ones(2)),
        lambda: MASK.nonzero(),
        lambda: torch.where(MASK),
        lambda: X.unique(),
        lambda: X.masked_select(MASK),
        lambda: 3.0 in X,
        lambda: max(X),
        lambda: (torch.rand(4) * X).sum().item(),  # what the host made and the device had
        lambda: torch.zeros(4).add_(X).sum().item(),
        lambda: torch.zeros(4).copy_(X)[0].item(),
        lambda: torch.rand(4).to(torch.device("cpu")).sum().item(),  # put there by whoever meant state.device
        lambda: torch.rand(4).to(X.device),
        lambda: torch.rand(4).to(X),
        lambda: torch.tensor([1.0], device=X.device),
        lambda: torch.as_tensor(3, device=X.device),
        lambda: X.clone().copy_(torch.rand(4)),
        lambda: X[torch.randperm(4)],
        lambda: X.clone().index_put_((torch.randperm(4),), X),
    ],
)
def test_what_waits_for_the_device_is_refused(wait):
    wait()
    with pytest.raises(SynchronisationError, match=r"guard\.allow"), no_sync(simulate=True):
        wait()


def training_step():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(network.parameters())
    loss = nn.functional.cross_entropy(network(torch.rand(5, 3, 4, 4)), torch.randint(3, (5,)))
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize(
    "run",
    [
        lambda: X.double().to(torch.device("cpu")),
        lambda: X.clone().masked_fill_(MASK, 0.0),
        lambda: X.clone().__setitem__(MASK, 0.0),
        lambda: torch.where(MASK, X, 0.0),
        lambda: X.shape[0] + len(X) + X.numel(),
        lambda: torch.rand(3, generator=torch.Generator()).tolist(),  # random numbers of the host
        lambda: torch.tensor([1.0, 2.0]).sum().item(),
        lambda: torch.rand(4).to(X.device, non_blocking=True),
        lambda: torch.as_tensor(X, device=X.device),
        lambda: X.new_full((), 3.0) + torch.full((), 3.0, device=X.device),
        lambda: X[torch.arange(3, -1, -1, device=X.device)],
        lambda: X.clone().copy_(torch.zeros(4, device=X.device)),
        lambda: (lambda ratio: (X.clone().mul_(ratio), ratio.item()))(torch.rand(())),
        training_step,
    ],
)
def test_what_does_not_wait_is_let(run):
    with no_sync(simulate=True):
        run()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x, host: host.to("cuda"),
        lambda x, host: x.new_empty(4).copy_(host),
        lambda x, host: torch.tensor([1.0], device="cuda"),
        lambda x, host: x.cpu(),
        lambda x, host: x[host.long()],
        lambda x, host: x[x > 0],
        lambda x, host: x[0].item(),
        lambda x, host: bool(x[0]),
        lambda x, host: x.nonzero(),
    ],
)
@pytest.mark.skipif(torch.__version__ < (2, 10), reason="FakeTensors of cuda ask the driver")
def test_what_waits_for_a_gpu_is_refused(wait):
    """On tensors that say they are on a GPU, without values."""
    # Autograd counts devices at its first backward. With FakeTensorMode there is one, for a thread that no fork survives.
    torch.ones(1, requires_grad=True).sum().backward()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, host = torch.empty(4, device="cuda"), torch.empty(4)
        with no_sync(simulate=False):
            host.to("cuda", non_blocking=True)
            x.new_full((), 3.0)
            with pytest.raises(SynchronisationError, match=r"guard\.allow"):
                wait(x, host)


def test_allowed_and_outside():
    with no_sync(simulate=True) as guard:
        with guard.allow():
            assert X.tolist() == [0.0, 1.0, 2.0, 3.0] and X[1].item() == 1.0
        with pytest.raises(SynchronisationError):
            X.tolist()
    assert X[1].item() == 1.0
    with no_sync(simulate=False):  # beside a real device the CPU is the host
        assert X[1].item() == 1.0 and X.tolist()


def test_forward_loss_and_backward_of_the_loop_do_not_wait():
    """The rest of a step looks at the loss at once on a CPU, to raise where it is not finite."""
    x, y = torch.rand(6, 4), torch.randint(3, (6,))
    trainer = hocket.Trainer(
        model=nn.Linear(4, 3), loss=nn.functional.cross_entropy, train_data=[(x, y)] * 2, device="cpu",
        optimizer="adamw(lr=0.01)", duration="1ep", microbatch=2, callbacks=[Guarded()],
    )  # fmt: skip
    trainer.fit()


class Guarded(hocket.Callback):
    """Lets no action of a step wait."""

    @hookimpl(wrapper=True)
    def forward(self, state, batch):
        with no_sync(simulate=True):
            return (yield)

    @hookimpl(wrapper=True)
    def loss(self, state, outputs, batch):
        with no_sync(simulate=True):
            return (yield)

    @hookimpl(wrapper=True)
    def backward(self, state, loss):
        with no_sync(simulate=True):
            return (yield)


# --- comparing


@pytest.mark.parametrize(
    "got, expected, words",
    [
        (torch.ones(2), torch.ones(3), r"\(2,\)"),
        (torch.ones(2), torch.ones(2).double(), "float64"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), "1 of 2 elements, by up to 0.5"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 elements"),
        (1.0, torch.ones(()), "expected a tensor"),
        (torch.tensor([math.nan]), torch.tensor([1.0]), "1 of 1"),
        ({"a": [1, 2]}, {"a": [1, 3]}, r"\['a'\]\[1\] is 2"),
        ({"a": 1}, {"b": 1}, "keys"),
        ([1], (1,), "expected"),
        ([1, 2], [1], "expected"),
        ("a", "b", "expected 'b'"),
        (1.0, 1.5, "expected 1.5"),
        (math.nan, 1.0, "nan"),
    ],
)
def test_differences(got, expected, words):
    assert re.search(words, difference(got, expected) or "none found")


def test_equals():
    value = {"a": [torch.tensor([1.0, math.nan, math.inf]), (1, "x", None, math.nan)], "b": torch.tensor([True])}
    assert difference(value, {"a": [value["a"][0].clone(), (1, "x", None, math.nan)], "b": value["b"].clone()}) is None
    assert (
        difference(torch.tensor([1.0, 100.0]), torch.tensor([1.00001, 100.0]), 1e-6) is None
    )  # relative to the largest
    assert difference(torch.tensor([1.0, 1.0]), torch.tensor([1.00001, 1.0]), 1e-6) is not None
    assert difference(torch.tensor([math.inf]), torch.tensor([1.0]), 1e-6) is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON)
def test_difference_agrees_with_equality_of_what_is_written(one, other):
    assert difference(one, one) is None
    if repr(one) != repr(other) and one != other:
        assert difference(one, other) is not None


def test_the_footprint_sees_what_changed(monkeypatch, tmp_path):
    before = footprint()
    assert changed(before, footprint()) == []
    monkeypatch.setenv("HOCKET_TEST_LEFT", "1")
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    torch.rand(1)
    with torch.no_grad(), torch.autocast("cpu"):
        found = changed(before, footprint())
    torch.set_rng_state(state)
    assert found == [
        "os.environ", "the working directory", "the global random numbers", "whether gradients are enabled", "autocast",
    ]  # fmt: skip


# --- without pytest

BLOCKED = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("pytest", "_pytest"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Blocker())
    import hocket
    from hocket_testkit import no_sync, run_ranks
    with no_sync():
        pass
    assert "AlgorithmConformance" in dir(hocket.testkit)
    try:
        hocket.testkit.AlgorithmConformance
    except ImportError as error:
        print(error)
    try:
        hocket.testkit.NoSuchConformance
    except AttributeError as error:
        print(error)
"""


@pytest.mark.long
def test_without_pytest_only_the_suites_are_missing():
    code = textwrap.dedent(BLOCKED)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    suites, unknown = done.stdout.splitlines()
    assert "pip install pytest" in suites and "AlgorithmConformance" in suites
    assert "NoSuchConformance" in unknown and "AlgorithmConformance" in unknown

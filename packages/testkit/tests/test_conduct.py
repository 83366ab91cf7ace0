"""What plug-ins do to the process, to files and to values that others gave: bad ones are caught by name, honest ones pass."""

from __future__ import annotations

import collections
import contextlib
import copy
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hocket
from hocket import Event, hookimpl
from hocket.surgery import replace_modules
from hocket_testkit import AlgorithmConformance, CallbackConformance
from hocket_testkit.cards import missing_results, names_a_source, own_links, stale
from hocket_testkit.unread_loggers import UnreadLogger


class Acts(hocket.Algorithm):
    """Act in each batch."""

    events = {Event.AFTER_FORWARD}

    def apply(self, event, state):
        pass


# --- bad ones


class SetsAVariable(hocket.Callback):
    def fit_start(self, state):
        os.environ["ACME_LEVEL"] = "3"


class ChangesAVariable(hocket.Callback):
    def fit_start(self, state):
        os.environ.update(ACME_THERE="changed")


class UnsetsAVariable(hocket.Callback):
    def fit_start(self, state):
        os.environ.pop("ACME_THERE", None)


class PatchesALayer(hocket.Callback):
    def fit_start(self, state):
        nn.Conv2d.forward = _forward


class PatchesAnOptimizer(hocket.Callback):
    def fit_start(self, state):
        torch.optim.SGD.step = _step


class PatchesAnInheritedMethod(hocket.Callback):
    def fit_start(self, state):
        torch.optim.SGD.zero_grad = _zero_grad


class PatchesAFunction(hocket.Callback):
    def fit_start(self, state):
        nn.functional.relu = nn.functional.relu6


class PatchesACall(hocket.Callback):
    def fit_start(self, state):
        nn.Module.__call__ = _called


class PatchesHocket(hocket.Callback):
    def fit_start(self, state):
        hocket.Trainer.evaluate = _evaluate


class WritesHere(hocket.Callback):
    def batch_end(self, state):
        with open("log.txt", "a") as file:
            file.write("a batch\n")


class MakesAFolderHere(hocket.Callback):
    def fit_start(self, state):
        os.makedirs("out/plots", exist_ok=True)


class ChangesTheUmask(hocket.Callback):
    def fit_start(self, state):
        os.umask(0)


class PrintsEachLoss(hocket.Callback):
    def batch_end(self, state):
        print("batch", state.timestamp.batch)


class WritesToStandardOutput(hocket.Callback):
    def batch_start(self, state):
        sys.stdout.write(f"{state.timestamp.batch}\n")


class LeavesAProcess(hocket.Callback):
    def fit_start(self, state):
        _processes.append(subprocess.Popen(["sleep", "60"]))


class LeavesADetachedProcess(hocket.Callback):
    def batch_end(self, state):
        if not _processes:
            _processes.append(subprocess.Popen(["sleep", "60"], start_new_session=True))


class Sleeps(hocket.Callback):
    def batch_end(self, state):
        time.sleep(0.001)


class SleepsByAnotherName(hocket.Callback):
    def batch_end(self, state):
        _pause(0.001)


class KeepsTheOldOutputs(Acts):
    """Goes on with the last outputs where the model fails."""

    @hookimpl
    def forward(self, state, batch):
        try:
            self.outputs = state.task(batch)
        except Exception:
            warnings.warn("the model failed", stacklevel=1)
        return self.outputs


class WrapsTheForward(Acts):
    events = {Event.INIT}

    def apply(self, event, state):
        forward = state.model.forward

        def tolerant(inputs):
            try:
                return forward(inputs)
            except RuntimeError as error:
                warnings.warn(str(error), stacklevel=1)
                return nn.functional.one_hot(torch.zeros(len(inputs), dtype=torch.long), 4).float().requires_grad_()

        state.model.forward = tolerant


class WrapsTheLoss(Acts):
    events = {Event.INIT}

    def apply(self, event, state):
        loss = state.task.loss

        def tolerant(outputs, batch):
            try:
                return loss(outputs, batch)
            except Exception as error:
                warnings.warn(str(error), stacklevel=1)
                return outputs.sum() * 0

        vars(state.task)["loss"] = tolerant


class ToleratesTheBackward(Acts):
    @hookimpl(wrapper=True)
    def backward(self, state, loss):
        try:
            return (yield)
        except Exception as error:
            warnings.warn(str(error), stacklevel=1)
            return True


class ToleratesTheStep(Acts):
    events = {Event.FIT_START}

    def apply(self, event, state):
        step = state.optimizers[0].step

        def tolerant(closure=None):
            with contextlib.suppress(RuntimeError):
                return step(closure)

        state.optimizers[0].step = tolerant


class ReturnsTheOutputs(hocket.Callback):
    def after_forward(self, state):
        try:
            return state.outputs.mean()
        except Exception:
            return state.outputs


class AsksTorchForItsRank(Acts):
    events = {Event.AFTER_TRAIN_BATCH}

    def apply(self, event, state):
        if dist.is_initialized() and dist.get_rank() == 1:
            next(state.model.parameters()).grad.mul_(2)


class AsksTheEnvironmentForItsRank(Acts):
    events = {Event.AFTER_TRAIN_BATCH}

    def apply(self, event, state):
        if os.environ.get("RANK", "0") == "1":
            next(state.model.parameters()).grad.mul_(2)


class DrawsFromTorch(Acts):
    def apply(self, event, state):
        if torch.rand(1) < 0.5:
            state.outputs = state.outputs * 1.1


class DrawsFromRandom(Acts):
    def apply(self, event, state):
        state.outputs = state.outputs * random.uniform(0.9, 1.1)


class Writes(hocket.Logger):
    """Writes a line for each value."""

    kept: list[float]

    def __init__(self):
        self.rows = []

    def log_metrics(self, state, metrics):
        self.rows += [(state.timestamp.batch, name, value) for name, value in metrics.items()]

    def close(self, state):
        rows, self.rows = self.chosen(self.rows), []
        with (state.run_folder / "rows.csv").open("a") as file:
            file.writelines(f"{batch},{name},{value}\n" for batch, name, value in rows)

    def chosen(self, rows):
        return rows


class DropsRows(Writes):
    def chosen(self, rows):
        return rows[: len(rows) // 2]


class DropsRowsLate(DropsRows):
    """Still has all rows in memory when a run that does not wait for it ends."""

    deadline = 0.01

    def close(self, state):
        time.sleep(0.3)
        super().close(state)


class Reverses(Writes):
    def chosen(self, rows):
        return rows[::-1]


class Overwrites(Writes):
    def chosen(self, rows):
        return list({name: (batch, name, value) for batch, name, value in rows}.values())


class OverwritesTheFile(hocket.Logger):
    def log_metrics(self, state, metrics):
        (state.run_folder / "latest.txt").write_text(str(metrics))


class KeepsEverySecond(hocket.Logger):
    synchronous = True

    def __init__(self):
        self.values, self._calls = [], 0

    def log_metrics(self, state, metrics):
        self._calls += 1
        if self._calls % 2:
            self.values += metrics.values()


class SharesItsFile(Writes):
    """All runs write into one list."""

    all_rows = []

    def chosen(self, rows):
        self.all_rows += rows
        return self.all_rows


# --- honest ones


class RestoresAVariable(hocket.Callback):
    def fit_start(self, state):
        self.before = os.environ.get("ACME_LEVEL")
        os.environ["ACME_LEVEL"] = "3"

    def close(self, state):
        if self.before is None:
            os.environ.pop("ACME_LEVEL", None)
        else:
            os.environ["ACME_LEVEL"] = self.before


class SetsAVariableForAChild(hocket.Callback):
    def fit_start(self, state):
        subprocess.run([sys.executable, "-c", "pass"], env={**os.environ, "ACME": "1"}, check=True)


class ReadsAVariable(hocket.Callback):
    def fit_start(self, state):
        self.level = os.environ.get("ACME_THERE")


class PatchesForAMoment(hocket.Callback):
    def batch_end(self, state):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.functional, "relu", nn.functional.gelu)
            patch.setenv("ACME_LEVEL", "4")


class PatchesUntilClose(hocket.Callback):
    def fit_start(self, state):
        self.relu, nn.functional.relu = nn.functional.relu, _relu

    def fit_end(self, state):
        nn.functional.relu = self.relu


class PatchesAnInstance(Acts):
    events = {Event.FIT_START, Event.CLOSE}

    def apply(self, event, state):
        if event is Event.FIT_START:
            state.model.note = "trains"
        elif hasattr(state.model, "note"):
            del state.model.note


class WritesIntoTheRunFolder(hocket.Callback):
    def batch_end(self, state):
        with (state.run_folder / "log.txt").open("a") as file:
            file.write("a batch\n")


class WritesATemporaryFile(hocket.Callback):
    def batch_end(self, state):
        with tempfile.TemporaryFile() as file:
            file.write(b"a batch")


class MakesFoldersInTheRunFolder(hocket.Callback):
    def fit_start(self, state):
        (state.run_folder / "plots").mkdir(exist_ok=True)


class RestoresTheDirectory(hocket.Callback):
    def fit_start(self, state):
        with contextlib.chdir(state.run_folder), open("note.txt", "w") as file:
            file.write("here")


class PrintsOnce(hocket.Callback):
    def fit_start(self, state):
        print("training begins")


class PrintsEachEpoch(hocket.Callback):
    def epoch_end(self, state):
        print("an epoch")


class PrintsWithStandardError(hocket.Callback):
    def epoch_end(self, state):
        print("an epoch", file=sys.stderr)


class EndsItsProcess(hocket.Callback):
    def fit_start(self, state):
        self.process = subprocess.Popen(["sleep", "60"])

    def close(self, state):
        if process := vars(self).pop("process", None):
            process.kill()
            process.wait()


class TerminatesItsProcess(hocket.Callback):
    def fit_start(self, state):
        self.process = subprocess.Popen(["sleep", "60"])

    def close(self, state):
        if process := vars(self).pop("process", None):
            process.terminate()


class RunsACommand(hocket.Callback):
    def epoch_end(self, state):
        subprocess.run(["true"], check=True)


class SleepsOnce(hocket.Callback):
    def fit_start(self, state):
        time.sleep(0.001)


class SleepsInAThread(hocket.Callback):
    def fit_start(self, state):
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self):
        while not self.stop.is_set():
            time.sleep(0.001)

    def close(self, state):
        if thread := vars(self).pop("thread", None):
            self.stop.set()
            thread.join()

    exception = close


class SetsAFlagAndRestores(hocket.Callback):
    def fit_start(self, state):
        self.threads = torch.get_num_threads()
        torch.set_num_threads(2)

    def fit_end(self, state):
        torch.set_num_threads(self.threads)


class DrawsByItsGenerator(Acts):
    def apply(self, event, state):
        state.outputs = state.outputs * (1 + 0.1 * torch.rand(1, generator=state.generator(self)))


class DrawsBeforeTraining(Acts):
    events = {Event.INIT}

    def touches(self, model):
        return [name for name, each in model.named_modules() if isinstance(each, nn.ReLU)]

    def apply(self, event, state):
        state.replacements += replace_modules(state.model, {nn.ReLU: lambda old, index: nn.PReLU()})


class RunsTheModelAgain(Acts):
    def apply(self, event, state):
        with torch.no_grad():
            state.task(state.batch)


class DrawsAndRestores(Acts):
    def apply(self, event, state):
        with torch.random.fork_rng(devices=[]):
            torch.rand(1)


class CatchesWhatItHandles(Acts):
    def apply(self, event, state):
        try:
            state.outputs.no_such_attribute  # noqa: B018
        except AttributeError:
            return


class RaisesAgain(Acts):
    @hookimpl(wrapper=True)
    def backward(self, state, loss):
        try:
            return (yield)
        except Exception as error:
            error.add_note("in backward")
            raise


class SaysMoreOfAnError(Acts):
    @hookimpl(wrapper=True)
    def gradients(self, state):
        try:
            return (yield)
        except RuntimeError as error:
            raise TypeError("the loss takes no classes") from error


class CatchesShortMemory(Acts):
    @hookimpl(wrapper=True)
    def gradients(self, state):
        try:
            return (yield)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("use a smaller batch") from error


class LogsOnRankZero(hocket.Callback):
    def batch_end(self, state):
        if state.strategy.rank == 0:
            with (state.run_folder / "rank.txt").open("w") as file:
                file.write("0")


class AveragesOverRanks(Acts):
    events = {Event.AFTER_TRAIN_BATCH}

    def apply(self, event, state):
        for each in state.model.parameters():
            each.grad = state.bus.all_reduce(each.grad, "mean")


class ScalesOnAllRanks(Acts):
    def apply(self, event, state):
        state.outputs = state.outputs * 1.01


class KeepsTheLatest(hocket.Callback):
    def __init__(self):
        self.losses = collections.deque(maxlen=3)

    def batch_end(self, state):
        self.losses.append(state.timestamp.batch)


class CopiesTheModel(hocket.Callback):
    def fit_start(self, state):
        self.copy = copy.deepcopy(state.model)

    def close(self, state):
        self.copy = None


class WritesRounded(Writes):
    def chosen(self, rows):
        return [(batch, name, f"{value:.4g}") for batch, name, value in rows]


class WritesAFileForEachFit(Writes):
    def close(self, state):
        number = len(list(state.run_folder.iterdir()))
        (state.run_folder / f"{number}.csv").write_text("\n".join(f"{name},{value}" for _, name, value in self.rows))
        self.rows = []


class WritesTheLatestFirst(Writes):
    def __init__(self):
        super().__init__()
        self.all = []

    def close(self, state):
        values = [value for _, name, value in self.rows if name == "check/value"]
        self.all, self.rows = self.all + values, []
        (state.run_folder / "values.txt").write_text(f"{self.all[-1:]}\n{self.all}")


class KeepsAll(hocket.Logger):
    def __init__(self):
        self.values = []

    def log_metrics(self, state, metrics):
        self.values += metrics.values()


_processes: list[subprocess.Popen[bytes]] = []
_pause = time.sleep


def _forward(self, inputs):
    return self._conv_forward(inputs, self.weight, self.bias)


def _relu(inputs, inplace=False):
    return inputs.relu()


_old = {
    (cls, name): vars(cls).get(name)
    for cls, name in [
        (nn.Conv2d, "forward"), (torch.optim.SGD, "step"), (torch.optim.SGD, "zero_grad"), (nn.functional, "relu"),
        (nn.Module, "__call__"), (hocket.Trainer, "evaluate"),
    ]
}  # fmt: skip
_sgd_step, _module_call, _trainer_evaluate = torch.optim.SGD.step, nn.Module.__call__, hocket.Trainer.evaluate


def _step(self, closure=None):
    return _sgd_step(self, closure)


def _zero_grad(self, set_to_none=True):
    return super(torch.optim.SGD, self).zero_grad(set_to_none)


def _called(self, *args, **kwargs):
    return _module_call(self, *args, **kwargs)


def _evaluate(self, *args, **kwargs):
    return _trainer_evaluate(self, *args, **kwargs)


@pytest.fixture(autouse=True)
def _restored(tmp_path, monkeypatch):
    """Run in an empty folder, and undo what bad plug-ins leave."""
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    environment, mask = {**os.environ, "ACME_THERE": "1"}, os.umask(0o022)
    os.umask(mask)
    os.environ["ACME_THERE"] = "1"
    yield
    for (cls, name), value in _old.items():
        if value is None:
            with contextlib.suppress(AttributeError):
                delattr(cls, name)
        elif vars(cls)[name] is not value and not hasattr(vars(cls)[name], "hooked"):
            setattr(cls, name, value)
    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if name != "ACME_THERE"})
    os.umask(mask)
    for each in _processes:
        each.kill()
        each.wait()
    _processes.clear()
    SharesItsFile.all_rows.clear()


def suite_of(plugin, folder):
    """Return an instance of the suite of a plug-in's kind, as pytest would prepare it."""
    kinds = {hocket.Logger: UnreadLogger, hocket.Algorithm: AlgorithmConformance, hocket.Callback: CallbackConformance}
    base = next(kinds[each] for each in plugin.__mro__ if each in kinds)
    suite = type("Suite", (base,), {"name": "conduct", "make": lambda self: plugin()})()
    suite.folder = folder
    return suite


PROCESS, SWALLOW, RANK = "leaves_the_process_as_it_was", "does_not_swallow_exceptions", "does_not_depend_on_the_rank"
WRITES, NUMBERS = "writes_down_what_is_logged", "leaves_global_generators_alone"
#: The plug-in, the check that fails, its arguments, and words of the message.
BAD = [
    (SetsAVariable, PROCESS, (), r"environment variable ACME_LEVEL \(set in test_conduct.py:\d+\)"),
    (ChangesAVariable, PROCESS, (), r"ACME_THERE \(set in test_conduct.py"),
    (UnsetsAVariable, PROCESS, (), "ACME_THERE"),
    (PatchesALayer, PROCESS, (), r"Conv2d\.forward"),
    (PatchesAnOptimizer, PROCESS, (), r"SGD\.step"),
    (PatchesAnInheritedMethod, PROCESS, (), r"SGD\.zero_grad"),
    (PatchesAFunction, PROCESS, (), r"torch\.nn\.functional\.relu"),
    (PatchesACall, PROCESS, (), r"Module\.__call__"),
    (PatchesHocket, PROCESS, (), r"Trainer\.evaluate"),
    (ChangesTheUmask, PROCESS, (), "the umask"),
    (WritesHere, "writes_into_the_run_folder_only", (), "wrote log.txt into the working directory"),
    (MakesAFolderHere, "writes_into_the_run_folder_only", (), "wrote out into"),
    (PrintsEachLoss, "does_not_print_in_every_batch", (), r"test_conduct.py:\d+. Give values to state.log"),
    (WritesToStandardOutput, "does_not_print_in_every_batch", (), "standard output in every batch"),
    (LeavesAProcess, "closes_files_threads_and_processes", (), r"the process \d+ \(sleep 60\)"),
    (LeavesADetachedProcess, "closes_files_threads_and_processes", (), "sleep 60"),
    (Sleeps, "does_not_sleep_in_every_batch", (), r"time.sleep in every batch, in test_conduct.py:\d+"),
    (SleepsByAnotherName, "does_not_sleep_in_every_batch", (), "time.sleep"),
    (KeepsTheOldOutputs, SWALLOW, ("layer",), "user's layer did not leave"),
    (WrapsTheForward, SWALLOW, ("layer",), "user's layer did not leave"),
    (WrapsTheLoss, SWALLOW, ("loss function",), "user's loss function did not leave"),
    (ToleratesTheBackward, SWALLOW, ("backward",), "user's backward did not leave"),
    (ToleratesTheStep, SWALLOW, ("optimizer",), "user's optimizer did not leave"),
    (ReturnsTheOutputs, "catches_only_what_it_handles", (), "swallows every exception in line"),
    (AsksTorchForItsRank, RANK, (), "On rank 1 it acts otherwise"),
    (AsksTheEnvironmentForItsRank, RANK, (), "On rank 1 it acts otherwise"),
    (DrawsFromTorch, NUMBERS, (), "global generator of torch in apply: each rank"),
    (DrawsFromRandom, NUMBERS, (), "global generator of random in apply"),
    (DropsRows, WRITES, (), "8 values that were logged the folder of the run has 4"),
    (DropsRowsLate, WRITES, (), "8 values that were logged the folder of the run has 4"),
    (Reverses, WRITES, (), "in another order"),
    (Overwrites, WRITES, (), "the folder of the run has 1"),
    (OverwritesTheFile, WRITES, (), "the folder of the run has 1"),
    (KeepsEverySecond, WRITES, (), "the logger has 4"),
    (SharesItsFile, "two_runs_do_not_mix", (), "is also in the folder of the run of another"),
]  # fmt: skip
#: The checks of plug-ins that have no fault; "observed" are all that are seen in one run.
OBSERVED = ("observed",)
LOGGED = (WRITES, "goes_on_after_it_was_closed", "two_runs_do_not_mix", "values_that_are_not_finite")
GOOD = [
    *((plugin, OBSERVED) for plugin in (
        RestoresAVariable, SetsAVariableForAChild, ReadsAVariable, PatchesForAMoment, PatchesUntilClose, PatchesAnInstance,
        WritesIntoTheRunFolder, WritesATemporaryFile, MakesFoldersInTheRunFolder, RestoresTheDirectory, PrintsOnce,
        PrintsEachEpoch, PrintsWithStandardError, EndsItsProcess, TerminatesItsProcess, RunsACommand, SleepsOnce,
        SleepsInAThread, SetsAFlagAndRestores, DrawsByItsGenerator, DrawsBeforeTraining, RunsTheModelAgain, DrawsAndRestores,
        KeepsTheLatest, CopiesTheModel,
    )),
    *((plugin, (SWALLOW,)) for plugin in (CatchesWhatItHandles, RaisesAgain, SaysMoreOfAnError, CatchesShortMemory)),
    *((plugin, (RANK,)) for plugin in (LogsOnRankZero, AveragesOverRanks, ScalesOnAllRanks)),
    *((plugin, LOGGED) for plugin in (Writes, WritesRounded, WritesAFileForEachFit, KeepsAll)),
    (WritesTheLatestFirst, LOGGED[:3]),
]  # fmt: skip
#: Of those that take seconds, the ones that are tried in every session.
QUICK = {SetsAVariable, PatchesALayer, DropsRowsLate, WrapsTheForward, ReturnsTheOutputs, CatchesWhatItHandles, Writes}


def marked(*case):
    return pytest.param(*case, id=case[0].__name__, marks=[] if case[0] in QUICK else [pytest.mark.long])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(("plugin", "check", "arguments", "fault"), [marked(*each) for each in BAD])
def test_a_bad_plugin_is_caught_by_name(plugin, check, arguments, fault, tmp_path):
    with pytest.raises(AssertionError, match=fault):
        getattr(suite_of(plugin, tmp_path), f"test_{check}")(*arguments)


@pytest.mark.parametrize(("plugin", "checks"), [marked(*each) for each in GOOD])
def test_an_honest_plugin_passes(plugin, checks, tmp_path):
    suite = suite_of(plugin, tmp_path)
    for check in checks:
        if check == "observed":
            assert suite.observation().faults == {}
        elif check == SWALLOW:
            for place in ("forward", "layer", "loss", "loss function", "backward", "optimizer"):
                getattr(suite, f"test_{check}")(place)
        else:
            suite.folder = tmp_path / check
            getattr(suite, f"test_{check}")()


def test_what_cannot_be_read_is_skipped_with_the_reason(tmp_path):
    class Sends(hocket.Logger):
        def log_metrics(self, state, metrics):
            self.latest = metrics

    with pytest.raises(pytest.skip.Exception, match=r"was not read: name a suite with written\(\)"):
        suite_of(Sends, tmp_path).test_writes_down_what_is_logged()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Mix pairs (Zhang et al. 2018).", True), ("Polyak and Juditsky 1992", True), ("arXiv 1710.09412", True),
        ("https://doi.org/10.1137/0330046", True), ("https://github.com/other/method", True), ("Source: a talk", True),
        ("https://openreview.net/forum?id=r1Ddp1-Rb", True), ("# Sources\n\n- a tutorial", True),
        ("", False), ("Copyright 2024", False), ("https://example.org/hocket/docs", False), ("since version 2019", False),
        ("https://github.com/acme/acme-noise#readme", False),
        ("[![CI](https://img.shields.io/x.svg)](https://acme.org)", False),
    ],
)  # fmt: skip
def test_a_source_is_where_the_method_comes_from(text, answer):
    assert names_a_source(text, ["https://github.com/acme/acme-noise", "https://example.org/hocket"]) is answer
    assert any(each.startswith("https://") for each in own_links("hocket-testkit"))


class Noise:
    """Adds noise."""

    def __init__(self, eta=0.01, gamma: float = 0.55, when="10ba", target=None):
        pass


CARD = "# noise\n\n| argument | default | meaning |\n|---|---|---|\n| `eta` | {eta} | |\n| {other} | {default} | |\n\n{code}\n"


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"eta": "`1e-2`"}, []),
        ({"default": "the Trainer's", "other": "`target`"}, []),
        ({"default": '`"10ba"`', "other": "`when`"}, []),
        ({"code": '```python\nNoise(eta=0.3)\n{"noise": {"gamma": 1}}\nnoise(x, step=3)\n```'}, []),
        ({"eta": "0.3"}, ["eta is 0.3 (its default is 0.01)"]),
        ({"other": "`decay`"}, ["decay (there is no such argument)"]),
        ({"code": "Use `Noise(strength=0.3)`."}, ["strength in an example (there is no such argument)"]),
        ({"code": '`{"noise": {"sigma": 1}}`'}, ["sigma in an example (there is no such argument)"]),
    ],
)
def test_a_card_that_is_out_of_date(changes, faults):
    text = CARD.format(**{"eta": "0.01", "other": "`gamma`", "default": "0.55", "code": "", **changes})
    assert stale(text, "noise", Noise, several=False) == faults
    assert stale(text.replace("# noise", "# other"), "noise", Noise, several=True) == []


def test_results_that_others_can_judge():
    table = "| run | accuracy |\n|---|---|\n| without it | 61.9 |\n| with it | 63.3 |\n"
    assert missing_results(f"## Evidence\n\nFive seeds.\n\n{table}") == ""
    assert missing_results("It is 3 % better.") == "a section `## Evidence`"
    assert "a table with a number" in missing_results("## Results\n\nIt is 3 % better with all 5 seeds.")
    assert missing_results(f"## Evidence\n\n{table}") == "the number of seeds"
    assert "without it" in missing_results(
        f"## Evidence\n\nFive seeds.\n\n{table.replace('| without it | 61.9 |', '')}"
    )

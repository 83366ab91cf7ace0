"""Core's loggers lose nothing: files after a kill, a terminal after a crash, numbers to the last bit."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pty
import re
import resource
import select
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import make_trainer
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.loggers.console import ConsoleLogger
from hocket.loggers.memory import MemoryLogger
from hocket.plugins.delivery import LoggerWarning
from hocket.state import scalars
from hocket.state.task import SupervisedTask
from hocket_loggers.progress import ProgressLogger
from hocket_loggers.resumable_lines import LinesFile


def make(**changes: Any) -> hocket.Trainer:
    batches = [(torch.full((4, 3), float(number)), torch.zeros(4, 1)) for number in range(5)]
    arguments = {
        "model": nn.Linear(3, 1),
        "loss": F.mse_loss,
        "train_data": batches,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        "log_every": "1ba",
        "run_name": "run",
        "device": "cpu",
    }
    return make_trainer(**{**arguments, **changes})


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class Values(hocket.Callback):
    """Logs, after every batch, what the test gives."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def batch_end(self, state: hocket.State) -> None:
        state.log({f"test/{name}": value for name, value in self.values.items()})


# --- from the device to the loggers


def test_numbers_arrive_as_they_were() -> None:
    """Float64 and integers beyond float32's reach, on their own and among others."""
    values = {
        "double": torch.tensor(1 + 2**-40, dtype=torch.float64),
        "count": torch.tensor(2**40 + 1),
        "single": torch.tensor([[0.1]]),
        "half": torch.tensor(0.1, dtype=torch.bfloat16),
        "python": 3,
        "yes": True,
    }
    expected = {
        "double": 1 + 2**-40, "count": float(2**40 + 1), "single": torch.tensor(0.1).item(),
        "half": torch.tensor(0.1, dtype=torch.bfloat16).item(), "python": 3.0, "yes": 1.0,
    }  # fmt: skip
    assert scalars.to_floats(values) == expected
    for name in values:
        assert scalars.to_floats({name: values[name]}) == {name: expected[name]}


@pytest.mark.parametrize(
    "value, said",
    [
        (torch.zeros(3), r"a tensor of shape \(3,\).*mean"),
        ("fast", r"'fast'.*log_text"),
        ("1.5", "'1.5'.*log_text"),
        (b"1.5", "b'1.5'"),
        (np.array("1.5"), "array"),
        (None, "None"),
        (torch.tensor(1 + 2j), r"a complex number \(torch.complex64\).*abs"),
        (1 + 2j, r"the complex number \(1\+2j\).*abs"),
        (np.complex64(1 + 2j), r"the complex number .*abs"),
        (10**400, "an int of 1329 bits, too large for a float"),
        (10**5000, "an int of 16610 bits, too large for a float"),
        (torch.ones(1).to_sparse(), r"a tensor that is not dense \(torch.sparse_coo\).*to_dense"),
        (torch.ones((), device="meta"), "a tensor on the device 'meta', which has no value"),
    ],
    ids=lambda each: type(each).__name__,  # an int of many digits has no text
)
def test_what_is_no_number_is_an_error_that_names_it(value: Any, said: str) -> None:
    """From a plug-in, with a reduction and without, and from a Task; the error is raised where it was logged."""

    class Logs(hocket.Callback):
        def __init__(self, **how: Any) -> None:
            self.how = how

        def batch_end(self, state: hocket.State) -> None:
            state.log({"test/fine": 1.0, "test/odd": value}, **self.how)  # here

    class Task(SupervisedTask):
        def loss(self, outputs: Any, batch: Any) -> Any:
            self.log("test/odd", value)  # here
            return super().loss(outputs, batch)

    task = Task(nn.Linear(3, 1), loss=F.mse_loss)
    for arguments in ({"callbacks": [Logs()]}, {"callbacks": [Logs(reduce="max")]}, {"model": task, "loss": None}):
        with pytest.raises(TypeError, match=f"'test/odd' was logged as {said}") as raised:
            make(**arguments).fit()
        assert any(str(each.statement).endswith("# here") for each in reversed(raised.traceback))


def test_of_several_values_in_an_interval_the_last_counts() -> None:
    """Every fourth batch; the end of an epoch, after the fifth and the tenth, ends an interval too."""
    logger = MemoryLogger()

    class Count(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            state.log({"test/batch": state.timestamp.batch})

    make(callbacks=[Count()], loggers=[logger], log_every="4ba").fit()
    assert logger.metrics["test/batch"] == [(4, 4.0), (5, 5.0), (8, 8.0), (10, 10.0)]


# --- JSON lines


def lines(path: str = "runs/run/metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in Path(path).read_text().splitlines()]


def test_a_line_for_each_interval() -> None:
    make(loggers=["jsonl"], eval_data=[(torch.ones(2, 3), torch.zeros(2, 1))], seed=3).fit()
    first, *rest = lines()
    assert first["hyperparameters"]["duration"] == "2ep" and first["hyperparameters"]["seed"] == 3
    losses = [line for line in rest if "train/loss" in line]
    assert [(line["batch"], line["sample"]) for line in losses] == [(number, 4 * number) for number in range(1, 11)]
    assert [line["epoch"] for line in rest if "eval/loss" in line] == [1, 2]


def test_numbers_that_json_does_not_know() -> None:
    values = {"a": float("nan"), "b": float("inf"), "c": -float("inf")}
    make(loggers=["jsonl"], callbacks=[Values(**values)], duration="1ba").fit()
    line = next(line for line in lines() if "test/a" in line)
    assert (line["test/a"], line["test/b"], line["test/c"]) == ("NaN", "Infinity", "-Infinity")
    assert float(line["test/b"]) == float("inf"), "Python reads them as numbers"


def _endless(ready: Any) -> None:
    torch.set_num_threads(1)

    class Tell(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            ready.value = state.timestamp.batch

    make(loggers=["jsonl"], callbacks=[Tell()], duration="1000000ba").fit()


def test_a_killed_run_loses_the_lines_of_a_moment_at_most() -> None:
    """SIGKILL in the middle of training: whole lines but for the last. A new run of that name is refused."""
    context = multiprocessing.get_context("fork")
    ready = context.Value("l", 0)
    process = context.Process(target=_endless, args=(ready,))
    process.start()
    deadline = time.monotonic() + 60
    while ready.value < 200 and time.monotonic() < deadline:
        time.sleep(0.005)
    done = ready.value
    assert done >= 200
    time.sleep(0.5)  # a line waits for others for 0.1 seconds
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    file = Path("runs/run/metrics.jsonl")
    *whole, _ = file.read_text().split("\n")
    batches = [json.loads(line)["batch"] for line in whole if '"batch"' in line]
    assert batches == list(range(1, len(batches) + 1)) and len(batches) >= done - 1
    written = file.read_bytes()
    with pytest.raises(ValueError, match="has the files of another run"):
        make(loggers=["jsonl"], duration="2ba")
    assert file.read_bytes() == written


def test_a_line_that_was_torn_is_removed() -> None:
    """Where the run that tore it goes on."""
    trainer = make(loggers=["jsonl"])
    trainer.fit("1ba")
    trainer.close()
    with Path("runs/run/metrics.jsonl").open("a") as torn:
        torn.write('{"epoch": 7, "ba')
    trainer.fit("2ba")
    assert [line["batch"] for line in lines() if "batch" in line] == [1, 2, 3]


class Killed(hocket.Callback):
    """Kills its process in a hook of a batch, perhaps after half a line."""

    def __init__(self, hook: str, batch: int, torn: bool = False) -> None:
        def kill(state: hocket.State) -> None:
            if state.timestamp.batch == batch:
                if torn:
                    with Path("runs/run/metrics.jsonl").open("a") as file:
                        file.write('{"epoch": 1, "ba')
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(self, hook, kill)


def test_every_row_is_there_once_after_kills_and_resumes() -> None:
    """Before, at and long after a checkpoint, in a line, between the checkpoint of an epoch and its row, and at the end."""
    data = [(torch.ones(2, 3), torch.zeros(2, 1))]

    def run(name: str, *callbacks: hocket.Callback, duration: str = "2ep") -> None:
        torch.manual_seed(0)
        saved = hocket.Checkpoints(f"saved-{name}", every="2ba", keep=None)
        make(
            loggers=["jsonl"], run_name=name, checkpoints=saved, resume="auto", eval_data=data, log_every="2ba",
            callbacks=list(callbacks), duration=duration,
        ).fit()  # fmt: skip

    for moment in [
        ("batch_end", 3), ("batch_end", 6, True), ("eval_end", 5), ("epoch_checkpoint", 5), ("batch_checkpoint", 9),
        ("fit_end", 10),
    ]:  # fmt: skip
        process = multiprocessing.get_context("fork").Process(target=run, args=("run", Killed(*moment)))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, moment
    run("run")
    run("run", duration="3ep")
    run("whole")
    run("whole", duration="3ep")

    def rows(name: str) -> list[dict[str, Any]]:
        first, *others = lines(f"runs/{name}/metrics.jsonl")
        assert "hyperparameters" in first
        return [{k: v for k, v in row.items() if k != "seconds"} for row in others]

    got, expected = rows("run"), rows("whole")
    assert got == expected
    assert [row["batch"] for row in got if "train/loss" in row] == [2, 4, 5, 6, 8, 10, 12, 14, 15]


def test_another_file_is_not_shortened() -> None:
    """Where the file is not as the checkpoint knows it, the run that resumes appends."""
    first = make(loggers=["jsonl"], duration="4ba")
    first.fit("2ba")
    tree = first.state_dict()
    first.fit("2ba")
    first.close()
    file = Path("runs/run/metrics.jsonl")
    file.write_text(file.read_text().replace('"batch": 1', '"batch": 0'))
    first.load_state_dict(tree)
    first.fit("1ba")
    assert [row["batch"] for row in lines()[1:]] == [0, 2, 3, 4, 3]


def test_a_checkpoint_with_lines_resumes_without_the_logger_and_the_other_way_round() -> None:
    with_it, without = make(loggers=["jsonl"]), make()
    for trainer in (with_it, without):
        trainer.fit("1ba")
    with_it.load_state_dict(without.state_dict())
    without.load_state_dict(with_it.state_dict())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
def test_a_full_disk_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket_loggers.jsonl.JSONLinesLogger._path", lambda self, state: Path("/dev/full"))
    monkeypatch.setattr("hocket_loggers.resumable_lines._mend", lambda path: (0, 0))
    with pytest.warns(LoggerWarning, match="No space left on device|rows dropped"):
        result = make(loggers=["jsonl"]).fit()
    assert result.timestamp.batch == 10


def test_lines_that_wait_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next line after 0.1 seconds, by a thread where none comes, and at the end; each is there once, in order."""
    clock = [1000.0]
    monkeypatch.setattr("hocket_loggers.jsonl.time.monotonic", lambda: clock[0])
    seen: dict[str, list[int]] = {}

    class Reads(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            seen[f"batch {state.timestamp.batch}"] = written()
            clock[0] += 0.03

        def eval_batch_start(self, state: hocket.State) -> None:
            if "evaluation" not in seen:
                deadline = time.time() + 30
                while len(written()) < 6 and time.time() < deadline:
                    time.sleep(0.01)
                seen["evaluation"] = written()

    def written() -> list[int]:
        file = Path("runs/run/metrics.jsonl")
        return [row["batch"] for row in map(json.loads, file.read_text().splitlines()) if "train/loss" in row]

    data = [(torch.ones(2, 3), torch.zeros(2, 1))]
    trainer = make(loggers=["jsonl"], callbacks=[Reads()], eval_data=data, eval_every="7ba", duration="9ba")
    trainer.fit()
    assert seen["batch 1"] == [1] and seen["batch 2"] == [1] and seen["batch 4"] == [1]
    assert seen["batch 5"] == [1, 2, 3, 4, 5]
    assert seen["evaluation"] == [1, 2, 3, 4, 5, 6]  # the row of batch 7 follows the evaluation
    assert written() == [*range(1, 10)]


def test_lines_that_fit_on_a_full_disk_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 rows that are written together, the complete ones up to the limit of a real file system: a limit of its size."""

    def run() -> None:
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        monkeypatch.setattr("hocket_loggers.jsonl._SECONDS", 3600.0)
        make(loggers=["jsonl"], duration="200ba").fit()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    rows = [row["batch"] for row in lines() if "batch" in row]
    size = Path("runs/run/metrics.jsonl").stat().st_size
    assert rows == [*range(1, len(rows) + 1)]
    assert 8000 - 150 < size <= 8000


def test_a_resumed_run_tells_its_loggers_the_hyperparameters() -> None:
    """A file that has some keeps them; another logger gets those of now, and so does a file that is new."""
    make(loggers=["jsonl"], checkpoints=hocket.Checkpoints("saved"), duration="4ba").fit()
    memory = MemoryLogger()
    again = make(
        loggers=["jsonl", {"jsonl": {"filename": "other.jsonl"}}, memory], checkpoints=hocket.Checkpoints("saved"),
        resume="auto", duration="6ba",
    )  # fmt: skip
    again.fit()
    again.fit("1ba")
    assert memory.hyperparameters["duration"] == "6ba"
    for name, durations in (("metrics", ["4ba"]), ("other", ["6ba"])):
        written = lines(f"runs/run/{name}.jsonl")
        assert [row["hyperparameters"]["duration"] for row in written if "hyperparameters" in row] == durations


def test_lines_that_waited_for_a_full_disk_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row that is not in the file, although many are written together."""
    write = LinesFile.write

    def full(self: LinesFile, *lines: Any) -> None:
        if any(line.get("batch", 0) >= 3 for line in lines):
            raise OSError(28, "No space left on device")
        write(self, *lines)

    monkeypatch.setattr(LinesFile, "write", full)
    trainer = make(loggers=["jsonl"], duration="10ba")
    with pytest.warns(LoggerWarning) as caught:
        trainer.fit()
        trainer.close()
    dropped = [int(n) for each in caught for n in re.findall(r"(\d+) rows? dropped", str(each.message))]
    assert sum(dropped) + len([line for line in lines() if "batch" in line]) == 10


# --- lines for people


def test_the_console_has_a_line_for_training_and_one_for_each_set() -> None:
    file = io.StringIO()
    data = [(torch.ones(2, 3), torch.zeros(2, 1))]
    sets = {"a": data, "b": hocket.EvalSet(data, every="2ep")}
    result = make(loggers=[ConsoleLogger(file)], eval_data=sets, log_every="5ba").fit()
    *printed, done, how = file.getvalue().splitlines()
    assert done == "hocket: done at ep 2 ba 10: no checkpoint was written" and "checkpoints=hocket.Checkpoints(" in how
    assert [re.split(r"  | [\d.e-]+$", line)[1].split()[0] for line in printed] == [
        "train/loss", "a/loss", "train/loss", "a/loss", "b/loss"
    ]  # fmt: skip
    assert printed[-1] == f"ep 2 ba 10  b/loss {result.metrics['b/loss']:.4g}"


def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    result = make(loggers=[ProgressLogger(file, seconds=0.0)], eval_data=[(torch.ones(2, 3), torch.zeros(2, 1))]).fit()
    text = file.getvalue()
    assert "\x1b" not in text and "\r" not in text
    assert f"eval/loss {result.metrics['eval/loss']:.4g}" in text
    shares = [int(match) for match in re.findall(r"^(\d+)%", text, re.MULTILINE)]
    assert shares == sorted(shares) and shares[0] == 10 and shares[-1] == 100
    assert re.search(r"50%  train/loss [\d.e+-]+  [\d.e+]+ ba/s  0:00:\d\d left  ep \d ba 5\n", text)
    assert text.splitlines()[-2] == "hocket: done at ep 2 ba 10: no checkpoint was written"


class Terminal:
    """A pseudo-terminal, and what has been written to it."""

    def __enter__(self) -> Terminal:
        self.reader, writer = pty.openpty()
        self.file = os.fdopen(writer, "w")
        self.written = b""
        return self

    def text(self) -> str:
        self.file.flush()
        while select.select([self.reader], [], [], 0.1)[0]:
            self.written += os.read(self.reader, 65536)
        return self.written.decode()

    def __exit__(self, *error: object) -> None:
        self.file.close()
        os.close(self.reader)


class Slow(hocket.Callback):
    """Lets the time between two drawings pass."""

    def batch_start(self, state: hocket.State) -> None:
        time.sleep(0.12)


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of Unix")
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with Terminal() as terminal:
        data = [(torch.ones(2, 3), torch.zeros(2, 1))]
        trainer = make(loggers=[ProgressLogger(terminal.file)], callbacks=[Slow()], eval_data=data, duration="1ep")
        result = trainer.fit()
        text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.text())
    for share in (20, 40, 60, 80, 100):
        assert f"{share}%" in text
    assert "training" in text and "evaluating eval" in text and "train/loss" in text
    assert f"ep 1 ba 5  eval/loss {result.metrics['eval/loss']:.4g}" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0, "the cursor is back"


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of Unix")
@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_shows_the_loss(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    with Terminal() as terminal:
        callbacks = [Slow(), "lr-monitor", Values(value=1.0)]
        trainer = make(loggers=[ProgressLogger(terminal.file)], callbacks=callbacks, duration="1ep")
        losses = trainer.fit().history["train/loss"]
        text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.text())
    assert f"train/loss {losses[-1]:.4g} " in text.rpartition("100%")[2]


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of Unix")
def test_a_crash_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    class Crash(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            raise RuntimeError("planned")

    with Terminal() as terminal:
        trainer = make(loggers=[ProgressLogger(terminal.file)], callbacks=[Crash()])
        with pytest.raises(RuntimeError, match="planned"):
            trainer.fit()
        text = terminal.text()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0

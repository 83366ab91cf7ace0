"""The last lines of a fit: what is there is what they say, and what they say to type continues the run."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_data, make_trainer

import hocket
from hocket.checkpoints import Store
from hocket.loggers.console import ConsoleLogger
from hocket_checkpoints.signals import EXIT_CODE
from hocket_cli import main

SCRIPT = """
import os, signal, sys
sys.path.append({support!r})
import hocket
from support import make_data, make_trainer

class Press(hocket.Callback):
    def batch_end(self, state):
        if state.timestamp.batch == {batch}:
            os.kill(os.getpid(), signal.SIGINT)

make_trainer(device="cpu", callbacks=[Press()], loggers=["progress", "jsonl"], run_name="b", {more}).fit()
"""


def last_lines(**changes: Any) -> list[str]:
    file = io.StringIO()
    make_trainer(**{"device": "cpu", "run_name": "b", "loggers": [ConsoleLogger(file), "jsonl"], **changes}).fit()
    return [line for line in file.getvalue().splitlines() if line.startswith("hocket: ")]


def run(batch: int, more: str = "") -> tuple[int, list[str]]:
    script = SCRIPT.format(support=str(Path(__file__).parent), batch=batch, more=more)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("hocket: ")]


@pytest.mark.long
def test_a_script_that_ends_by_control_c() -> None:
    code, lines = run(4, 'checkpoints=hocket.Checkpoints("runs/a")')
    assert code == EXIT_CODE and Store("runs/a").names() == ["ep1-ba3", "ep1-ba4"]
    assert lines == [
        "hocket: interrupted at ep 1 ba 4: 2 checkpoints in runs/a, the newest is ep1-ba4",
        "hocket: metrics.jsonl in runs/b",
        "hocket: to continue: Trainer(…, resume='auto')",
    ]
    assert Path("runs/b/metrics.jsonl").is_file()
    code, lines = run(-1, 'checkpoints=hocket.Checkpoints("runs/a"), resume="auto"')
    assert code == 0 and lines[:2] == [
        "hocket: resumed from runs/a/ep1-ba4, at ep 1 ba 4",
        "hocket: done at ep 2 ba 6: 3 checkpoints in runs/a, the newest is ep2-ba6",
    ]


@pytest.mark.long
def test_a_script_without_checkpoints() -> None:
    code, lines = run(4)
    assert code == -signal.SIGINT or code == 130
    assert lines[0] == "hocket: interrupted at ep 1 ba 4: no checkpoint was written"
    assert lines[2] == "hocket: to resume runs in another process, pass checkpoints=hocket.Checkpoints('runs/…')"


def test_the_best_is_named() -> None:
    checkpoints = hocket.Checkpoints("runs/a", best=("test/loss", "min", 1), keep=None)
    first = last_lines(checkpoints=checkpoints, eval_data={"test": make_data(8)})[0]
    store = Store("runs/a")
    losses = {name: store.about(name)["metrics"]["test/loss"] for name in store.names()}
    best = min(losses, key=losses.__getitem__)
    assert first == (
        "hocket: done at ep 2 ba 6: 2 checkpoints in runs/a, the newest is ep2-ba6, the best "
        f"{best} (test/loss {losses[best]:.4g})"
    )


def test_at_a_prompt_the_trainer_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert last_lines()[-1] == (
        "hocket: to train longer: trainer.fit('1ep'); to resume runs in another process, pass "
        "checkpoints=hocket.Checkpoints('runs/…')"
    )
    assert last_lines(checkpoints=hocket.Checkpoints("runs/a"), run_name="c")[-1] == (
        "hocket: to train longer: trainer.fit('1ep'), or in another process Trainer(…, duration=…, resume='auto')"
    )


def test_control_c_does_not_exit_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checkpoints too, whose exit code 75 is for schedulers. SIGTERM still exits; the next fit goes on exactly."""

    class Press(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            if state.timestamp.batch in (2, 4):
                os.kill(os.getpid(), signal.SIGINT if state.timestamp.batch == 2 else signal.SIGTERM)

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trainer = make_trainer(
        device="cpu", seed=1, callbacks=[Press()], checkpoints=hocket.Checkpoints("runs/a", every=None)
    )
    with pytest.raises(KeyboardInterrupt, match="Control-C: a checkpoint was written"):
        trainer.fit()
    assert Store("runs/a").names() == ["ep0-ba2"]
    with pytest.raises(SystemExit) as ended:
        trainer.fit()
    assert ended.value.code == EXIT_CODE
    trainer.fit()
    straight = make_trainer(device="cpu", seed=1)
    straight.fit()
    ours, theirs = trainer.model_state_dict(), straight.model_state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_tests_write_nothing_and_say_so() -> None:
    assert last_lines(fast_dev_run=1, checkpoints=hocket.Checkpoints("runs/a")) == [
        "hocket: this was a test, which writes nothing"
    ]
    assert not Path("runs").exists()


def test_a_store_that_cannot_be_read_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Break(hocket.Callback):
        def fit_end(self, state: hocket.State) -> None:
            monkeypatch.setattr(checkpoints.listing, "summary", self._fail)
            raise KeyboardInterrupt

        def _fail(self) -> str:
            raise OSError("planned")

    file = io.StringIO()
    checkpoints = hocket.Checkpoints("runs/a")
    trainer = make_trainer(
        device="cpu", callbacks=[Break()], loggers=[ConsoleLogger(file)], checkpoints=checkpoints, duration="1ba"
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert "the checkpoints cannot be listed: planned" in file.getvalue()


CONFIGURATION = """
model: {class_path: hocket_vision.models.small_resnet}
loss: torch.nn.functional.cross_entropy
data: digits
optimizer: sgd(lr=0.1)
duration: 2ba
loggers: [console]
limit_eval: 1
device: cpu
checkpoints: {class_path: hocket_checkpoints.periodic_saving.Checkpoints, init_args: {folder: runs/a}}
"""


def test_the_command_line_names_a_command_that_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hocket_vision")
    pytest.importorskip("sklearn")
    Path("my run.yaml").write_text(CONFIGURATION)
    assert main(["train", "my run.yaml", "duration=1ba", "log_every=1ba"]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "hocket: to train longer: hocket train 'my run.yaml' log_every=1ba resume=auto 'duration=…'"
    assert main(shlex.split(last.replace("…", "3ba"))[5:]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "hocket: resumed from runs/a/ep0-ba1, at ep 0 ba 1" and said.count(said[0]) == 1
    assert "hocket: done at ep 0 ba 3: 2 checkpoints in runs/a, the newest is ep0-ba3" in said


MINE = """
import os, signal, hocket, torch

class Press(hocket.Callback):
    def batch_end(self, state):
        if state.timestamp.batch == 2:
            os.kill(os.getpid(), signal.SIGINT)

def data():
    return [(torch.ones(4, 2), torch.ones(4, 1))] * 4
"""
WITHOUT_LOGGERS = """
model: {class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 1}}
loss: torch.nn.functional.mse_loss
train_data: mine:data
callbacks: [mine:Press]
optimizer: sgd(lr=0.1)
duration: 1ep
device: cpu
run_name: b
checkpoints: {class_path: hocket_checkpoints.periodic_saving.Checkpoints, init_args: {folder: runs/a}}
"""


@pytest.mark.long
def test_the_command_line_says_them_without_loggers() -> None:
    Path("mine.py").write_text(MINE)
    Path("c.yaml").write_text(WITHOUT_LOGGERS)
    lines = []
    for code in (EXIT_CODE, 0):
        done = subprocess.run(
            [sys.executable, "-c", "import sys, hocket_cli; sys.exit(hocket_cli.main())", "train", "c.yaml", "resume=auto"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        lines.append([line for line in done.stderr.splitlines() if line.startswith("hocket: ")])
    assert lines[0] == [
        f"hocket: resume='auto': there is no checkpoint in {Path('runs/a').resolve()} yet, so a new run begins",
        "hocket: interrupted at ep 0 ba 2: 1 checkpoint in runs/a, the newest is ep0-ba2",
        "hocket: config.yaml in runs/b",
        "hocket: to continue: hocket train c.yaml resume=auto",
    ]
    assert lines[1][:2] == [
        "hocket: resumed from runs/a/ep0-ba2, at ep 0 ba 2",
        "hocket: done at ep 1 ba 4: 2 checkpoints in runs/a, the newest is ep1-ba4",
    ]

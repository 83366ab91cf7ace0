"""Train, evaluate and predict with core alone, and ask for what other packages bring: one line says what to install."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import Any

import torch

import hocket

#: What core needs.
NEEDED = {"torch", "pluggy", "importlib-metadata"}
DATA = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 10


def trainer(**arguments: Any) -> hocket.Trainer:
    return hocket.Trainer(
        torch.nn.Linear(4, 3), DATA, eval_data={"test": DATA}, loss="cross_entropy", metrics=["accuracy"],
        optimizer="adamw(lr=1e-2)", duration="3ep", **arguments,
    )  # fmt: skip


def callbacks() -> Any:
    from hocket.callbacks import EarlyStopping

    return EarlyStopping


def read_weights() -> Any:
    from hocket.checkpoints import read_weights

    return read_weights


def command() -> None:
    """The console script, whose error is that of its last line."""
    script = Path(sysconfig.get_path("scripts")) / "hocket"
    done = subprocess.run([script, "plan", "run.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    raise ImportError(done.stderr.strip())


#: What is asked for, and the package that brings it.
MISSING: dict[str, tuple[Callable[[], Any], str]] = {
    "hocket": (command, "cli"),
    "hocket.Checkpoints": (lambda: hocket.Checkpoints, "checkpoints"),
    "checkpoints=": (partial(trainer, checkpoints="runs/a"), "checkpoints"),
    "resume=": (partial(trainer, resume="runs/a/ep1-ba10"), "checkpoints"),
    "state_dict": (lambda: trainer().state_dict(), "checkpoints"),
    "load_state_dict": (lambda: trainer().load_state_dict({"version": 1}), "checkpoints"),
    "load_weights": (lambda: trainer().load_weights("model.pt"), "checkpoints"),
    "evaluate('best')": (lambda: trainer().evaluate("best"), "checkpoints"),
    "read_weights": (read_weights, "checkpoints"),
    "hocket.data.Several": (lambda: hocket.data.Several, "data"),
    "data=": (partial(trainer, data=object()), "data"),
    "profile=": (partial(trainer, profile=True), "insight"),
    "profile_plugins=": (partial(trainer, profile_plugins=True), "insight"),
    "'early-stopping'": (partial(trainer, callbacks=["early-stopping"]), "insight"),
    "hocket.callbacks": (callbacks, "insight"),
    "summary=True": (partial(trainer, summary=True), "insight"),
    "hocket.model_summary": (lambda: hocket.model_summary, "insight"),
    "'jsonl'": (partial(trainer, loggers=["jsonl"]), "loggers"),
    "hocket.testkit": (lambda: hocket.testkit.run_ranks, "testkit"),
    "devices=2": (partial(trainer, devices=2), "strategies"),
    "hocket.launch": (lambda: hocket.launch, "strategies"),
    "hocket.Runtime": (lambda: hocket.Runtime, "strategies"),
    "microbatch='auto'": (partial(trainer, microbatch="auto"), "algorithms-general"),
    "'ema'": (partial(trainer, algorithms=["ema"]), "algorithms-general"),
}


def installed() -> set[str]:
    """The names of all distributions but torch and what it needs."""
    there = {_name(each.metadata["Name"]) for each in distributions()}
    of_torch, waiting = set[str](), ["torch"]
    while waiting:
        if (name := waiting.pop()) in there - of_torch:
            of_torch.add(name)
            waiting += map(_name, requires(name) or ())  # its extras too, some of which torch asks for
    return there - of_torch - {"pip", "setuptools", "wheel"}


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def main() -> None:
    run = trainer()
    result = run.fit()
    assert result.timestamp.epoch == 3 and result.metrics["test/accuracy"] > 0.1
    assert run.evaluate().keys() == {"test/loss", "test/accuracy"} and len(run.predict(DATA)) == 10
    assert {_name(each) for each in requires("hocket") or () if "extra ==" not in each} == NEEDED
    assert installed() - NEEDED <= {"hocket", "zipp"}, installed()  # importlib-metadata needs zipp
    for asked, (act, package) in MISSING.items():
        try:
            act()
        except (ImportError, AttributeError, hocket.plugins.PluginError) as error:
            message = str(error)
            print(f"{asked}: {message}")
            assert len(message.splitlines()) == 1 and "pip install" in message and package in message, (asked, message)
        else:
            sys.exit(f"{asked} works without hocket-{package}")


if __name__ == "__main__":
    main()

"""Reads what stands in a folder in every way there is, under an audit hook that ends the process if anything is executed.

A script: ``python audited.py FOLDER`` prints, as JSON, what every reader said about every case. What is called ``good…`` and
``damaged…`` comes first, and may import what reading needs; after that nothing is imported, and nothing executed that was not
before.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hocket
from hocket.help import installing  # noqa: F401  # messages import it where they need it, whatever the file says
from hocket.plugins import registry
from hocket_checkpoints import resuming
from hocket_checkpoints.storage import format as formats
from hocket_checkpoints.storage.store import Store
from hocket_checkpoints.weight_files import read_weights
from hocket_checkpoints.weights import export
from hocket_cli import main

registry.extra_of("algorithms", "ema")  # likewise, messages read the table of hocket's packages

FORBIDDEN = (
    "pickle.find_class", "exec", "compile", "import", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn",
    "os.fork", "os.forkpty", "ctypes.dlopen", "socket.connect", "code.__new__", "marshal.loads",
)  # fmt: skip


def make(**changes: Any) -> hocket.Trainer:
    """A Trainer with something of everything that checkpoints hold."""
    torch.manual_seed(0)
    arguments = {
        "model": nn.Linear(2, 3), "loss": nn.functional.cross_entropy, "optimizer": "adamw(lr=0.1)",
        "train_data": [(torch.ones(4, 2), torch.zeros(4).long())] * 3, "algorithms": ["ema"], "schedule": "cosine",
        "duration": "2ep", "device": "cpu", "seed": 1,
    }  # fmt: skip
    return hocket.Trainer(**{**arguments, **changes})


def verify(path: Path) -> None:
    if problems := formats.verify(path):
        raise ValueError(" ".join(problems))


def latest(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Store(path.parent).latest()


def command(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(["checkpoint", *arguments])
    if code:
        raise ValueError(out.getvalue() + errors.getvalue())


READERS: dict[str, Callable[[Path, hocket.Trainer], Any]] = {
    "read": lambda path, _: formats.read(path),
    "verify": lambda path, _: verify(path),
    "about": lambda path, _: formats.about(path),
    "latest": lambda path, _: latest(path),
    "weights": lambda path, _: read_weights(path),
    "export": lambda path, _: export(path, path.parent / "out.safetensors"),
    "resume": lambda path, trainer: resuming.resume(trainer.state, path),
    "inspect command": lambda path, _: command("inspect", str(path)),
    "diff command": lambda path, _: command("diff", str(path), str(path)),
}


class Audit:
    """Ends the process if something is executed in ``with audit:`` that was not while it was learning."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.on = False
        self.learning = True
        self.known: set[str] = set()
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        outside = event == "open" and not str(arguments[0]).startswith((str(self.folder), "/proc/", "/sys/"))
        if not outside and event not in FORBIDDEN:
            return
        told = f"{event}: {arguments!r:.300}"
        if self.learning:
            self.known.add(told)
        elif told not in self.known:
            self.on = False
            os.write(2, f"{told}\n{''.join(traceback.format_stack())}".encode())
            os._exit(99)

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *error: object) -> None:
        self.on = False


def said(path: Path, audit: Audit) -> dict[str, str]:
    """By reader: what it raised, with its notes, or nothing."""
    found = {}
    trainer = make()
    for name, reader in READERS.items():
        try:
            with audit:
                reader(path, trainer)
            found[name] = ""
        except Exception as error:
            found[name] = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return found


if __name__ == "__main__":
    root = Path(sys.argv[1]).resolve()
    os.chdir(root)
    warnings.showwarning = lambda *arguments, **keywords: None  # which would open the source that warned
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # less than the sizes that files claim to have
    "ö".encode("unicode_escape")  # messages are printed with this codec, which Python imports when it is first used
    audit = Audit(root)
    cases = sorted(case for case in root.iterdir() if case.is_dir())
    harmless = [case for case in cases if case.name.startswith(("good", "damaged"))]
    results = {case.name: said(case / "c", audit) for case in harmless}
    audit.learning = False
    results |= {case.name: said(case / "c", audit) for case in cases if case not in harmless}
    print(json.dumps(results))

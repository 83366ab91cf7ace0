"""Core needs none of the heavy libraries, and importing it changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BLOCKED = (
    "torchvision", "transformers", "deepspeed", "ray", "wandb", "mlflow", "tensorboard", "matplotlib", "sklearn",
    "torchmetrics",
)  # fmt: skip

WITHOUT = f"""
import importlib.machinery, sys

class Blocker:  # asking whether a library is there is allowed, as torch does; importing it is not
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise ImportError(f"{{spec.name}} is blocked")

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Blocker())
"""


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_core_trains_without_any_of_them() -> None:
    code = """
import torch, hocket
x, y = torch.randn(8, 4), torch.randint(3, (8,))
trainer = hocket.Trainer(
    model=torch.nn.Linear(4, 3), loss=torch.nn.functional.cross_entropy, train_data=[(x, y)], eval_data=[(x, y)],
    optimizer="adamw(lr=0.01)", schedule="cosine", duration="2ep",
    callbacks=["lr-monitor", "speed-monitor"], loggers=["memory"],
)
print(trainer.plan())
print(trainer.fit().timestamp.batch)
"""
    assert python(WITHOUT + code).splitlines()[-1] == "2"


def test_plugins_list_imports_no_torch() -> None:
    code = """
import sys
from hocket_cli import main
assert main(["plugins", "list"]) == 0
assert main(["--help"]) == 0
assert main(["plugins", "hooks"]) == 0
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "hocket_vision", "hocket_general")))
"""
    assert python(WITHOUT + code).splitlines()[-1] == "[]"


def test_the_trainer_and_a_plain_fit_import_few_modules() -> None:
    """A ratchet: lower the numbers whenever fewer are imported. What errors or files need is imported for them."""
    code = """
import sys, torch
before = set(sys.modules)
import hocket
hocket.Trainer, hocket.Algorithm, hocket.Callback
print(len(set(sys.modules) - before))
data = [(torch.randn(8, 4), torch.randint(3, (8,)))] * 10
hocket.Trainer(torch.nn.Linear(4, 3), data, loss="cross_entropy", optimizer="sgd(lr=0.1)", duration="1ep").fit()
ours = [name for name in sys.modules if name.startswith("hocket")]
print(len([name for name in ours if name.partition(".")[0] == "hocket"]))
print(*sorted({name.partition(".")[0] for name in ours}))
"""
    trainer, fit, packages = python(code).splitlines()[-3:]
    assert int(trainer) <= 125
    assert int(fit) <= 151
    # the content of checkpoints, which any fit may be asked for, and checks of the first loss
    assert packages == "hocket hocket_checkpoints hocket_insight"


def test_importing_hocket_changes_nothing(tmp_path) -> None:
    """No environment, signal handlers, logging configuration, random numbers, threads or files."""
    code = f"""
import logging, os, random, signal, sys, threading
import torch
os.chdir({str(tmp_path)!r})
def snapshot():
    return (dict(os.environ), [signal.getsignal(s) for s in signal.valid_signals()], list(logging.root.handlers),
            logging.root.level, random.getstate(), torch.get_rng_state().tolist(), threading.active_count(), os.listdir("."))
before = snapshot()
import hocket
for name in hocket.__all__:
    if name != "testkit":
        getattr(hocket, name)
import hocket_cli.plugins, hocket.surgery, hocket.schedules
print(before == snapshot())
"""
    assert python(code).strip() == "True"


def test_no_eval_and_no_pickle_in_core() -> None:
    """composer.md 3.3: strings from checkpoints were evaluated."""
    import ast
    from pathlib import Path

    import hocket

    called = set()
    for file in Path(hocket.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
    assert not called & {"eval", "exec", "compile"}

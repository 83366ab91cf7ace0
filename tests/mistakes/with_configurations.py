"""Mistakes in configuration files and on the command line."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from newcomers import Mistake

from hocket_cli import main

MINE = """
import torch, hocket
from torch.utils.data import DataLoader, TensorDataset

class Net(torch.nn.Linear):
    def __init__(self, width=3, dropout=0.1):
        super().__init__(4, width)

def samples(count=16):
    return TensorDataset(torch.randn(count, 4), torch.zeros(count, dtype=torch.long))

def loader(count=16):
    return DataLoader(samples(count), 8)
"""
LINES = {
    "model": "{newcomers_own:Net: {width: 3}}", "loss": "cross_entropy", "train_data": "newcomers_own:loader",
    "eval_data": "{val: newcomers_own:loader}", "metrics": "[accuracy]", "optimizer": "adamw(lr=1e-2)", "duration": "1ep",
    "device": "cpu",
}  # fmt: skip


def run(text: str, *argv: str) -> str:
    """Run a command with a file c.yaml; raise what it prints if its exit code is 2."""
    said = io.StringIO()
    path = list(sys.path)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stderr(said):
        Path("newcomers_own.py").write_text(MINE)
        Path("c.yaml").write_text(text)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                code = main(list(argv) or ["train", "c.yaml"])
        finally:
            sys.path[:] = path
            sys.modules.pop("newcomers_own", None)
    assert said.getvalue().count("\n") == 1 or code == 0, said.getvalue()
    if code == 2:
        raise RuntimeError(said.getvalue())
    return said.getvalue()


def file(**changes: str | None) -> Callable[[], str]:
    """Train with changed lines of a file that works; None omits one."""
    return lambda: run("".join(f"{key}: {value}\n" for key, value in (LINES | changes).items() if value is not None))


def more(text: str) -> Callable[[], str]:
    """Train with further lines after a file that works."""
    return lambda: run("".join(f"{key}: {value}\n" for key, value in LINES.items()) + text)


def typed(*argv: str) -> Callable[[], str]:
    """Type a command beside a file that works."""
    return lambda: run("".join(f"{key}: {value}\n" for key, value in LINES.items()), *argv)


def _mistake(name: str, make: Callable[[], str], given: str, allowed: str, write: str) -> Mistake:
    return Mistake(f"configuration: {name}", make, given, allowed, write)


MISTAKES = [
    _mistake("max_epochs", file(duration=None, max_epochs="3"), "c.yaml:8: 'max_epochs'", "not a key", "`duration: 3ep`"),
    _mistake("interval of checkpoints", file(checkpoints="{folder: a, interval: 2ep}"), "'interval'", "Its arguments are folder", "`every: 2ep`"),
    _mistake("1e4 max_steps", file(duration=None, max_steps="1e4"), "'max_steps'", "not a key", "`duration: 10000ba`"),
    _mistake("trainer:", file(trainer="{max_epochs: 3, seed: 1}"), "c.yaml:9: 'trainer'", "top level", "`duration: 3ep`; `seed: 1`"),
    _mistake("training:", more("training:\n  epochs: 3\n  lr: 0.1\n"), "'training'", "top level", "`optimizer: adamw(lr=0.1)`"),
    _mistake("learning_rate", file(learning_rate="5e-5"), "'learning_rate'", "not a key", "`optimizer: adamw(lr=5e-05)`"),
    _mistake("Hydra's defaults", more("defaults: [_self_]\n"), "c.yaml:9: 'defaults'", "no other file is read", "write every value"),
    _mistake("a plug-in as key", file(EarlyStopping="{monitor: val/loss}"), "'EarlyStopping'", "one of the callbacks", "`callbacks: [{early-stopping: {monitor: val/loss}}]`"),
    _mistake("_target_", file(model="{_target_: newcomers_own.Net, width: 5}"), "_target_", "a mapping", "`{newcomers_own:Net: {width: 5}}`"),
    _mistake("not indented", file(model="\n  newcomers_own:Net:\n  width: 5"), "c.yaml:2:", "Indent width", "`{newcomers_own:Net: {width: 5}}`"),
    _mistake("name and lr", file(optimizer="{name: Adam, lr: 1e-3}"), "c.yaml:6:", "a mapping of the name and the arguments", "`{adam: {lr: 0.001}}`"),
    _mistake("type and lr", file(optimizer="{type: sgd, lr: 0.1}"), "c.yaml:6:", "a mapping of the name", "`{sgd: {lr: 0.1}}`"),
    _mistake("callbacks as a mapping", file(callbacks="{early-stopping: {monitor: val/loss}, lr-monitor: {}}"), "c.yaml:9:", "not a list", "`callbacks: [{early-stopping: {monitor: val/loss}}, lr-monitor]`"),
    _mistake("a logger that is not installed", file(loggers="nowhere"), "c.yaml:9:", "no logger 'nowhere'", "console"),
    _mistake("warmup without unit", file(schedule="cosine(warmup=100)"), "'100' has no unit", "epochs", "'100ba'"),
    _mistake("1e2 for an integer", file(model="{newcomers_own:Net: {width: 1e2}}"), "width: 1e2` is a float", "default is 3", "`width: 100`"),
    _mistake("a number in quotes", file(seed="'3'"), "`seed: '3'` is text", "an integer", "Remove the quotes: `seed: 3`"),
    _mistake("None", file(seed="None"), "`seed: None` is text", "an integer or null", "`seed: null`"),
    _mistake("a percentage", file(limit_train="50%"), "`limit_train: 50%`", "a number", "`limit_train: 0.5`"),
    _mistake("yes", file(deterministic="yes"), "`deterministic: yes`", "true or false", "`deterministic: true`"),
    _mistake("fast_dev_run: true", file(fast_dev_run="true"), "`fast_dev_run: true`", "an integer or null", "this many batches"),
    _mistake("precision: 16", file(precision="16"), "no precision '16'", "Installed:", "Did you mean 'fp16'?"),
    _mistake("an environment variable", file(seed="${SEED}"), "${SEED} is not filled in", "neither ${…} nor", "on the command line"),
    _mistake("an environment variable in braces", file(model="{newcomers_own:Net: {width: ${N}}}"), "c.yaml:1:", "neither ${…} nor", "write the value"),
    _mistake("no space", more("seed:3\n"), "c.yaml:9:", "A space follows the colon", "`seed: 3`"),
    _mistake("an alias without anchor", file(model="{newcomers_own:Net: *net}"), "undefined alias 'net'", "&name", "Write that anchor"),
    _mistake("two documents", more("---\nseed: 5\n"), "c.yaml:9:", "one configuration", "Remove the line `---`"),
    _mistake("an empty file", lambda: run(""), "c.yaml:1: It is empty", "a mapping of keys", "--print-config"),
    _mistake("a list", lambda: run("- seed: 3\n"), "It is a list", "a mapping of keys", "Remove the '- '"),
    _mistake("dirpath", file(checkpoints="{dirpath: ck}"), "argument 'dirpath'", "Its arguments are", "`folder: ck`"),
    _mistake("an open bracket", file(optimizer="adamw(lr=1e-2"), "'adamw(lr=1e-2'", "do not match", "Close each one"),
    _mistake("resume without checkpoints", file(resume="auto"), "c.yaml:9: `resume: auto`", "folder of checkpoints", "`checkpoints: runs/a`"),
    _mistake("no optimizer", file(optimizer=None), "There is no optimizer", "configure_optimizers", "`{torch.optim:AdamW: {lr: 0.001}}`"),
    _mistake("nll_loss", file(loss="nll_loss"), "nll_loss takes log-probabilities", "which takes logits", "`loss: torch.nn.functional:cross_entropy`"),
    _mistake("two evaluation sets", file(eval_data="[{newcomers_own:loader: {count: 8}}, {newcomers_own:loader: {}}]"), "c.yaml:4:", "given by name", "`eval_data: {first: module:loader, second: module:other}`"),
    _mistake("a data set", file(train_data="newcomers_own:samples"), "a data set", "not batches", "`train_data: {torch.utils.data:DataLoader:"),
    _mistake("a best metric that does not exist", file(checkpoints="{folder: ck, best: [val/acc, max, 1]}"), "c.yaml:9:", "There are: val/accuracy", "val/loss"),
    _mistake("a long warm-up", file(schedule="cosine(warmup=10ep)"), "c.yaml:9: The warm-up of 10ep", "t_max=1dur", "Make the warm-up shorter"),
    _mistake("a negative size", file(model="{newcomers_own:Net: {width: -4}}"), "negative dimension", "newcomers_own.py:7", "Change the value"),
    _mistake("hocket fit", typed("fit", "c.yaml"), "no command 'fit'", "Installed:", "'train'"),
    _mistake("hocket test", typed("test", "c.yaml"), "no command 'test'", "Installed:", "'evaluate'"),
    _mistake("hocket c.yaml", typed("c.yaml"), "'c.yaml' is a file", "a command", "hocket train c.yaml"),
    _mistake("--seed 4", typed("train", "c.yaml", "--seed", "4"), "no option '--seed'", "without dashes", "seed=4"),
    _mistake("--resume", typed("train", "c.yaml", "--resume"), "no option '--resume'", "newest checkpoint", "resume=auto"),
    _mistake("--config", typed("train", "--config", "c.yaml"), "no option '--config'", "without an option", "hocket train"),
    _mistake("--dry-run", typed("train", "c.yaml", "--dry-run"), "no option '--dry-run'", "trains nothing", "hocket plan"),
    _mistake("--epochs 3", typed("train", "c.yaml", "--epochs", "3"), "no option '--epochs'", "`", "duration=3ep"),
    _mistake("seed = 4", typed("train", "c.yaml", "seed", "=", "4"), "'seed = 4'", "without spaces", "seed=4"),
    _mistake("init_args in an override", typed("train", "c.yaml", "model.init_args.width=4"), "model.init_args.width=4", "without init_args", "model.width=4"),
    _mistake("two files", typed("train", "c.yaml", "d.yaml"), "'d.yaml'", "one configuration", "duration=2ep"),
    _mistake("evaluate without weights", typed("evaluate", "c.yaml"), "needs --weights", "best or latest", "Usage: hocket evaluate"),
]  # fmt: skip

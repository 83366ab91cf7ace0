"""``hocket sweep sweep.yaml``, and ``hocket sweep config.yaml key=a,b,c --metric test/accuracy``."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.basics.direction import contradiction
from hocket.basics.safe_files import escaped
from hocket.hookspecs.command import Command
from hocket.plugins import PluginError
from hocket_cli.arguments import add_trust
from hocket_cli.completion import completes, configurations, overrides
from hocket_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from hocket_cli.document import Node
    from hocket_cli.sweeps.optuna import Study
    from hocket_cli.sweeps.record import Entry, Record
    from hocket_cli.sweeps.space import Space

SAMPLERS = ("grid", "random", "tpe", "gp", "cmaes", "qmc")
PRUNERS = ("median", "hyperband", "halving")
#: Keys that each trial has its own of.
_OWN = ("run_name", "folder", "resume", "checkpoints")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file, the parameters, and how to search."""
    config = parser.add_argument("config", help="a sweep's YAML file with parameters, or a configuration")
    changes = parser.add_argument(
        "changes", nargs="*", default=[], metavar="key=value",
        help="values to try, such as seed=1,2,3 or optimizer.adamw.lr=loguniform(1e-4,1e-1), and overrides for all trials",
    )  # fmt: skip
    completes(config, configurations)
    completes(changes, overrides)
    parser.add_argument(
        "--metric", help="the metric that is optimized, such as test/accuracy, as it is after each trial"
    )
    parser.add_argument("--mode", choices=("min", "max"), help="whether the smallest or the largest is best")
    parser.add_argument("--sampler", choices=SAMPLERS, help="grid (the default), random, or one of Optuna's")
    parser.add_argument("--trials", type=int, metavar="N", help="number of trials; all of a grid by default")
    parser.add_argument("--seed", type=int, metavar="N", help="of the sampler (default 0)")
    parser.add_argument("--prune", action="store_true", help="end bad trials early, by Optuna's median pruner")
    parser.add_argument("--pruner", choices=PRUNERS, help="prune by this one of Optuna's")
    parser.add_argument("--jobs", type=int, metavar="N", help="number of trials at a time (default 1)")
    parser.add_argument(
        "--prefix", metavar="COMMAND", help="a command that runs each trial, such as 'srun --gpus 1' on a cluster"
    )
    parser.add_argument("--name", help="the sweep's folder in that of the runs; by default, named after the file")
    add_trust(parser)
    parser.add_argument("--retry-failed", action="store_true", help="run failed trials again, too")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


@dataclass
class Sweep:
    """A sweep as the user describes it."""

    config: str
    name: str
    fixed: list[str]
    space: Space
    metric: str = ""
    mode: str = ""
    sampler: str = "grid"
    trials: int | None = None
    seed: int = 0
    prune: str | None = None
    jobs: int = 1
    prefix: str = ""
    trust: bool = False
    #: Set once the configuration is read.
    folder: Path = field(default_factory=Path)
    resumable: bool = False
    written: dict[str, Any] = field(default_factory=dict)
    checkpoints: str = ""

    def definition(self) -> dict[str, Any]:
        """Return what must not change when the sweep is continued."""
        return {
            "config": self.config, "configuration": self.written, "parameters": {k: v.plain() for k, v in self.space.items()},
            "metric": self.metric, "mode": self.mode, "sampler": self.sampler, "seed": self.seed, "prune": self.prune,
        }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Check all values, run the trials, and print them as a table."""
    from hocket.basics.run_folder import writable
    from hocket_checkpoints.storage.locks import FileLock
    from hocket_cli.sweeps import processes
    from hocket_cli.sweeps.record import PRIVATE, Record

    sweep = _described(args)
    _check(sweep)
    with writable(sweep.folder, "folder=runs"):
        record = Record.open(sweep.folder, sweep.definition())
        (sweep.folder / PRIVATE).mkdir(parents=True, exist_ok=True)
        study = _study(sweep)
        lock = FileLock(sweep.folder / PRIVATE, sweep.name, f"write --name with another name than {sweep.name}")
    try:
        record.save()
        done = sum(each.status in ("finished", "pruned", "failed") for each in record.trials)
        if record.trials:
            print(f"hocket: {sweep.folder} is continued after {done} trials.", file=sys.stderr, flush=True)
        if sweep.resumable:
            processes.wait_for_left(record)
        interrupted = processes.run(
            record,
            _waiting(sweep, record, study, args.retry_failed),
            shlex.split(sweep.prefix),
            lambda entry: _arguments(sweep, entry),
            lambda entry: _prune(sweep, entry),
            lambda entry: _ended(record, entry, study),
            sweep.jobs,
        )
    finally:
        lock.release()
    return _finish(sweep, record, interrupted, args)


# --- what the user wrote


def _described(args: argparse.Namespace) -> Sweep:
    """Return the sweep that the file and the command line describe. Raises ConfigError, PluginError."""
    from hocket_cli.document import ConfigError, parse, text_of
    from hocket_cli.sweeps.space import of_node, of_text

    root = parse(text_of(args.config), args.config)
    given: dict[str, Any] = {}
    space: Space = {}
    fixed: list[str] = []
    config, stem = args.config, Path(args.config).stem
    name = f"{stem}-sweep"
    if root.value.keys() & {"parameters", "config"}:
        given = _of_file(root)
        name = stem
        config = str(Path(args.config).parent / given.pop("config"))
        parameters = root.value["parameters"]
        if not isinstance(parameters.value, dict):
            raise ConfigError(
                parameters.where, "parameters is a mapping of keys to values to try, such as `seed: [1, 2, 3]`."
            )
        space = {str(key): of_node(node, str(key)) for key, node in parameters.value.items()}
        fixed = given.pop("overrides", [])
    _refuse_twice([*space, *map(_key, fixed)], f"parameters and overrides of {args.config}")
    _refuse_twice(map(_key, args.changes), "the command line")
    for change in args.changes:
        key = _key(change)
        text = change[len(key) + 1 :]
        values = of_text(key, text)
        if key in space:
            print(f"hocket: {key}={text} takes the place of its values in {args.config}.", file=sys.stderr)
            del space[key]
        fixed = [each for each in fixed if _key(each) != key]
        if values is None:
            fixed.append(change)
        else:
            space[key] = values
    options = {
        key: getattr(args, key)
        for key in ("metric", "mode", "sampler", "trials", "seed", "jobs", "prefix", "name", "trust")
    }
    given |= {key: value for key, value in options.items() if value is not None}
    prune = args.pruner or ("median" if args.prune else given.pop("prune", None))
    given.pop("prune", None)
    sweep = Sweep(
        config, given.pop("name", name), fixed, space, prune="median" if prune is True else prune or None, **given
    )
    if (
        sweep.sampler == "grid"
        and "sampler" not in given
        and any(not hasattr(each, "values") for each in space.values())
    ):
        sweep.sampler = "random"
        print("hocket: There are ranges among the values, so the sampler is random.", file=sys.stderr)
    _check_sweep(sweep)
    return sweep


def _key(change: str) -> str:
    from hocket_cli.overrides import split

    return split(change)[0]


def _refuse_twice(keys: Iterable[str], where: str) -> None:
    """Raise ConfigError for a key that is given twice in one place."""
    from hocket_cli.document import ConfigError

    for key, number in Counter(keys).items():
        if number > 1:
            raise ConfigError(where, f"'{key}' is given twice. Write it once, with all values to try or with one.")


_KEYS = (
    "config",
    "parameters",
    "overrides",
    "metric",
    "mode",
    "sampler",
    "trials",
    "seed",
    "prune",
    "jobs",
    "prefix",
    "name",
)


def _of_file(root: Node) -> dict[str, Any]:
    """Return the keys of a sweep's file, without parameters. Raises ConfigError."""
    from hocket_cli.document import ConfigError, flow, suggestion

    found: dict[str, Any] = {}
    kinds: dict[str, tuple[type, ...]] = {"trials": (int,), "seed": (int,), "jobs": (int,), "prune": (bool, str)}
    choices = {"mode": ("min", "max"), "sampler": SAMPLERS, "prune": (*PRUNERS, True, False)}
    for key, node in root.value.items():
        if isinstance(key, str) and key.startswith("x-"):
            continue
        if key not in _KEYS:
            raise ConfigError(node.key, f"'{key}' is not a key of a sweep. {suggestion(key, _KEYS)}")
        if key in ("parameters", "overrides"):
            continue
        value = node.plain()
        if not isinstance(value, kinds.get(key, (str,))) or (isinstance(value, bool) and key != "prune"):
            raise ConfigError(node.where, f"{key}={flow(value)} should be {'an integer' if key in kinds else 'text'}.")
        if key in choices and value not in choices[key]:
            raise ConfigError(node.where, f"{key}={flow(value)} is not one of {', '.join(map(str, choices[key]))}.")
        found[key] = value
    if "config" not in found:
        raise ConfigError(
            root.where, "There is no config. Add a line such as `config: config.yaml`, relative to this file."
        )
    if "parameters" not in root.value:
        raise ConfigError(
            root.where, "There are no parameters. Add values to try, such as `parameters: {seed: [1, 2, 3]}`."
        )
    if "overrides" in root.value:
        inside = root.value["overrides"]
        if not isinstance(inside.value, dict):
            raise ConfigError(inside.where, "overrides is a mapping of keys to values, such as `{duration: 2ep}`.")
        found["overrides"] = [f"{key}={flow(value.plain())}" for key, value in inside.value.items()]
    return found


def _check_sweep(sweep: Sweep) -> None:
    if not sweep.space:
        raise PluginError(
            "There is nothing to try. Give values with commas, such as optimizer.adamw.lr=1e-3,1e-2 or "
            "model.width=int(8,64); in a file, under parameters."
        )
    _refuse_secrets(sweep.space)
    if not sweep.metric or not sweep.mode:
        missing = [name for name in ("metric", "mode") if not getattr(sweep, name)]
        raise PluginError(
            f"A sweep needs {' and '.join(f'--{name}' for name in missing)}: the metric that is best, such as --metric "
            "test/accuracy --mode max."
        )
    if text := contradiction(sweep.metric, sweep.mode, lambda mode: f"--metric {sweep.metric} --mode {mode}"):
        print(f"hocket: {text}", file=sys.stderr, flush=True)
    if sweep.sampler == "grid":
        from hocket_cli.sweeps.space import grid

        next(grid(sweep.space))  # raises if it has no end
    elif sweep.trials is None:
        raise PluginError(f"--sampler {sweep.sampler} needs --trials, the number of trials, such as --trials 20.")
    for name in ("trials", "jobs"):
        if (value := getattr(sweep, name)) is not None and value < 1:
            raise PluginError(f"--{name} {value} is less than 1.")
    from hocket.basics.run_folder import check_name

    try:
        check_name(sweep.name)
    except (TypeError, ValueError):
        raise PluginError(
            f"The sweep's name, {shlex.quote(str(sweep.name)[:40])}, is not that of one folder. Write --name with printable "
            "characters without / and \\, such as --name lr; the folder above it is folder=…."
        ) from None
    _check_prefix(sweep.prefix)
    if _with_optuna(sweep):
        from hocket_cli.sweeps.optuna import check_installed

        check_installed(sweep.sampler)
    for key in [*sweep.space, *map(_key, sweep.fixed)]:
        if key in ("run_name", "resume") or (key in sweep.space and key.partition(".")[0] in _OWN):
            raise PluginError(f"'{key}' is set by the sweep for each trial, which has its own folder. Remove it.")


def _refuse_secrets(space: Space) -> None:
    """Raise PluginError for a key with values that no file and no table may have."""
    from hocket.basics.masking import masked
    from hocket_cli.overrides import parts

    for key, values in space.items():
        given = values.samples()
        if masked(given, *parts(key)) != given:
            raise PluginError(
                f"'{key}' has secrets among its values, which a sweep would write and show. Give one, the same for all "
                "trials, or read it in your code from an environment variable."
            )


def _check_prefix(prefix: str) -> None:
    try:
        words = shlex.split(prefix)
    except ValueError as error:
        raise PluginError(f"--prefix {prefix!r} is not a command: {error}.") from None
    if words and shutil.which(words[0]) is None:
        raise PluginError(
            f"--prefix {prefix!r} begins with {words[0]!r}, which is not a program here. Give a command that runs the command "
            "after it, such as --prefix 'srun --gpus 1'."
        )


def _check(sweep: Sweep) -> None:
    """Check the configuration with every value, before any trial is started. Raises ConfigError."""
    from hocket.basics.masking import masked
    from hocket_cli.config import Configuration
    from hocket_cli.document import flow
    from hocket_cli.origins import importable
    from hocket_cli.overrides import refuse_masked, source
    from hocket_cli.recorded import folder_of

    def read(*changes: str) -> Any:
        found = source(argparse.Namespace(config=sweep.config, changes=[*sweep.fixed, *changes]))
        if not changes:
            found.announce()
        importable(found, sweep.trust, say=not changes)
        refuse_masked(found.document)
        Configuration(found.document).check(("train_data", "duration"))
        return found

    document = read().document
    sweep.folder, sweep.written = folder_of(document) / sweep.name, masked(document.plain())
    checkpoints = document.value.get("checkpoints")
    if checkpoints is not None and checkpoints.value is not None:
        sweep.resumable = True
        sweep.checkpoints = "checkpoints.folder" if isinstance(checkpoints.value, dict) else "checkpoints"
    for key, values in sweep.space.items():
        for value in values.samples():
            read(f"{key}={flow(value)}")


# --- trials


def _with_optuna(sweep: Sweep) -> bool:
    return bool(sweep.prune) or sweep.sampler not in ("grid", "random")


def _study(sweep: Sweep) -> Study | None:
    from hocket_cli.sweeps.record import PRIVATE

    if not _with_optuna(sweep):
        return None
    from hocket_cli.sweeps.optuna import Study

    return Study(sweep.folder / PRIVATE / "optuna.journal", sweep.mode, sweep.prune)


def _waiting(sweep: Sweep, record: Record, study: Study | None, retry: bool) -> Iterator[Entry]:
    """Yield the trials to run, each when it is about to start: a sampler of Optuna decides by those before it."""
    from hocket_cli.sweeps import processes
    from hocket_cli.sweeps.record import Entry
    from hocket_cli.sweeps.space import drawn, grid

    for entry in processes.unfinished(record, retry):
        entry.name = processes.attempt(record.folder, entry, sweep.resumable)
        yield entry
    combinations: Iterator[dict[str, Any] | None] = iter(())
    if sweep.sampler == "grid":
        combinations = itertools.islice(grid(sweep.space), sweep.trials)
    elif sweep.sampler == "random":
        combinations = (drawn(sweep.space, sweep.seed, number) for number in range(sweep.trials or 0))
    else:
        combinations = itertools.repeat(None, sweep.trials or 0)
    for number, values in enumerate(combinations):
        if number < len(record.trials):
            continue
        asked = None
        if study is not None:
            asked, values = study.ask(sweep.space, sweep.sampler, sweep.seed, values)
        assert values is not None
        yield Entry(number, f"trial-{number:03}", values, asked=asked)


def _arguments(sweep: Sweep, entry: Entry) -> list[str]:
    from hocket_cli.document import flow
    from hocket_cli.sweeps.processes import values_of

    changes = [*sweep.fixed, *values_of(entry), f"folder={flow(str(sweep.folder))}", f"run_name={entry.name}"]
    if sweep.resumable:
        target = (sweep.folder / entry.name / "checkpoints").as_posix()
        changes += [f"{sweep.checkpoints}={flow(target)}", "resume=auto"]
    else:
        changes += ["resume=null"]
    return [sweep.config, *changes, *(["--trust"] if sweep.trust else [])]


def _prune(sweep: Sweep, entry: Entry) -> dict[str, Any] | None:
    from hocket_cli.sweeps.record import PRIVATE

    if not sweep.prune:
        return None
    journal = (sweep.folder / PRIVATE / "optuna.journal").resolve()
    return {"journal": str(journal), "mode": sweep.mode, "pruner": sweep.prune, "trial": entry.asked}


def _ended(record: Record, entry: Entry, study: Study | None) -> None:
    from hocket_cli.sweeps.space import described

    if study is not None and entry.asked is not None and entry.status != "interrupted":
        study.tell(entry.asked, entry.value, entry.status == "pruned")
    value = "" if entry.value is None else f" {record.definition['metric']} {entry.value:.6g}"
    error = f": {entry.error}" if entry.error else ""
    print(escaped(f"{entry.name} {entry.status}{value} ({described(entry.parameters)}){error}"), flush=True)


def _finish(sweep: Sweep, record: Record, interrupted: bool, args: argparse.Namespace) -> int:
    from hocket.basics.run_files import CONFIG
    from hocket_cli.sweeps.space import described

    print(f"\n{escaped(record.table())}\n")
    if (best := record.best()) is not None:
        again = f"to run it again: hocket train --from {shlex.quote(str(sweep.folder / best.name))}"
        if not (sweep.folder / best.name / CONFIG).is_file():
            again = f"it tried {described(best.parameters)}, and left no files, as with fast_dev_run or overfit"
        print(escaped(f"best: {best.name}; {again}"))
    failed = [each for each in record.trials if each.status == "failed"]
    if failed:
        output = sweep.folder / ".sweep" / f"{failed[0].name}.txt"
        by = failed[0].error.rstrip(".")
        print(escaped(f"{len(failed)} failed, {failed[0].name} by {by}; all it printed is in {output}"))
    print(f"trials in {sweep.folder}, and all values in {sweep.folder / 'sweep.json'}")
    if interrupted:
        print("hocket: interrupted; the same command continues the sweep.", file=sys.stderr)
        return ExitCode.INTERRUPTED
    with contextlib.suppress(AttributeError):
        sys.stdout.flush()
    return ExitCode.DONE if best is not None else ExitCode.FAILED


command = Command("Run a configuration with many values, and name the best", add_arguments, run)

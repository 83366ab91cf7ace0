"""``hocket sweep sweep.yaml``, and ``hocket sweep config.yaml key=a,b,c --metric test/accuracy``."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hocket.basics.safe_files import escaped
from hocket.hookspecs.command import Command
from hocket_cli.common_options import add_trust
from hocket_cli.completion import completes, configurations, overrides
from hocket_cli.exit_codes import ExitCode
from hocket_cli.sweeps.description import PRUNERS, SAMPLERS, Sweep, check_values, described

if TYPE_CHECKING:
    from hocket_cli.sweeps.optuna import Study
    from hocket_cli.sweeps.record import Entry, Record


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


def run(args: argparse.Namespace) -> int:
    """Check all values, run the trials, and print them as a table."""
    from hocket.basics.run_folder import writable
    from hocket_checkpoints.storage.locks import FileLock
    from hocket_cli.sweeps import processes
    from hocket_cli.sweeps.record import PRIVATE, Record

    sweep = described(args)
    check_values(sweep)
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


def _study(sweep: Sweep) -> Study | None:
    from hocket_cli.sweeps.record import PRIVATE

    if not sweep.with_optuna:
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
    from hocket_cli.sweeps import space

    if study is not None and entry.asked is not None and entry.status != "interrupted":
        study.tell(entry.asked, entry.value, entry.status == "pruned")
    value = "" if entry.value is None else f" {record.definition['metric']} {entry.value:.6g}"
    error = f": {entry.error}" if entry.error else ""
    print(escaped(f"{entry.name} {entry.status}{value} ({space.described(entry.parameters)}){error}"), flush=True)


def _finish(sweep: Sweep, record: Record, interrupted: bool, args: argparse.Namespace) -> int:
    from hocket.basics.run_files import CONFIG
    from hocket_cli.sweeps import space

    print(f"\n{escaped(record.table())}\n")
    if (best := record.best()) is not None:
        again = f"to run it again: hocket train --from {shlex.quote(str(sweep.folder / best.name))}"
        if not (sweep.folder / best.name / CONFIG).is_file():
            again = f"it tried {space.described(best.parameters)}, and left no files, as with fast_dev_run or overfit"
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

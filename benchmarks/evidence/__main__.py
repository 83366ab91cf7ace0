"""``python -m evidence``, from the folder benchmarks: tune, measure and publish.

It skips what earlier runs have tuned and measured. An interrupted run continues: pairs of runs are appended to
benchmarks/results/evidence.jsonl. Publishing some rows keeps the others as they are published.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from evidence import measure, pairs, publish, run, tune
from evidence.rows import recipes, rows
from evidence.tasks import TASKS


def main(words: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="evidence", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="tasks, rows and recipes; default all")
    parser.add_argument("--seeds", default="1-5", help="first and last (default 1-5); recipes get twice as many")
    parser.add_argument(
        "--workers", type=int, default=2, help="pairs of runs at a time, with a thread each (default 2)"
    )
    parser.add_argument(
        "--publish", action="store_true", help="write what is measured into docs/evidence, the index and the cards"
    )
    parser.add_argument(
        "--untimed",
        action="store_true",
        help="other programs run on this machine: publish gains of measured rows, and not their times",
    )
    parser.add_argument(
        "--tables", action="store_true", help="measure nothing: write verdicts and tables again from docs/evidence"
    )
    parser.add_argument(
        "--check", metavar="ROW", help="repeat a row with other --seeds, and compare it with what is published"
    )
    arguments = parser.parse_args(words)
    if arguments.tables:
        publish.write(publish.judged(publish.published()))
        return 0
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)

    begin = time.monotonic()
    every = [*rows().values(), *recipes()]
    only = {*arguments.only, *filter(None, [arguments.check])}
    if unknown := only - {*TASKS, *(row.name for row in every)}:
        parser.error(f"There is no task, row or recipe {', '.join(sorted(unknown))}.")
    tasks = [task for task in TASKS.values() if task.name in only or not only & set(TASKS)]
    chosen = [row for row in every if row.name in only or not only - set(TASKS)]
    for row in chosen:
        if row.skip or row.missing:
            print(f"{row.name} is skipped: {row.skip or 'not installed: ' + ', '.join(row.missing)}")
    chosen = [row for row in chosen if not row.skip and not row.missing]

    measure.prepare(tasks)
    tune.tune(tasks, chosen, arguments.workers)
    run.measure([(task, row) for task in tasks for row in chosen if task.name in row.tasks], seeds, arguments.workers)
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    if arguments.publish:
        found = publish.results([row for row in every if not row.skip and not row.missing], seeds)
        found = publish.merged(publish.published(), found, {row.name: row for row in every}, arguments.untimed)
        publish.write(publish.with_references(found))
    return check(publish.results(chosen, seeds)) if arguments.check else 0


def check(repeated: Mapping[str, Any]) -> int:
    """Compare a repetition with the published results. Return 0 if all mean gains are in their 95 % prediction intervals."""
    published = publish.published()
    failed = compared = 0
    for kind in ("rows", "recipes"):
        for label, entry in repeated[kind].items():
            for task, cell in entry["cells"].items():
                before = published[kind].get(label, {}).get("cells", {}).get(task, {})
                compared += 1
                if "gain" not in before or "gain" not in cell:
                    print(f"{label} on {task}: {cell.get('error', 'not published')}")
                    failed += 1
                    continue
                around, mean = pairs.Interval(**before["gain"]), cell["gain"]["mean"]
                expected = around.expects(mean, cell["gain"]["count"])
                failed += not expected
                print(
                    f"{label} on {task}: {mean:+.3f}; published {around.mean:+.3f} [{around.low:+.3f}, {around.high:+.3f}]: "
                    f"{'within' if mean in around else 'outside'} its 95 % interval, and "
                    f"{'within' if expected else 'OUTSIDE'} that of 95 % of repetitions"
                )
    if not compared:
        print(
            "Nothing was compared. Name a published row, and at least two seeds: --check label-smoothing --seeds 100-104"
        )
    return 1 if failed or not compared else 0


if __name__ == "__main__":
    sys.exit(main())

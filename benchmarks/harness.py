"""Measuring: interleaved repeats, medians and spreads, and the machine they were taken on."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"


@dataclass
class Series:
    """Repeats of one measurement, in one unit."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles."""
        if len(self.values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4)
        return (high - low) / 2

    def __str__(self) -> str:
        size = abs(self.median)
        digits = 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0
        return f"{self.median:,.{digits}f} ± {self.spread:,.{digits}f}"


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval that holds the true median, whatever the distribution: two of the values in order.

    The number of values below the median is binomial (Conover 1999, "Practical Nonparametric Statistics", section 3.2). Of
    fewer than 6 values it is the range, which holds the median less often than in 95 % of cases.
    """
    ordered, count = sorted(values), len(values)
    outside, left_out = (
        0.0,
        -1,
    )  # the chance that the median is below the value at ``left_out``, or above its mirror image
    while (outside := outside + 2 * math.comb(count, left_out + 1) / 2**count) <= 1 - confidence:
        left_out += 1
    low = max(left_out, 0)
    return ordered[low], ordered[count - 1 - low]


class Worker:
    """A contender in a process of its own (see worker.py)."""

    def __init__(self, python: str, name: str, threads: int) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self.name = name
        self._process = subprocess.Popen(
            [python, str(HERE / "worker.py"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        about = self.ask()
        self.cases: list[str] = about["cases"]
        self.versions: dict[str, str] = about["versions"]

    def ask(self, **question: str | int) -> Any:
        """One answer. Raises RuntimeError if the process is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The worker '{self.name}' ended with exit code {self._process.wait()}.")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def machine() -> dict[str, str]:
    """What the numbers were taken on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor() or platform.machine(),
    )
    return {
        "cpu": model,
        "cores": str(os.cpu_count()),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def table(rows: list[list[str]]) -> str:
    """Markdown, the first row as the head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def publish(name: str, found: Mapping[str, Any]) -> None:
    """Replace the figures and the tables of a section of docs/, and leave those of the others."""
    raw, page = DOCS / "benchmarks.json", DOCS / "explanation/benchmarks.md"
    raw.write_text(json.dumps(json.loads(raw.read_text()) | {name: found}, indent=1) + "\n")
    sections = re.split(r"^(?=## )", page.read_text().rstrip(), flags=re.MULTILINE)
    kept = [section.rstrip() for section in sections if not section.startswith(f"## {name}\n")]
    page.write_text("\n\n".join([*kept, f"## {name}\n\n{found['table']}"]) + "\n")

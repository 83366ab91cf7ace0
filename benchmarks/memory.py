"""Peak resident memory against the hand-written loop, and growth over many steps (5)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import HERE, table

CHILD = """
import json, sys
import torch
from workload import WORKLOADS, Stopwatch, raw_loop
torch.set_num_threads(1)
who, steps = sys.argv[1], int(sys.argv[2])

def resident(what="VmRSS"):  # getrusage would tell the peak of the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(what + ":"))

class Watched(Stopwatch):
    kib = []
    def __iter__(self):
        for index in range(steps):
            if index % 500 == 0:
                self.kib.append((index, resident()))
            yield self.batches[index % len(self.batches)]
    def __len__(self):
        return steps

workload = WORKLOADS["mlp"]
data = Watched(workload)
if who == "raw":
    raw_loop(workload, data)
else:
    from contenders import hocket as contender
    contender.CASES[who][0](workload, data)
print(json.dumps({"peak_mib": resident("VmHWM") / 1024, "kib": data.kib}))
"""


def run(steps: int) -> dict[str, Any]:
    """Peak MiB, and the slope of resident memory in KiB per 1,000 steps over the second half of a run."""
    rows = [[f"MLP, {steps:,} steps", "peak resident, MiB", "growth, KiB per 1,000 steps"]]
    values = {}
    for case in ("raw", "bare", "every built-in callback, progress + jsonl"):
        environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, case, str(steps)],
            env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        answer = json.loads(done.stdout.splitlines()[-1])
        slope = _slope([point for point in answer["kib"] if point[0] >= steps / 2])
        values[case] = {"peak_mib": answer["peak_mib"], "kib_per_1000": slope}
        rows.append([case if case == "raw" else f"hocket, {case}", f"{answer['peak_mib']:.0f}", f"{slope:+.2f}"])
    return {"values": values, "table": table(rows)}


def _slope(points: list[tuple[int, float]]) -> float:
    """Least squares, per 1,000 steps."""
    count = len(points)
    x, y = sum(p[0] for p in points) / count, sum(p[1] for p in points) / count
    return 1000 * sum((p[0] - x) * (p[1] - y) for p in points) / sum((p[0] - x) ** 2 for p in points)


if __name__ == "__main__":
    print(run(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)["table"], file=sys.stdout)
    assert Path(__file__).exists()

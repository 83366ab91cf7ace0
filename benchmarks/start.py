"""What it takes until the first step, and to list plug-ins (3)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Series, table

IMPORT = """
import json, sys, time
import torch
def resident():  # getrusage would tell the peak of the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))
before, modules = resident(), len(sys.modules)
start = time.perf_counter()
import hocket
hocket.Trainer, hocket.Algorithm, hocket.Callback
print(json.dumps({"ms": (time.perf_counter() - start) * 1e3, "modules": len(sys.modules) - modules,
                  "mib": (resident() - before) / 1024}))
"""
#: The same as the one below: torch's first use of an optimizer alone takes about a second.
TORCH = """
import torch
x, y = torch.randn(3, 4), torch.randn(3, 2)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.functional.mse_loss(model(x), y).backward()
optimizer.step()
optimizer.zero_grad()
"""
FIRST_STEP = """
import torch, hocket
x, y = torch.randn(3, 4), torch.randn(3, 2)
hocket.Trainer(model=torch.nn.Linear(4, 2), loss=torch.nn.functional.mse_loss, train_data=[(x, y)], device="cpu",
               optimizer=lambda p: torch.optim.SGD(p, lr=0.1), duration="1ba", run_name="start").fit()
"""
LIST = "from hocket_cli import main; main(['plugins', 'list'])"


def run(repeats: int) -> dict[str, Any]:
    """Milliseconds, modules and mebibytes."""
    imported = [json.loads(_python("-c", IMPORT)[1]) for _ in range(repeats)]
    firsts = [(_python("-c", TORCH)[0], _python("-c", FIRST_STEP)[0]) for _ in range(repeats)]
    series = {
        "import hocket and its Trainer, beyond torch, ms": Series([each["ms"] for each in imported]),
        "modules loaded beyond torch": Series([each["modules"] for each in imported]),
        "resident memory beyond torch, MiB": Series([each["mib"] for each in imported]),
        "process start to the end of a first step, hand-written, ms": Series([raw for raw, _ in firsts]),
        "process start to the end of a first step, hocket, ms": Series([own for _, own in firsts]),
        "what hocket adds to it, ms": Series([own - raw for raw, own in firsts]),
    }
    for installed in (0, 200, 700):
        with tempfile.TemporaryDirectory() as folder:
            _distributions(Path(folder), installed)
            name = f"hocket plugins list, {installed} further distributions, ms"
            series[name] = Series([_python("-c", LIST, path=folder)[0] for _ in range(repeats)])
    rows = [["", ""]] + [[name, str(values)] for name, values in series.items()]
    return {"values": {name: each.values for name, each in series.items()}, "table": table(rows)}


def _python(*arguments: str, path: str = "") -> tuple[float, str]:
    """Milliseconds from start to end, and what was printed."""
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)
    return (time.perf_counter() - start) * 1e3, done.stdout


def _distributions(folder: Path, number: int) -> None:
    """Installed distributions as metadata only; every tenth has entry points, as in real environments."""
    for index in range(number):
        info = folder / f"synthetic_{index}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: synthetic-{index}\nVersion: 1.0\n")
        if index % 10 == 0:
            (info / "entry_points.txt").write_text(f"[console_scripts]\ns{index} = s{index}:main\n")

"""One contender in a process of its own: ``python worker.py NAME``. Reads a question per line, answers with a line of JSON.

``{"workload": "mlp", "case": "bare"}`` is answered with seconds per step of the hand-written loop and of the contender,
measured one right after the other, or in blocks in turn with ``"in_turn": true``. ``{}`` is answered with the cases there are
and the versions.
``{"function": "colout", "batch": 256, "side": 224}`` is answered with the seconds of one call of a functional form.
``"device"`` and ``"precision"`` replace those of the workload.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from workload import WORKLOADS, InTurn, Stopwatch, raw_loop


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    warnings.simplefilter("ignore")
    # Frameworks print to stdout; answers go to where it was.
    answers, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    contender = importlib.import_module(f"contenders.{sys.argv[1]}")
    for line in sys.stdin:
        question = json.loads(line)
        if not question:
            versions = {name: importlib.metadata.version(name) for name in ("torch", *contender.DISTRIBUTIONS)}
            answer = {"cases": list(contender.CASES), "versions": versions}
        elif "function" in question:
            answer = {"seconds": _seconds(contender, question["function"], question["batch"], question["side"])}
        else:
            where = {name: question[name] for name in ("device", "precision") if name in question}
            workload = replace(WORKLOADS[question["workload"]], **where)
            run, microbatches = contender.CASES[question["case"]]
            if question.get("in_turn"):
                both = InTurn(workload)
                run(workload, both)
                answer = {"raw": both.raw_seconds_per_step, "own": both.seconds_per_step}
            else:
                raw, own = Stopwatch(workload), Stopwatch(workload)
                raw_loop(workload, raw, microbatches)
                run(workload, own)
                answer = {"raw": raw.seconds_per_step, "own": own.seconds_per_step}
        print(json.dumps(answer), file=answers, flush=True)


def _seconds(contender: Any, function: str, batch: int, side: int) -> float:
    call = _warm(contender, function, batch, side)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@lru_cache(maxsize=1)
def _warm(contender: Any, function: str, batch: int, side: int) -> Any:
    call = contender.CASES[function](batch, side)
    call()
    return call


if __name__ == "__main__":
    main()

"""What only a GPU can say about hocket, in one command of at most 35 minutes.

It runs part by part, each in a process of its own with a time limit, and saves each row of each part in a results file at once:
begun again, it skips the parts that are done. A part that fails, or whose time is over, is recorded with its rows and its
traceback, and the rest goes on. At the end, and with ``--show`` alone, it prints Markdown for docs/explanation/benchmarks.md:
machine, versions, tables. Its exit code is 0 if all parts are done. In the root of the repository::

    uv venv gpu-env --python 3.11
    uv pip install --python gpu-env/bin/python -r benchmarks/gpu-requirements.txt
    gpu-env/bin/python benchmarks/gpu.py --toy
    gpu-env/bin/python benchmarks/gpu.py

With ``--toy`` it tries everything on small models in a few steps, also where there is no GPU. For a machine without a network,
make the environment elsewhere, on a machine with the same Python, and copy it there with the repository.

hocket itself is found by path: by default in this repository's packages/, else where ``--packages`` says; the names of its
plug-ins are read from the pyproject files. ``--list`` names the parts, ``--only precisions gpt2`` runs some of them again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from harness import HERE, Series, Worker, machine, table


class Rows(list[list[str]]):
    """The rows of a table, saved as they come, so that those of a part that is stopped are not lost."""

    #: The file of the part that runs in this process.
    saved_in: ClassVar[Path | None] = None

    def append(self, row: list[str]) -> None:
        super().append(row)
        if self.saved_in is not None:
            _write(self.saved_in, {"status": "died", "rows": self})


class PartFailed(Exception):
    """A part measured or tested something that failed; its rows say what."""


MINUTE = 60.0
#: Of all parts together.
TOTAL = 35 * MINUTE
DISTRIBUTIONS = ("torch", "lightning", "accelerate", "transformers", "timm")


# --- the parts: each returns a table, its first row the head


def _train(options: dict[str, Any], device: str, toy: bool, steps: int = 30) -> tuple[float, float]:
    """Milliseconds per step of a GPT (4 layers of 512, 16 × 256 tokens), and the peak of memory in GiB; NaN on a CPU."""
    import torch
    import workload

    import hocket

    torch.manual_seed(0)
    size, batch = ((1, 16, 2, 64, 8), (2, 8)) if toy else ((4, 512, 8, 4096, 256), (16, 256))
    kept = [(torch.randint(size[3], batch), torch.randint(size[3], batch)) for _ in range(4)]
    kept = [tuple(each.pin_memory() for each in pair) for pair in kept] if device == "cuda" else kept
    times: list[float] = []

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    class Clock(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            if state.timestamp.batch % 10 == 0 or toy:
                wait()
                times.append(time.perf_counter() / (1 if toy else 10))

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer = hocket.Trainer(
            model=workload.GPT(*size), loss=workload.next_token_loss, train_data=kept * steps, folder=folder, device=device,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4), duration=f"{4 if toy else 10 * steps}ba",
            callbacks=[Clock()], log_every="1000ba", **options,
        )  # fmt: skip
        with trainer:
            trainer.fit()
    steps_ms = [(b - a) * 1e3 for a, b in pairwise(times[1:])]
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
    return statistics.median(steps_ms), memory


def precisions(device: str, toy: bool) -> Rows:
    """Every precision: time and memory of a step."""
    rows = Rows([["4-layer GPT of 512, 16 × 256 tokens, AdamW", "ms per step", "peak memory, GiB"]])
    names = ["fp32", "tf32", "bf16", "fp16", "bf16-true"]
    if importlib.util.find_spec("torchao") and device == "cuda":
        names.append("fp8")
    for name in names:
        milliseconds, memory = _train({"precision": name}, device, toy)
        rows.append([name, f"{milliseconds:.2f}", f"{memory:.2f}"])
    return rows


def compiled(device: str, toy: bool) -> Rows:
    """`compile=`: eager, compiled, and with CUDA graphs."""
    rows = Rows([["the same GPT in bf16", "ms per step", "peak memory, GiB"]])
    modes: dict[str, Any] = {"eager": False, "compile=True": {"backend": "eager"} if toy else True}
    if device == "cuda":
        modes["compile={'mode': 'reduce-overhead'}"] = {"mode": "reduce-overhead"}
    for name, how in modes.items():
        milliseconds, memory = _train({"precision": "bf16", "compile": how}, device, toy)
        rows.append([name, f"{milliseconds:.2f}", f"{memory:.2f}"])
    return rows


def fsdp(device: str, toy: bool) -> Rows:
    """Strategies on one device: what they cost where they gain nothing."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(variables, MASTER_PORT="29533")
    rows = Rows([["the same GPT in bf16, one rank", "ms per step", "peak memory, GiB"]])
    for name, strategy in {
        "single": "single", "ddp": "ddp", "fsdp": "fsdp", "fsdp, a unit per layer": {"fsdp": {"wrap": 50 if toy else 10**6}},
    }.items():  # fmt: skip
        milliseconds, memory = _train({"precision": "bf16", "strategy": strategy}, device, toy)
        rows.append([name, f"{milliseconds:.2f}", f"{memory:.2f}"])
    return rows


def auto_microbatch(device: str, toy: bool) -> Rows:
    """`microbatch="auto"` where memory really runs out (on a CPU it is simulated)."""
    import torch
    from torch import nn

    import hocket

    samples, width = (32, 8) if toy else (4096, 1024)
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if device == "cpu" and len(x) > 13:
                raise torch.OutOfMemoryError("simulated")
            hidden = self.layers(x).unsqueeze(1)
            return (hidden if device == "cpu" else hidden.expand(-1, 512, -1).sin().exp()).mean((1, 2), keepdim=True)[
                :, 0
            ]

    data = [(torch.randn(samples, width), torch.randn(samples, 1)) for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = hocket.Trainer(
            model=Wide(), loss=nn.functional.mse_loss, train_data=data, duration="3ba", microbatch="auto", device=device,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-4), folder=folder,
        )  # fmt: skip
        begin = time.perf_counter()
        trainer.fit("1ba")
        first = time.perf_counter() - begin
        trainer.fit()
        found = trainer.state.microbatch
    limit = "4 GiB" if device == "cuda" else "13 samples"
    return Rows(
        [
            ["samples", "limit", "microbatch found", "s, with the search"],
            [str(samples), limit, str(found), f"{first:.2f}"],
        ]
    )


def no_waiting(device: str, toy: bool) -> Rows:
    """Synchronisations on the step path, by torch's own detector (on a CPU by hocket's)."""
    import warnings

    import torch
    from torch import nn

    import hocket
    from hocket_testkit import no_sync

    rows = Rows([["Trainer(…)", "waits in 20 batches"]])
    cases: dict[str, dict[str, Any]] = {
        "": {}, "microbatch=16": {"microbatch": 16}, "clip_gradients=1.0": {"clip_gradients": 1.0},
        "precision='bf16'": {"precision": "bf16"}, "precision='fp16' (has to wait once)": {"precision": "fp16"},
        "algorithms=['ema']": {"algorithms": ["ema"]}, "algorithms=['sam']": {"algorithms": ["sam"]},
    }  # fmt: skip

    class Ahead(hocket.Device):
        def available(self) -> bool:
            return True

        def torch_device(self, local_rank: int) -> torch.device:
            return torch.device(device)

    for name, options in cases.items():
        waits = 0

        class Watch(hocket.Callback):
            def batch_start(self, state: hocket.State) -> None:
                if state.timestamp.batch >= 3 and device == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")

            def batch_end(self, state: hocket.State) -> None:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")

            exception = batch_end

            @hocket.hookimpl(wrapper=True)
            def forward(self, state: hocket.State, batch: Any) -> Any:
                if device == "cuda":
                    return (yield)
                with no_sync(simulate=True):
                    return (yield)

        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1))
        data = [(torch.randn(64, 64), torch.randn(64, 1)) for _ in range(23)]
        data = [(x.pin_memory(), y.pin_memory()) for x, y in data] if device == "cuda" else data
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            hocket.Trainer(
                model=model, loss=nn.functional.mse_loss, train_data=data, duration="1ep", log_every="100ba", folder=folder,
                optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3), callbacks=[Watch()],
                device="cuda" if device == "cuda" else Ahead(), **options,
            ).fit()  # fmt: skip
            waits = sum("called a synchronizing CUDA operation" in str(each.message) for each in said)
        rows.append([name or "no options", str(waits)])
    return rows


def copies(device: str, toy: bool) -> Rows:
    """Batches from pinned and from pageable memory, in a model that is all copying."""
    import torch
    from torch import nn

    import hocket

    rows = Rows([["batches of 64 MiB", "ms per step"]])
    elements = 2**8 if toy else 2**18
    for name in ("pageable", *(["pinned"] if device == "cuda" else [])):
        times: list[float] = []

        class Clock(hocket.Callback):
            def batch_end(self, state: hocket.State) -> None:
                if state.timestamp.batch % 5 == 0:
                    if device == "cuda":
                        torch.cuda.synchronize()
                    times.append(time.perf_counter() / 5)  # noqa: B023

        x, y = torch.randn(64, elements), torch.randn(64, 1)
        batch = (x.pin_memory(), y.pin_memory()) if name == "pinned" else (x, y)
        with tempfile.TemporaryDirectory() as folder:
            hocket.Trainer(
                model=nn.Linear(elements, 1), loss=nn.functional.mse_loss, train_data=[batch] * 40, duration="1ep",
                optimizer="sgd(lr=0.0)", device=device, callbacks=[Clock()], folder=folder, log_every="100ba",
            ).fit()  # fmt: skip
        rows.append([name, f"{statistics.median((b - a) * 1e3 for a, b in pairwise(times)):.2f}"])
    return rows


def _against(workload: str, device: str, toy: bool) -> Rows:
    """A workload in bf16 as a multiple of the hand-written loop, by contender; missing libraries are listed as skipped."""
    rows = Rows([[f"{workload}, bf16", "÷ hand-written", "hand-written step, ms"]])
    failed = []
    only = ("bare", "progress + jsonl", "Lightning, barebones", "Fabric", "Accelerate", "transformers Trainer, barest")
    for name in ("hocket", "lightning", "accelerate", "transformers"):
        needed = (name, "accelerate") if name == "transformers" else (name,)
        if not all(map(importlib.util.find_spec, needed)):
            rows.append([name, "skipped: not installed", ""])
            continue
        worker = None
        try:
            worker = Worker(sys.executable, name, threads=max(1, (os.cpu_count() or 2) // 2))
            for case in [case for case in worker.cases if case in only]:
                ratio, raw = Series(), Series()
                for repeat in range(2 if toy else 4):
                    found = worker.ask(workload=workload + ", toy" * toy, case=case, device=device, precision="bf16")
                    if repeat:  # the first one warms up
                        ratio.values.append(found["own"] / found["raw"])
                        raw.values.append(found["raw"] * 1e3)
                rows.append([f"{name}, {case}" if name == "hocket" else case, str(ratio), str(raw)])
        except RuntimeError as error:
            rows.append([name, f"failed: {error}", ""])
            failed.append(name)
        finally:
            if worker is not None:
                worker.close()
    if failed:
        raise PartFailed(f"{', '.join(failed)} failed")
    return rows


def resnet50(device: str, toy: bool) -> Rows:
    """ResNet-50 on 64 images of 224 × 224."""
    return _against("resnet50", device, toy)


def gpt2(device: str, toy: bool) -> Rows:
    """GPT-2 of 124 million parameters on 8 × 1024 tokens."""
    return _against("gpt2", device, toy)


def tests(device: str, toy: bool) -> Rows:
    """The tests marked `gpu`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        str(HERE.parent / "tests/gpu"),
    ]
    command += ["-k", "learns and fp32"] if toy else []
    done = subprocess.run(
        command, env={**os.environ, "HOCKET_GPU_TESTS": device}, capture_output=True, text=True, cwd=HERE.parent
    )
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
    rows = Rows([["tests marked `gpu`"]])
    for line in [lines[-1], *(line for line in lines if line.startswith(("FAILED", "ERROR")))]:
        rows.append([line])
    if done.returncode or "passed" not in lines[-1]:  # all may have been skipped
        raise PartFailed(
            f"pytest ended with exit code {done.returncode}: {lines[-1]}\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
        )
    return rows


#: By name, the most important first, with the seconds that each may take.
PARTS: dict[str, tuple[Callable[[str, bool], Rows], float]] = {
    "tests": (tests, 8 * MINUTE),
    "no-waiting": (no_waiting, 2 * MINUTE),
    "precisions": (precisions, 3 * MINUTE),
    "auto-microbatch": (auto_microbatch, 2 * MINUTE),
    "fsdp": (fsdp, 3 * MINUTE),
    "copies": (copies, 1 * MINUTE),
    "resnet50": (resnet50, 5 * MINUTE),
    "gpt2": (gpt2, 6 * MINUTE),
    "compile": (compiled, 5 * MINUTE),
}


# --- running them


def main() -> int:
    """The exit code: 1 if a part failed."""
    arguments = _arguments()
    if arguments.list:
        print("\n".join(f"{name:16} ≤ {limit:4.0f} s  {part.__doc__}" for name, (part, limit) in PARTS.items()))
        return 0
    if arguments.part:
        return _run_here(arguments)
    if arguments.device is None:
        arguments.device = _device(arguments)
    if arguments.results is None:
        arguments.results = HERE / "results" / ("gpu-toy.json" if arguments.toy else "gpu.json")
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {"parts": {}}
    if not arguments.show:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"PYTHONPATH": import_path(arguments.packages, Path(folder))}
            _run_all(arguments, results, environment)
    print(markdown(results))
    return int(any(part["status"] != "done" for part in results["parts"].values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="say which parts there are, and do nothing")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="run these, whether they are done or not")
    parser.add_argument("--show", action="store_true", help="print what there is, and run nothing")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda; with --toy cpu where torch sees no GPU"
    )
    parser.add_argument("--toy", action="store_true", help="small models and few steps, to try this file")
    parser.add_argument(
        "--results", type=Path, help="default: results/gpu.json beside this file, with --toy gpu-toy.json"
    )
    parser.add_argument("--packages", type=Path, default=HERE.parent / "packages", help="where hocket's sources are")
    parser.add_argument("--total", type=float, default=TOTAL, help="seconds for all parts of this call together")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _device(arguments: argparse.Namespace) -> str:
    code = "import torch; print(torch.cuda.is_available())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"torch cannot be imported:\n{found.stderr}Install what benchmarks/gpu-requirements.txt lists.")
    if "True" in found.stdout or arguments.show:
        return "cuda"
    if arguments.toy:
        return "cpu"
    sys.exit("torch sees no GPU here. Write --toy to try the parts on the CPU, or repair the driver (nvidia-smi).")


def _run_all(arguments: argparse.Namespace, results: dict[str, Any], environment: dict[str, str]) -> None:
    end = time.monotonic() + arguments.total
    results["about"] = _about(environment)
    how = {"device": arguments.device, "toy": arguments.toy}
    for name, (_, limit) in PARTS.items():
        before = results["parts"].get(name, {})
        done = before.get("status") == "done" and {key: before.get(key) for key in how} == how
        if name not in arguments.only if arguments.only else done:
            continue
        left = min(limit, end - time.monotonic())
        begin = time.monotonic()
        found = _run_apart(name, arguments, environment, left) if left > 0 else {"status": "out of time"}
        results["parts"][name] = {**found, **how, "seconds": round(time.monotonic() - begin, 1)}
        print(f"{name}: {found['status']}, {results['parts'][name]['seconds']} s", file=sys.stderr, flush=True)
        _write(arguments.results, results)


def _run_apart(name: str, arguments: argparse.Namespace, environment: dict[str, str], limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--part",
            name,
            "--device",
            arguments.device,
            "--out",
            str(out),
        ]
        command += ["--toy"] if arguments.toy else []
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=limit)
            stopped = False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with its workers
            said, _ = process.communicate()
            stopped = True
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"status": "died"}
        if stopped:
            found["status"] = f"stopped after {limit:.0f} s"
        elif process.returncode and found["status"] in ("done", "died"):  # as in the destructors of CUDA
            found["status"] = f"died with exit code {process.returncode}"
        elif found["status"] == "died":
            found["status"] = "died without an exit code"
        return found if found["status"] == "done" else {"traceback": said[-3000:], **found}


def _run_here(arguments: argparse.Namespace) -> int:
    Rows.saved_in = arguments.out
    try:
        found: dict[str, Any] = {"status": "done", "rows": PARTS[arguments.part][0](arguments.device, arguments.toy)}
    except Exception as error:
        found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        about = {"status": f"failed: {type(error).__name__}: {error}"[:300], "traceback": traceback.format_exc()}
        found |= about
    _write(arguments.out, found)
    return int(found["status"] != "done")


def _write(file: Path, content: Any) -> None:
    """Replace a file completely or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.new")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(file)


def import_path(packages: Path, folder: Path) -> str:
    """A PYTHONPATH with the sources of all packages, and in ``folder`` the metadata that an installation would have."""
    version = (packages / "VERSION.py").read_text().split('__version__ = "')[1].split('"')[0]
    sources = []
    for project in sorted(packages.glob("*/pyproject.toml")):
        about = tomllib.loads(project.read_text())["project"]
        info = folder / f"{about['name'].replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {version}\n")
        groups = about.get("entry-points", {})
        lines = [
            line for group, own in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in own.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        sources.append(str(project.parent / "src"))
    return os.pathsep.join([str(folder), *sources, str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def _about(environment: dict[str, str]) -> dict[str, str]:
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
    gpu = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout.strip()
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"gpu": gpu, **machine(), **versions, "date": time.strftime("%Y-%m-%d")}


def markdown(results: dict[str, Any]) -> str:
    """For docs/explanation/benchmarks.md."""
    about = results.get("about", {})
    lines = [", ".join(f"{name} {value}" for name, value in about.items())]
    for name, part in results["parts"].items():
        lines += ["", f"### {name}", ""]
        lines += [part["status"], ""] if part["status"] != "done" else []
        lines += [table(part["rows"])] if "rows" in part else []
        if part.get("traceback"):
            lines += ["", "```", part["traceback"].strip().splitlines()[-1], "```"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

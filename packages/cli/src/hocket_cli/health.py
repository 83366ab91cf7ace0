"""``hocket doctor``: check this machine and installation, and say what to type."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from hocket.help import installing
from hocket.hookspecs.command import Command

#: Seconds for the import of one plug-in, and for two processes to find each other.
_IMPORT, _RENDEZVOUS = 30.0, 30.0
_GB = 1e9


class Finding(NamedTuple):
    """One line."""

    subject: str
    status: Literal["ok", "WARNING", "PROBLEM"]
    text: str
    #: What to do; empty if it is ok.
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder of runs, and the form of the output."""
    parser.add_argument("--folder", default="runs", help="the folder of runs, whose disk is checked (default runs)")
    parser.add_argument("--json", action="store_true", help="print a list of findings instead")


def run(args: argparse.Namespace) -> int:
    """Print each finding when it is there, and return 1 if there are problems."""
    findings = []
    for check in CHECKS:
        if not args.json and sys.stderr.isatty():
            print(f"{check.__name__.strip('_')} …", end="", file=sys.stderr, flush=True)
        for finding in _found(check, args):
            findings.append(finding)
            if not args.json:
                _print(finding)
    if args.json:
        print(json.dumps([each._asdict() for each in findings], indent=1))
    problems = sum(each.status == "PROBLEM" for each in findings)
    if not args.json:
        warned = sum(each.status == "WARNING" for each in findings)
        print(f"{problems} problems, {warned} warnings")
    return int(problems > 0)


def _found(check: Callable[[argparse.Namespace], Iterator[Finding]], args: argparse.Namespace) -> Iterator[Finding]:
    try:
        yield from check(args)
    except Exception as error:  # one check that cannot be made should not hide the others
        subject = check.__name__.strip("_")
        yield Finding(subject, "WARNING", f"cannot be checked: {type(error).__name__}: {error}", "report this as a bug")


def _print(finding: Finding) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(f"{finding.status:<8} {finding.subject:<13} {finding.text}", flush=True)
    if finding.remedy:
        print(f"{'':<22} {finding.remedy}", flush=True)


# --- checks


def _python(args: argparse.Namespace) -> Iterator[Finding]:
    yield Finding(
        "python", "ok", f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    )


def _torch(args: argparse.Namespace) -> Iterator[Finding]:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU only"
    threads, processors = (
        torch.get_num_threads(),
        len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
    )
    text = f"{torch.__version__} ({build}), {threads} threads on {processors} processors"
    if threads > processors:
        yield Finding(
            "torch",
            "WARNING",
            text,
            f"more threads than processors slow each other: export OMP_NUM_THREADS={processors}",
        )
    else:
        yield Finding("torch", "ok", text)


def _devices(args: argparse.Namespace) -> Iterator[Finding]:
    import torch

    from hocket.plugins import registry

    for name in registry.names("devices"):
        device = registry.get("devices", name)()
        if name != "cpu" and device.available():
            yield Finding("device", "ok", f"{name}: {_described(name)}")
    if torch.cuda.device_count() == 0 and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
        if listed.returncode == 0 and "GPU" in listed.stdout:
            why = (
                "its build is for CPUs"
                if torch.version.cuda is None
                else "the driver is older than its CUDA, or hides them"
            )
            remedy = "install torch for CUDA as pytorch.org/get-started says, or a newer driver; see also CUDA_VISIBLE_DEVICES"
            yield Finding("device", "PROBLEM", f"nvidia-smi lists GPUs that torch does not see: {why}", remedy)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    memory = min(memory, int(text)) if text.isdecimal() else memory
    yield Finding("device", "ok", f"cpu: {platform.processor() or platform.machine()}, {memory / _GB:.1f} GB of memory")


def _described(name: str) -> str:
    import torch

    if name != "cuda":
        return "available"
    cards = [torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count())]
    return ", ".join(f"{each.name} ({each.total_memory / _GB:.0f} GB)" for each in cards)


#: Two processes on the loopback interface that sum a tensor.
_GLOO = """
import atexit, datetime, os, socket, sys, torch
import torch.distributed as dist
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
rank, ranks = 0, 2 if hasattr(os, "fork") else 1
child = os.fork() if ranks == 2 else None
rank = 1 if child == 0 else 0
if child:  # so that it does not keep the pipes open if this rank fails
    atexit.register(lambda: os.kill(child, 9))
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
    timeout=datetime.timedelta(seconds=float(sys.argv[1])))
total = torch.ones(4) * (rank + 1)
dist.all_reduce(total)
assert total.tolist() == [ranks * (ranks + 1) / 2] * 4, total
dist.barrier()
dist.destroy_process_group()
if child == 0:
    os._exit(0)
if child:
    code = os.waitpid(child, 0)[1]
    atexit._clear()
    assert code == 0, "the other rank failed"
print("ranks", ranks)
"""


def _backends(args: argparse.Namespace) -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding(
            "backend", "WARNING", "torch has no torch.distributed", "install another build to train on several ranks"
        )
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", _GLOO, str(_RENDEZVOUS)],
            capture_output=True,
            text=True,
            timeout=2 * _RENDEZVOUS,
            check=False,
        )
        failed = (
            "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        )
    except subprocess.TimeoutExpired:
        text = f"gloo: two processes did not sum a tensor within {2 * _RENDEZVOUS:g} s"
        yield Finding("backend", "WARNING", text, "type hocket doctor again when the machine is less busy")
        return
    if failed:
        remedy = (
            "check that the loopback interface is up (ip addr show lo) and GLOO_SOCKET_IFNAME, if it is set, exists"
        )
        yield Finding(
            "backend", "PROBLEM", f"gloo: two processes cannot reach each other on 127.0.0.1: {failed}", remedy
        )
    else:
        yield Finding("backend", "ok", "gloo: two processes summed a tensor over 127.0.0.1")
    if torch.cuda.device_count():
        if dist.is_nccl_available():
            yield Finding("backend", "ok", f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}")
        else:
            yield Finding(
                "backend", "PROBLEM", "there are GPUs, and torch has no nccl", "install torch for CUDA on Linux"
            )


def _disk(args: argparse.Namespace) -> Iterator[Finding]:
    folder = Path(args.folder).absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        remedy = "write folder=… in another place, or change the permissions"
        yield Finding(
            "disk", "PROBLEM", f"{existing} cannot be written to, so runs cannot be stored in {folder}", remedy
        )
        return
    free = shutil.disk_usage(existing).free
    size = min(64 << 20, free // 4)
    chunk = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=existing) as file:
        began = time.perf_counter()
        for _ in range(size >> 20):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        speed = size / max(time.perf_counter() - began, 1e-6)
    text = f"{existing}: {free / _GB:.1f} GB free, writes {speed / 1e6:.0f} MB/s"
    if free < 2e8:
        yield Finding("disk", "PROBLEM", text, "free some space, or write folder=… and checkpoints=… on another disk")
    elif free < 5 * _GB:
        yield Finding("disk", "WARNING", text, "checkpoints may fill it: keep fewer, or write folder=… on another disk")
    elif speed < 30e6:
        yield Finding(
            "disk",
            "WARNING",
            text,
            "checkpoints are slow there: write asynchronous: true in checkpoints, or another folder",
        )
    else:
        yield Finding("disk", "ok", text)


def _shared_memory(args: argparse.Namespace) -> Iterator[Finding]:
    place = Path("/dev/shm")
    if not place.is_dir():
        yield Finding("shared memory", "ok", "no /dev/shm on this system")
        return
    usage = shutil.disk_usage(place)
    text = f"/dev/shm: {usage.free / _GB:.1f} of {usage.total / _GB:.1f} GB free"
    if not os.access(place, os.W_OK) or usage.free < 5e7:
        yield Finding(
            "shared memory", "PROBLEM", text, f"data-loader workers pass batches through it: {_SHM}, or num_workers=0"
        )
    elif usage.total < 0.9 * _GB:
        yield Finding("shared memory", "WARNING", text, f"data-loader workers may die with a bus error: {_SHM}")
    else:
        yield Finding("shared memory", "ok", text)


_SHM = "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm"


def _limits(args: argparse.Namespace) -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        remedy = f"workers and ranks open many: ulimit -n {4096 if hard in (-1, resource.RLIM_INFINITY) else min(hard, 4096)}"
        yield Finding("limits", "WARNING", f"{soft} open files (at most {said})", remedy)
    else:
        yield Finding("limits", "ok", f"{soft} open files (at most {said})")
    import torch

    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited locked memory" if locked == resource.RLIM_INFINITY else f"{locked / 1e6:.0f} MB of locked memory"
    if torch.cuda.device_count() > 1 and locked != resource.RLIM_INFINITY and locked < 64 << 20:
        yield Finding(
            "limits",
            "WARNING",
            text,
            "nccl over InfiniBand needs more: ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )
    else:
        yield Finding("limits", "ok", text)


def _versions(args: argparse.Namespace) -> Iterator[Finding]:
    """Compare installed libraries with the lower bounds of hocket and its plug-in packages, extras included."""
    older, compared = [], 0
    ours = [
        each for each in importlib.metadata.distributions() if re.match(r"hocket($|[-_])", each.metadata["Name"] or "")
    ]
    for dist in ours:
        for requirement in dist.requires or ():
            found = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*\(?[^;]*?>=\s*([\d.]+)", requirement)
            if found is None:
                continue
            name, bound = found[1], found[2]
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                if "extra ==" not in requirement:
                    older.append((name, "not installed", bound, dist.metadata["Name"]))
                continue
            compared += 1
            if _numbers(version) < _numbers(bound):
                older.append((name, version, bound, dist.metadata["Name"]))
    for name, version, bound, by in dict.fromkeys(older):
        text = f"{name} is {version}, and {by} is tested from {bound} on"
        yield Finding("versions", "PROBLEM", text, installing.library(name, f">={bound}"))
    if not older:
        yield Finding("versions", "ok", f"{compared} requirements of {len(ours)} packages are met")


def _numbers(version: str) -> list[int]:
    numbers = [int(each) for each in re.findall(r"\d+", version.partition("+")[0])][:3]
    return numbers + [0] * (3 - len(numbers))


def _plugins(args: argparse.Namespace) -> Iterator[Finding]:
    from hocket_cli.plugin_doctor import examine

    report = examine(timeout=_IMPORT)
    for line in report:
        for problem in line["problems"]:
            name = f"{line['kind']}/{line['name']} ({line['distribution']} {line['version']})"
            yield Finding("plug-ins", "PROBLEM", f"{name} {problem}", "")
    fine = [line for line in report if not line["problems"]]
    distributions = len({line["distribution"] for line in fine})
    yield Finding(
        "plug-ins", "ok", f"{len(fine)} of {distributions} distributions; hocket plugins doctor has the times of each"
    )


CHECKS = (_python, _torch, _devices, _versions, _limits, _shared_memory, _disk, _backends, _plugins)

command = Command("Check this machine: torch, devices, backends, plug-ins, disk", add_arguments, run)

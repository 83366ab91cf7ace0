"""What is in memory, open or running: tensors, the values that an object holds, files, threads and processes."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import threading
import time
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hocket_testkit.shared_state import foreign


def tensors() -> list[Tensor]:
    """Return all tensors that garbage collection sees."""
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def tensors_of_run(state: Any, plugin: Any) -> set[int]:
    """Return the ids of the tensors that a run holds by itself, if the plug-in keeps its state: both end together."""
    waiting, visited, found = [state], {id(plugin), id(vars(plugin)) if hasattr(plugin, "__dict__") else 0}, set()
    while waiting:
        each = waiting.pop()
        if id(each) in visited or isinstance(each, type | ModuleType):
            continue
        visited.add(id(each))
        if isinstance(each, Tensor):
            found |= {id(each), id(each._base)}
        waiting += (each.__closure__ or ()) if inspect.isfunction(each) else gc.get_referents(each)
    return found


def leaves(nested: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [each for each in torch.utils._pytree.tree_leaves(nested) if isinstance(each, Tensor)]


def size(obj: Any, visited: set[int] | None = None) -> int:
    """Return the number of values that an object holds: items of containers and elements of tensors, without core's own.

    A deque with ``maxlen`` counts as if it were full of its largest item. Objects whose ids are in ``visited`` count nothing.
    """
    total, waiting = 0, [obj]
    visited = set() if visited is None else visited
    while waiting:
        each = waiting.pop()
        if id(each) in visited or len(visited) > 200_000:
            continue
        visited.add(id(each))
        if isinstance(each, Tensor):
            total += each.numel()
        elif isinstance(each, deque) and each.maxlen is not None:
            total += each.maxlen * (1 + max((size(item, visited) for item in each), default=0))
        elif isinstance(each, dict | list | tuple | set | frozenset | deque):
            total += len(each)
            waiting += [*each.values()] if isinstance(each, dict) else [*each]
        elif inspect.isfunction(each):
            waiting += [cell.cell_contents for cell in each.__closure__ or () if not _is_empty(cell)]
        elif inspect.ismethod(each):
            waiting += [each.__func__, each.__self__]
        elif hasattr(each, "__dict__") and not isinstance(each, type | nn.Module) and not foreign(type(each)):
            waiting.append(vars(each))
    return total


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


# --- what is open or running


def open_files() -> dict[str, str]:
    """Return the files, pipes and sockets that are open, by descriptor; empty where the system does not list them."""
    folder = "/proc/self/fd"
    found = {}
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile, such as that of the listing
                found[number] = os.readlink(f"{folder}/{number}")
    return found


#: In the command of processes that Python and torch start once, and end with this one.
_SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "torch/_inductor")


def children() -> dict[int, str]:
    """Return the commands of the running processes that this one started; empty where the system does not list them."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if int(parent) == os.getpid() and state != "Z" and not any(each in command for each in _SERVERS):
                found[int(folder.name)] = command
    return found


class Resources:
    """What was open or running before a run."""

    def __init__(self, started: dict[int, str]) -> None:
        self._files, self._threads, self._started = open_files(), set(threading.enumerate()), started

    def left(self) -> list[str]:
        """Return what is open or running now and was not before; processes that were told to end have two seconds for it."""
        files = [path for number, path in open_files().items() if self._files.get(number) != path]
        until = time.monotonic() + 2
        while (left := children().keys() - self._started.keys()) and time.monotonic() < until:
            time.sleep(0.02)
        return [
            *(f"the file {path}" for path in files if os.path.isabs(path)),  # some sockets and pipes are torch's own
            *(f"the thread {each.name}" for each in set(threading.enumerate()) - self._threads),
            *(f"the process {each} ({children().get(each, '')[:80]})" for each in left),
        ]

"""Import a module in a separate process, to see what it imports and changes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

from hocket.errors import WrongState


class Imported(NamedTuple):
    """The effects of an import."""

    #: Top-level packages that were not imported before.
    packages: frozenset[str]
    #: Changed entries of the footprint; see `hocket_testkit.footprint`.
    changed: list[str]
    #: Why it could not be imported, or empty.
    error: str = ""


@functools.cache
def import_in_fresh_process(module: str, first: tuple[str, ...] = (), timeout: float = 120.0) -> Imported:
    """Import ``module`` where only torch and the packages named in ``first`` are imported already.

    The process sees this one's ``sys.path``. Raises RuntimeError if it dies or does not end in time (seconds).
    """
    # A server imports torch once and is forked for each module; without forks each process imports torch again. The server's
    # socket is a temporary file, and the system limits its path to about a hundred bytes.
    served = "forkserver" in multiprocessing.get_all_start_methods() and len(tempfile.gettempdir()) < 64
    context: Any = multiprocessing.get_context("forkserver" if served else "spawn")
    if served:
        context.set_forkserver_preload(["torch", "hocket_testkit.footprint"])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sending, module, first))
    process.start()
    sending.close()
    try:
        if not receiving.poll(timeout):
            raise WrongState(f"Importing {module} did not end within {timeout:g} s.")
        answer: Imported = receiving.recv()
        return answer
    except EOFError:
        process.join()
        raise WrongState(f"Importing {module} ended the process, with exit code {process.exitcode}.") from None
    finally:
        process.kill()
        process.join()
        receiving.close()


def _child(pipe: Any, module: str, first: Sequence[str]) -> None:
    from hocket_testkit.footprint import changed, footprint

    for name in first:
        with contextlib.suppress(ImportError):  # allowed packages need not be installed
            importlib.import_module(name)
    before, there = footprint(), set(sys.modules)
    error = ""
    try:
        importlib.import_module(module)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    packages = frozenset(name.partition(".")[0] for name in set(sys.modules) - there)
    pipe.send(Imported(packages, changed(before, footprint()), error))

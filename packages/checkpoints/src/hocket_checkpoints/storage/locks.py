"""Locks that let one run at a time write to a store, and that a process loses however it ends."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from hocket.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None  # type: ignore[assignment]

#: The lock's file or object in a store.
NAME = ".lock"
#: Seconds that the lock of a store behind a URL outlives a process that was killed on another machine.
LEASE = 60.0
#: Seconds within which a fork, such as a data worker, releases the lock that its parent held.
FORK = 10.0


class InUse(CheckpointError):
    """Another run is writing to the store."""


class Lock(Protocol):
    """A lock, held from its creation."""

    def check(self) -> None:
        """Raise InUse if it was lost."""

    def release(self) -> None:
        """Release it. Does nothing in a fork, because the parent owns the lock."""


#: What gives a run another folder.
_WRITE = "give this one another folder: «checkpoints=hocket.Checkpoints('…')¦checkpoints=…»"


def _in_use(where: str, holder: Mapping[str, Any], write: str = _WRITE) -> InUse:
    who = f"run {holder['run']!r} (process {holder['pid']} on {holder['host']})" if "run" in holder else "another run"
    return InUse(f"{where} is in use: {who} writes to it. End that one first, or {write}.")


def _holder(run: str) -> dict[str, Any]:
    """Return the description of this process in a lock."""
    machine, pid = _machine(), os.getpid()
    return {"run": run, "host": socket.gethostname(), "pid": pid, "machine": machine, "began": _began(pid)}


# --- folders


class FileLock:
    """An flock, which the kernel releases when the process ends. Its file is removed when it is released.

    Raises InUse, and OSError if the folder cannot be created or does not support locks.

    Args:
        write: what gives the holder another folder, for the message of InUse.
    """

    def __init__(self, folder: Path, run: str, write: str = _WRITE) -> None:
        self._path, self._run, self._write, self._process = folder / NAME, run, write, os.getpid()
        self._file: IO[bytes] | None = None
        self._acquire()

    def _acquire(self) -> None:
        self._made = not self._path.parent.is_dir()
        began = time.monotonic()
        while self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = self._path.open("a+b")
            except FileNotFoundError:  # another process has removed its empty folder
                continue
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = _parse(file.read())
                file.close()
                if _is_alive(holder) is False and time.monotonic() - began < FORK:
                    time.sleep(0.05)  # it was killed, and a process that it had just forked is still starting
                    continue
                raise _in_use(str(self._path.parent), holder, self._write) from None
            except OSError:
                file.close()
                raise
            self._file = file
            if not self._there():  # removed meanwhile by a process that released it
                self._file = None
                file.close()
        _close_in_forks(self._file)
        with suppress(OSError):  # a full disk
            self._file.truncate(0)
            self._file.write(json.dumps(_holder(self._run)).encode())
            self._file.flush()

    def _there(self) -> bool:
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def check(self) -> None:
        """Acquire it again if somebody has removed the file."""
        if not self._there() and self._file is not None:
            self._file.close()
            self._file = None
            self._acquire()

    def release(self) -> None:
        """Remove the file, and the folder if it was made for it and has nothing else."""
        file, self._file = self._file, None
        if file is None or self._process != os.getpid():
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                self._path.unlink()
                if self._made:
                    self._path.parent.rmdir()
        file.close()


_open: weakref.WeakSet[Any] = weakref.WeakSet()
_registered = False


def _close_in_forks(file: IO[bytes]) -> None:
    """Close the file in forks: a data worker that outlives a killed process for a moment would still hold its lock."""
    global _registered
    _open.add(file)
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: [each.close() for each in list(_open)])
        _registered = True


# --- URLs


class Lease:
    """An object that a thread renews. If it is not renewed for ``seconds``, its process counts as dead.

    Renewal is detected by reading twice, so clocks need not agree. A process killed on this machine is detected at once.

    Raises InUse, and the errors of the file system.
    """

    def __init__(self, fs: Any, root: str, where: str, run: str, seconds: float, retry: Callable[..., Any]) -> None:
        self._retry, self._fs, self._path, self._where, self._seconds = retry, fs, f"{root}/{NAME}", where, seconds
        self._process = os.getpid()
        self._content = {**_holder(run), "token": os.urandom(16).hex(), "renewed": 0}
        if root.startswith("/"):  # not a bucket
            fs.makedirs(root, exist_ok=True)
        self._acquire()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="hocket-lock", daemon=True)
        self._thread.start()

    def _acquire(self) -> None:
        seen: bytes | None = None
        since = time.monotonic()
        while not self._create():
            raw = self._read()
            holder = _parse(raw)
            if raw is None or holder.get("token") == self._content["token"]:
                continue
            alive = _is_alive(holder)
            if alive or (seen is not None and raw != seen):
                raise _in_use(self._where, holder)
            if alive is False or time.monotonic() - since > self._seconds:
                if self._read() == raw:  # nobody else has come first
                    self._remove()
                continue
            if seen is None:
                seen, since = raw, time.monotonic()
                said = f"{self._where} is locked by a run that may be gone. Waiting {self._seconds:g} s at most to see."
                print(f"hocket: {said}", file=sys.stderr, flush=True)
            time.sleep(min(1.0, self._seconds / 12))

    def _create(self) -> bool:
        raw = self._encoded()
        try:
            self._fs.pipe_file(self._path, raw, mode="create")
        except Exception:  # it exists; or the file system or server does not support this mode
            if self._read() is not None:
                return False
            self._fs.pipe_file(self._path, raw)
        return self._read() == raw

    def _renew(self) -> None:
        while not self._stop.wait(self._seconds / 6):
            with suppress(Exception):  # the server is unreachable for now; `check` raises when it matters
                if self._is_mine():
                    self._content["renewed"] += 1
                    self._fs.pipe_file(self._path, self._encoded())

    def check(self) -> None:
        """Raise InUse if another run took the lock, having assumed that this process is dead."""
        self._retry("check the lock", self._check)

    def _check(self) -> None:
        raw = self._read()
        if raw is None and self._create():
            return
        if not self._is_mine():
            raise _in_use(self._where, _parse(self._read()))

    def release(self) -> None:
        """Remove the object."""
        if self._process != os.getpid():
            return
        self._stop.set()
        self._thread.join()  # otherwise the thread could write the object again
        with suppress(Exception):  # the lease expires anyway
            if self._is_mine():
                self._remove()

    def _is_mine(self) -> bool:
        return bool(_parse(self._read()).get("token") == self._content["token"])

    def _encoded(self) -> bytes:
        return json.dumps(self._content).encode()

    def _read(self) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(self._path))
        except FileNotFoundError:
            return None

    def _remove(self) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path)


def _parse(raw: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(raw or b"")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and {"run", "pid", "host"} <= found.keys() else {}


# --- processes


def _machine() -> str:
    """Return an id that is equal for processes with common process ids: of one boot and one PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(pid: int) -> str:
    """Return when the process started, in kernel ticks, or "" if it is gone. A reused process id has another start time."""
    try:
        # The command's name comes second, in parentheses, and may have any characters.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _is_alive(holder: Mapping[str, Any]) -> bool | None:
    """Whether the process is running; None if that cannot be determined here."""
    machine, began, pid = holder.get("machine"), holder.get("began"), holder.get("pid")
    if not machine or machine != _machine() or not began or not isinstance(pid, int):
        return None
    return bool(_began(pid) == began)

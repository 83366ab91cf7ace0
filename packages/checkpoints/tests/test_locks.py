"""Locks of stores: one process holds them, and none that is gone."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket_checkpoints.storage import locks
from hocket_checkpoints.storage.locks import InUse
from hocket_checkpoints.storage.store import Store


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "run")
        return
    fsspec = pytest.importorskip("fsspec")
    yield f"memory://{tmp_path.name}/run"
    fsspec.filesystem("memory").store.clear()


def test_one_at_a_time(place: str) -> None:
    """Whoever comes second is told by whom it is held; after it was released, there is nothing left."""
    one, other = Store(place), Store(place)
    one.acquire("first")
    with pytest.raises(InUse, match=rf"run 'first' \(process {os.getpid()} on .*checkpoints=hocket.Checkpoints\('…'\)"):
        other.acquire("second")
    with pytest.raises(InUse):
        other.save("ba1", {"a": 1}, {})  # it tries again before it writes
    one.save("ba1", {"a": 2}, {})
    one.release()
    other.acquire("second")
    other.save("ba1", {"a": 3}, {})
    other.release()
    assert one.read("ba1") == {"a": 3}
    assert "://" in place or sorted(path.name for path in Path(place).iterdir()) == ["ba1", "latest"]


def test_a_folder_that_was_made_for_the_lock_goes_with_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "a")
    store.acquire("run")
    store.release()
    assert not list(tmp_path.iterdir())


def fork(function: Any) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


def test_a_killed_process_holds_no_folder_though_its_forks_live(tmp_path: Path) -> None:
    """As data workers do for some seconds. A fork that ends does not release what its parent holds."""
    context = multiprocessing.get_context("fork")
    ready, over = context.Event(), context.Event()

    def holding() -> None:
        store = Store(tmp_path)
        store.acquire("killed")
        ended = fork(store.release)
        ended.join()
        assert ended.exitcode == 0
        fork(over.wait)
        ready.set()
        signal.pause()

    process = fork(holding)
    assert ready.wait(60)
    store = Store(tmp_path)
    with pytest.raises(InUse, match="run 'killed'"):
        store.acquire("next")
    process.kill()
    process.join()
    store.acquire("next")
    store.release()
    over.set()


@pytest.mark.skipif(locks.fcntl is None, reason="folders are not locked here")
def test_a_killed_process_whose_fork_has_not_begun(tmp_path: Path) -> None:
    """Between a fork and its first line it holds what its parent held, here for a second by a copy of the descriptor."""
    ready = multiprocessing.get_context("fork").Event()

    def holding() -> None:
        lock = locks.FileLock(tmp_path, "killed")
        assert lock._file is not None
        os.dup(lock._file.fileno())
        fork(lambda: time.sleep(1))
        ready.set()
        signal.pause()

    process = fork(holding)
    assert ready.wait(60)
    process.kill()
    process.join()
    locks.FileLock(tmp_path, "next").release()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody creates one")
@pytest.mark.parametrize("place", ["/proc/checkpoints", f"/tmp/{'a' * 300}"])
def test_a_folder_that_cannot_be_created_is_known_before_the_fit(place: str) -> None:
    assert Store(place).acquire("run") in ("No such file or directory", "File name too long")


@pytest.mark.skipif(locks.fcntl is None, reason="folders are not locked here")
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with pytest.raises(OSError, match="No locks"):
        locks.FileLock(tmp_path, "run")
    store = Store(tmp_path)
    store.acquire("run")
    store.save("ba1", {"a": 1}, {})  # without one
    assert store.read("ba1") == {"a": 1}


@pytest.mark.skipif(locks.fcntl is None, reason="folders are not locked here")
def test_a_lock_that_was_released_while_the_next_one_opened_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, flock = locks.FileLock(tmp_path, "first"), locks.fcntl.flock

    def later(file: Any, operation: int) -> None:
        first.release()  # the first time only
        flock(file, operation)

    monkeypatch.setattr(locks.fcntl, "flock", later)
    second = locks.FileLock(tmp_path, "second")
    with pytest.raises(InUse, match="run 'second'"):
        locks.FileLock(tmp_path, "third")
    second.release()


def test_a_lock_whose_file_somebody_removed_is_made_again(place: str) -> None:
    if "://" in place:
        pytest.importorskip("fsspec").filesystem("memory").store.clear()
    one, other = Store(place), Store(place)
    one.acquire("first")
    remove(place)
    one.save("ba1", {"a": 1}, {})
    with pytest.raises(InUse):
        other.acquire("second")
    remove(place)
    other.acquire("second")
    with pytest.raises(InUse, match="run 'second'"):
        one.save("ba1", {"a": 2}, {})
    one.release()  # not the other's
    with pytest.raises(InUse):
        one.acquire("first")
    other.release()


def remove(place: str) -> None:
    if "://" in place:
        import fsspec

        fsspec.filesystem("memory").rm_file(f"{place.partition(':/')[2]}/.lock")
    else:
        Path(place, ".lock").unlink()


# --- leases


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Any]:
    """A file system, and a folder in it."""
    fs = pytest.importorskip("fsspec").filesystem("memory")
    yield fs, f"/{tmp_path.name}"
    fs.store.clear()


def left_behind(memory: Any, **changes: Any) -> None:
    """The lock of a process of another machine."""
    fs, root = memory
    holder = {**locks._holder("gone"), "token": "0", "renewed": 3, "machine": "another", **changes}
    fs.pipe_file(f"{root}/.lock", json.dumps(holder).encode())


def test_what_was_killed_elsewhere_holds_it_for_the_lease(memory: Any, capsys: Any) -> None:
    left_behind(memory)
    store = Store(f"memory:/{memory[1]}", lease=0.3)
    began = time.monotonic()
    store.acquire("next")
    assert time.monotonic() - began >= 0.3 and "Waiting 0.3 s at most to see" in capsys.readouterr().err
    store.release()


def test_what_runs_elsewhere_is_seen_to_renew_it(memory: Any) -> None:
    """Whatever clocks say. And it renews it without being asked."""
    store = Store(f"memory:/{memory[1]}", lease=0.6)
    store.acquire("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "_is_alive", lambda holder: None)
        with pytest.raises(InUse, match="run 'elsewhere'"):
            Store(f"memory:/{memory[1]}", lease=60).acquire("next")
    store.release()


def test_a_renewal_under_way_does_not_bring_a_released_lock_back(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, root = memory
    original, entered, released = type(fs).pipe_file, threading.Event(), threading.Event()

    def pipe_file(self: Any, path: str, value: bytes, **options: Any) -> None:
        if not options:  # a renewal, by a slow server
            entered.set()
            released.wait(0.2)
        original(self, path, value, **options)

    monkeypatch.setattr(type(fs), "pipe_file", pipe_file)
    store = Store(f"memory:/{root}", lease=0.06)
    store.acquire("run")
    assert entered.wait(60)
    (renewing,) = [each for each in threading.enumerate() if each.name == "hocket-lock"]
    store.release()
    released.set()
    renewing.join(60)
    assert not fs.exists(f"{root}/.lock")


def test_a_lock_that_was_lost_is_not_renewed(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, root = memory
    original, waited = threading.Event.wait, threading.Semaphore(0)

    def wait(self: Any, timeout: float | None = None) -> bool:
        if timeout == 0.01:
            waited.release()
        return original(self, timeout)

    store = Store(f"memory:/{root}", lease=0.06)
    store.acquire("run")
    left_behind(memory, run="other")
    taken = fs.cat_file(f"{root}/.lock")
    monkeypatch.setattr(threading.Event, "wait", wait)
    assert all(waited.acquire(timeout=60) for _ in range(2)), "the thread has looked in between"
    assert fs.cat_file(f"{root}/.lock") == taken
    with pytest.raises(InUse, match="run 'other'"):
        store.acquire("run")
    store.release()
    assert fs.cat_file(f"{root}/.lock") == taken


def test_of_two_that_find_a_lock_of_the_past_one_gets_it(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, root = memory
    left_behind(memory)
    alive = iter([False, True])

    def is_alive(holder: Any) -> bool:
        left_behind(memory, run="first")  # it was as fast
        return next(alive)

    monkeypatch.setattr(locks, "_is_alive", is_alive)
    with pytest.raises(InUse, match="run 'first'"):
        Store(f"memory:/{root}").acquire("second")


@pytest.mark.skipif(not locks._machine(), reason="without /proc a process is known by its lease only")
def test_a_process_that_ended_is_gone_before_its_parent_looks() -> None:
    process = fork(lambda: None)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert locks._began(process.pid) == "" and locks._began(os.getpid())
    process.join()


@pytest.mark.skipif(not locks._machine(), reason="without /proc a process is known by its lease only")
@pytest.mark.parametrize("began", ["1", None])
def test_what_was_killed_here_is_known_at_once(memory: Any, began: str | None) -> None:
    """Its id may be used again by then, as 1 is in every container."""
    if began is None:
        process = fork(lambda: None)
        pid, began = process.pid, locks._began(process.pid or 0) or "2"
        process.join()
    else:
        pid = os.getpid()
    left_behind(memory, machine=locks._machine(), pid=pid, began=began)
    store = Store(f"memory:/{memory[1]}", lease=600)
    store.acquire("next")
    store.release()


@pytest.mark.parametrize("raw", [b"", b"\xff\x00", b"[]", b'{"token": 1}'])
def test_a_lock_that_cannot_be_read(memory: Any, raw: bytes) -> None:
    fs, root = memory
    fs.pipe_file(f"{root}/.lock", raw)
    store = Store(f"memory:/{root}", lease=0.2)
    store.acquire("next")
    store.release()
    assert not fs.exists(f"{root}/.lock")


def test_a_server_that_knows_no_exclusive_writes(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, root = memory
    original = type(fs).pipe_file

    def pipe_file(self: Any, path: str, value: bytes, **options: Any) -> None:
        if options:
            raise TypeError("no such mode")
        original(self, path, value)

    monkeypatch.setattr(type(fs), "pipe_file", pipe_file)
    one, other = Store(f"memory:/{root}"), Store(f"memory:/{root}")
    one.acquire("first")
    with pytest.raises(InUse):
        other.acquire("second")
    one.release()
    other.acquire("second")
    other.release()

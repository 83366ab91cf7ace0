"""Disks that are full or fail: what was there stays, the run stops or says so, and goes on when there is room again."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from training_script import At, differences, make, outcome

import hocket
from hocket.checkpoints import CheckpointError
from hocket_checkpoints.signals import Interrupted
from hocket_checkpoints.storage import format as formats
from hocket_checkpoints.storage.store import Local, Store

#: A disk: where it is, and how to take it all and give it back.
Disk = tuple[Path, Callable[[], Any], Callable[[], Any]]


@contextmanager
def mounted(folder: Path) -> Iterator[Disk]:
    """A file system of 4 MB, for those who may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs to mount a tmpfs")
    ballast = folder / ".ballast"

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while file.write(bytes(4096)):
                pass

    try:
        yield folder, fill, ballast.unlink
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def limited(folder: Path) -> Iterator[Disk]:
    """A limit on the size of files: large ones are cut off where they reach it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    try:
        yield folder, lambda: limit(2000), lambda: limit(before[0])
    finally:
        limit(before[0])


@contextmanager
def failing(folder: Path) -> Iterator[Disk]:
    """Files that cannot be flushed: the disk took the bytes and then could not keep them."""
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        yield folder, lambda: patch.setattr(os, "fsync", fail), lambda: patch.setattr(os, "fsync", fsync)


MESSAGES = {"mounted": "the disk is full", "limited": "File too large", "failing": "Input/output error"}


@pytest.fixture(params=MESSAGES)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Any, Any, str]]:
    with globals()[request.param](tmp_path / "disk") as made:
        yield (*made, MESSAGES[request.param])


def tree(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((5000,), value)}, "step": 1}


def test_a_checkpoint_on_a_full_disk(disk: Any) -> None:
    folder, fill, free, message = disk
    formats.write(folder / "c", tree(1.0), {})
    fill()
    with pytest.raises(CheckpointError, match=rf"was not written: {message}"):
        formats.write(folder / "c", tree(2.0), {})
    with pytest.raises(
        CheckpointError, match=rf"was not written: {message}.*The checkpoints before it are as they were"
    ):
        Store(folder).save("d", tree(2.0), {})
    free()
    assert formats.verify(folder / "c") == [] and (formats.read(folder / "c")["model"]["w"] == 1.0).all()
    assert os.listdir(folder) == ["c"]


@pytest.mark.parametrize("disk", ["mounted", "failing"], indirect=True)
def test_the_pointer_on_a_full_disk(disk: Any) -> None:
    """It is smaller than any limit of a file's size."""
    folder, fill, _free, message = disk
    formats.write(folder / "c", tree(1.0), {})
    fill()
    with pytest.raises(
        CheckpointError, match=f"could not be replaced: {message}.*The checkpoints themselves are complete"
    ):
        Local(folder).point("c")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    make(folder, duration="2ep").fit()
    return outcome(folder)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_stops_goes_on_when_there_is_room(
    disk: Any, uninterrupted: dict[str, Any], asynchronous: bool
) -> None:
    folder, fill, free, message = disk
    with pytest.raises(CheckpointError, match=f"could not be written to .*{message}"):
        make(folder / "run", At({7: fill}), duration="2ep", policy={"asynchronous": asynchronous}).fit()
    free()
    # When the disk filled up a thread may have been writing the one before, or removing an old one, which makes room.
    latest = hocket.Checkpoints(folder / "run").store.latest()
    assert latest in (["ep0-ba5", "ep1-ba6", "ep1-ba7"] if asynchronous else ["ep1-ba6"])
    make(folder / "run", duration="2ep").fit()
    assert differences(outcome(folder / "run"), uninterrupted) == []


def test_a_run_that_goes_on_without(disk: Any) -> None:
    """It says so each time, keeps what there is, and writes again when it can."""
    folder, fill, free, message = disk
    more = {"duration": "2ep", "policy": {"on_error": "warn", "keep": None}}
    trainer = make(folder / "run", At({7: fill, 9: free}), **more)
    with pytest.warns(RuntimeWarning, match=f"{message}.*Training continues without it") as told:
        trainer.fit()
    assert sum("continues without" in str(each.message) for each in told) == 2
    names = hocket.Checkpoints(folder / "run").store.names()
    assert names[5:] == ["ep1-ba6", "ep1-ba9", "ep2-ba10"]


def test_told_to_end_with_a_full_disk(disk: Any) -> None:
    """The run ends all the same, having said what it could not write, and goes on from the checkpoint before."""
    folder, fill, free, message = disk

    def both() -> None:
        fill()
        os.kill(os.getpid(), signal.SIGTERM)

    trainer = make(folder / "run", At({7: both}), policy={"on_error": "warn"})
    with pytest.warns(RuntimeWarning, match=message), pytest.raises(Interrupted):
        trainer.fit()
    free()
    assert hocket.Checkpoints(folder / "run").store.latest() == "ep1-ba6"


def test_the_end_of_a_fit_is_written_though_its_last_batch_was_not(disk: Any) -> None:
    folder, fill, free, message = disk

    class Free(hocket.Callback):
        def fit_end(self, state: hocket.State) -> None:
            free()

    trainer = make(folder / "run", At({10: fill}), Free(), duration="2ep", policy={"on_error": "warn"})
    with pytest.warns(RuntimeWarning, match=message):
        trainer.fit()
    assert hocket.Checkpoints(folder / "run").store.latest() == "ep2-ba10"

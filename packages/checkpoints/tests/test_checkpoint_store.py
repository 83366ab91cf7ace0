"""Stores of checkpoints: order, names, damage."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hocket.checkpoints import CheckpointError, Checkpoints, DamagedCheckpointWarning
from hocket.state.ranks import Ranks
from hocket_checkpoints.storage import scratch
from hocket_checkpoints.storage.store import Store


def tree(value):
    return {"model": {"w": torch.full((3,), float(value))}, "rest": torch.full((400_000,), float(value)), "step": value}


def value_of(store, name):
    read = store.read(name)
    assert (read["rest"] == read["step"]).all()
    return read["step"]


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    if request.param == "local":
        yield Store(tmp_path / "run")
        return
    fsspec = pytest.importorskip("fsspec")
    yield Store(f"memory://{tmp_path.name}/run")
    fsspec.filesystem("memory").store.clear()


def test_order_is_that_of_writing(store):
    assert store.names() == [] and store.latest() is None
    for name in ("ba10", "ba9", "ba100"):
        store.save(name, tree(int(name[2:])), {"name": name})
    assert store.names() == ["ba10", "ba9", "ba100"] and store.latest() == "ba100"
    assert store.about("ba9")["name"] == "ba9" and value_of(store, "ba9") == 9
    assert list(store.read("ba9", only=["model"])) == ["model"]
    store.save("ba10", tree(11), {})
    assert store.names() == ["ba9", "ba100", "ba10"] and value_of(store, "ba10") == 11


def test_order_does_not_depend_on_the_clock(store, monkeypatch):
    store.save("first", tree(1), {})
    monkeypatch.setattr("time.time", lambda: 1000.0)  # another host, whose clock is late
    store.save("second", tree(2), {})
    store.save("third", tree(3), {})
    assert store.names() == ["first", "second", "third"]


def test_remove_and_the_latest_file(tmp_path):
    store = Store(tmp_path / "run")
    for value in range(3):
        store.save(f"ba{value}", tree(value), {})
    assert (tmp_path / "run" / "latest").read_text() == "ba2\n"
    store.remove("ba2")
    assert (tmp_path / "run" / "latest").read_text() == "ba1\n" and store.names() == ["ba0", "ba1"]
    store.remove("ba0")
    store.remove("ba1")
    assert list((tmp_path / "run").iterdir()) == []
    with pytest.raises(CheckpointError, match=r"has no checkpoint 'ba1'\. It has: none"):
        store.remove("ba1")


@pytest.mark.parametrize("name", ["../x", "/x", "latest", "", ".x", "a/b", "a\n"])
def test_names_that_are_none(store, name):
    for method in (store.read, store.remove, store.about):
        with pytest.raises(ValueError, match="is not a name for a checkpoint"):
            method(name)
    with pytest.raises(ValueError, match="is not a name for a checkpoint"):
        store.save(name, tree(1), {})


def spoil(folder, damage):
    shard = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    if damage == "truncated":
        os.truncate(shard, 1000)
        return shard.name
    if damage == "flipped":
        raw = bytearray(shard.read_bytes())
        raw[-100_000] ^= 1
        shard.write_bytes(raw)
        return shard.name
    if damage == "missing":
        shard.unlink()
        return shard.name
    if damage == "manifest":
        os.truncate(folder / "manifest.json", 50)
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    return "manifest.json"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest", "no manifest"])
def test_damaged_ones_are_passed_over_by_name(tmp_path, damage):
    store = Store(tmp_path)
    for value in range(3):
        store.save(f"ba{value}", tree(value), {})
    name = spoil(tmp_path / "ba2", damage)
    with pytest.warns(DamagedCheckpointWarning, match=f"skips 'ba2'.*{name}"):
        assert store.latest() == "ba1"
    spoil(tmp_path / "ba1", "missing")
    spoil(tmp_path / "ba0", "flipped")
    with pytest.warns(DamagedCheckpointWarning) as warned:
        assert store.latest() is None
    assert sorted(next(name for name in ("ba0", "ba1", "ba2") if f"'{name}'" in str(w.message)) for w in warned) == [
        "ba0", "ba1", "ba2",
    ]  # fmt: skip
    store.save("ba2", tree(7), {})
    assert store.latest() == "ba2" and value_of(store, "ba2") == 7


FORGED = {
    "a year of 400 digits": {"written": 10**400},
    "an endless year": {"written": 1e300},
    "a time that is text": {"written": "1"},
    "a time that is not a number": {"written": True},
    "about a list": {"about": [1]},
    "about in many levels": {"about": {"a": functools.reduce(lambda inner, _: [inner], range(300), 1)}},
    "about a name that is none": {"about": {"$class": "os.system"}},
    "no files": {"files": {}},
    "files that are a list": {"files": []},
}


@pytest.mark.parametrize("forged", FORGED)
def test_one_forged_manifest_is_named_and_the_others_are_used(tmp_path, forged):
    """Its checksum fits, which proves nothing."""
    store = Store(tmp_path)
    store.save("good", tree(1), {})
    store.save("bad", tree(2), {})
    content = json.loads((tmp_path / "bad" / "manifest.json").read_text()) | FORGED[forged]
    del content["sha256"]
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (tmp_path / "bad" / "manifest.json").write_text(json.dumps(content))
    with pytest.warns(DamagedCheckpointWarning, match="skips 'bad'"):
        name, _ = store.read_latest()
    assert name == "good" and list(store.abouts()) == ["good"]
    with pytest.raises(CheckpointError, match=r"bad/manifest\.json"):
        store.about("bad")
    store.save("next", tree(3), {})
    assert store.names() == ["good", "next"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files here")
def test_files_of_other_kinds_are_named_and_never_opened(tmp_path):
    """Reading a pipe would wait for ever."""
    store = Store(tmp_path)
    for name in ("good", "tree", "manifest"):
        store.save(name, tree(1), {})
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    for name in ("tree", "manifest"):
        file = next((tmp_path / name).glob(f"{name}*"))
        file.unlink()
        os.mkfifo(file)
    (tmp_path / ".latest.0").mkdir()
    with pytest.warns(DamagedCheckpointWarning, match="not a regular file") as warned:
        assert store.read_latest()[0] == "good"
    assert len(warned) == 2
    store.remove("manifest")
    store.save("next", tree(2), {})
    assert (tmp_path / "latest").read_text() == "next\n"


def test_foreign_files_are_no_damage(tmp_path):
    store = Store(tmp_path)
    store.save("ba1", tree(1), {})
    (tmp_path / "ba1" / "notes.txt").write_text("best so far")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x").write_text("")
    assert store.latest() == "ba1" and store.names() == ["ba1"]


def test_leftovers_go_with_the_next_save(tmp_path):
    store = Store(tmp_path)
    store.save("ba1", tree(1), {})
    pid = os.fork() if hasattr(os, "fork") else pytest.skip("forks")
    if not pid:
        torch.set_num_threads(1)
        os.replace = os.rename = lambda *arguments: os.kill(os.getpid(), 9)
        store.save("ba2", tree(2), {})
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert any(entry.name.endswith(".partial") for entry in tmp_path.iterdir())
    assert store.latest() == "ba1"
    store.save("ba3", tree(3), {})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ba1", "ba3", "latest"]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_temporary_copies_of_the_dead_go_and_those_of_the_living_stay(tmp_path, temporary):
    pytest.importorskip("fsspec")
    made, release = os.pipe(), os.pipe()
    children = []
    for end in ("lives", "dies"):
        if not (child := os.fork()):
            (scratch.begin() / end).touch()
            os.write(made[1], b"x")
            if end == "lives":
                os.read(release[0], 1)
            os.kill(os.getpid(), 9)
        children.append(child)
        os.read(made[0], 1)
    os.waitpid(children[1], 0)
    own = scratch.begin()
    there = {file.name for folder in temporary.iterdir() for file in folder.iterdir()}
    assert there == {"lives"} and own.is_dir()
    os.write(release[1], b"x")
    os.waitpid(children[0], 0)
    Store(f"file://{tmp_path}/run").save("ba1", tree(1), {})
    assert list(temporary.iterdir()) == [own]
    scratch.end(own)
    assert list(temporary.iterdir()) == []


def test_a_download_goes_when_it_is_read(tmp_path, temporary):
    pytest.importorskip("fsspec")
    store = Store(f"file://{tmp_path}/run")
    store.save("ba1", tree(1), {})
    store.save("ba2", tree(2), {})
    assert value_of(store, "ba1") == 1 and list(temporary.iterdir()) == []
    assert store.latest() == "ba2" and len(list(temporary.iterdir())) == 1
    assert value_of(store, "ba2") == 2 and list(temporary.iterdir()) == []
    spoil(tmp_path / "run" / "ba2", "truncated")
    with pytest.warns(DamagedCheckpointWarning, match="it has 1000 bytes and not the"):
        assert store.read_latest()[0] == "ba1"
    with pytest.warns(DamagedCheckpointWarning, match="it has 1000 bytes and not the"):
        assert store.latest() == "ba1"
    assert value_of(store, "ba1") == 1 and list(temporary.iterdir()) == []


def test_ranks_of_one_host_download_once(tmp_path, temporary):
    pytest.importorskip("fsspec")
    url, size = f"file://{tmp_path}/run", 3
    Store(url).save(
        "ba1", {"model": {"a": torch.ones(400_000)}, "b": torch.ones(400_000), "c": torch.ones(400_000)}, {}
    )
    gathered, barrier, fetched = [None] * size, threading.Barrier(size), []

    def rank(index):
        def gather(item):
            gathered[index] = item
            barrier.wait(60)
            items = list(gathered)
            barrier.wait(60)
            return items

        store = Store(url)
        get = store._place._fs.get_file
        store._place._fs.get_file = lambda path, to: (fetched.append(path.rpartition("/")[2]), get(path, to))
        found = store.read_latest(ranks=Ranks(index, size, gather))
        barrier.wait(60)
        return found

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(rank, range(size)))
    assert all(name == "ba1" and (read["c"] == 1).all() for name, read in found)
    assert len([name for name in fetched if name.startswith("tensors-")]) == 3
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files here")
def test_pipes_and_other_sizes_are_not_downloaded(tmp_path, temporary):
    """Neither ends: a pipe, and a file of other than the size in the manifest."""
    pytest.importorskip("fsspec")
    store = Store(f"file://{tmp_path}/run")
    for name in ("good", "shard", "size", "manifest"):
        store.save(name, tree(1), {})
    for name, file in (("shard", "tensors*"), ("manifest", "manifest*")):
        path = next((tmp_path / "run" / name).glob(file))
        path.unlink()
        os.mkfifo(path)
    with next((tmp_path / "run" / "size").glob("tensors*")).open("r+b") as opened:
        opened.truncate(10 * 2**40)  # a hole: takes no room
    with pytest.warns(DamagedCheckpointWarning) as warned:
        assert store.read_latest()[0] == "good"
    assert {name for name in ("shard", "size", "manifest") if any(f"'{name}'" in str(w.message) for w in warned)} == {
        "shard", "size", "manifest",
    }  # fmt: skip


def test_what_is_said_of_the_checkpoints_before_is_true(tmp_path):
    store = Store(tmp_path / "run")
    store.save("ba1", tree(1), {})
    place = store._place.write
    for lost in (False, True):

        def write(*arguments, lost=lost):
            if lost:
                shutil.rmtree(tmp_path / "run" / "ba1")
            (tmp_path / "run" / "ba2").write_text("")
            place(*arguments)

        store._place.write = write
        with pytest.raises(
            CheckpointError, match="these are not found as they were: ba1" if lost else "as they were"
        ) as told:
            store.save("ba2", tree(2), {})
        assert ("not found" in str(told.value)) is lost
        (tmp_path / "run" / "ba2").unlink()


def test_a_relative_folder_is_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = Store("run")
    store.save("ba1", tree(1), {})
    monkeypatch.chdir("elsewhere")
    store.save("ba2", tree(2), {})
    assert store.names() == ["ba1", "ba2"] and list((tmp_path / "elsewhere").iterdir()) == []


def test_links_are_no_checkpoints(tmp_path):
    store = Store(tmp_path)
    store.save("ba1", tree(1), {})
    (tmp_path / "best").symlink_to("ba1")
    assert store.names() == ["ba1"]
    store.remove("ba1")
    assert store.names() == []


def test_options_are_for_urls(tmp_path):
    with pytest.raises(TypeError, match=r"Options \(wait\) are for URLs"):
        Store(tmp_path, wait=1)


def test_a_url_without_its_package_says_what_to_install(monkeypatch):
    pytest.importorskip("fsspec")
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"Type: pip install 'fsspec>="):
        Store("s3://bucket/run")


@pytest.mark.parametrize("policy", [{"keep": "3"}, {"keep": True}, {"keep": 1.5}])
def test_a_number_of_checkpoints_is_an_int(tmp_path, policy):
    with pytest.raises(TypeError, match=r"is not a number of checkpoints. Write keep=3, or None for all"):
        Checkpoints(tmp_path, **policy)


@pytest.mark.parametrize("best", [5, ("acc", "max", "1"), ("acc", "max")])
def test_the_best_are_a_metric_a_mode_and_a_number(tmp_path, best):
    with pytest.raises(ValueError, match=r"is not .metric, 'max' or 'min', number of checkpoints"):
        Checkpoints(tmp_path, best=best)


def test_a_file_is_not_a_folder_of_checkpoints(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"mine.py' is a file, and checkpoints need a folder\. Write checkpoints="):
        Checkpoints(tmp_path / "mine.py")


def test_missing_credentials_are_not_tried_again_and_the_error_says_how_to_give_them(tmp_path, monkeypatch):
    pytest.importorskip("s3fs")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": tmp_path / "c", "SHARED_CREDENTIALS_FILE": tmp_path / "d"}.items():
        monkeypatch.setenv(f"AWS_{name}", str(value))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(CheckpointError) as raised:
        Store("s3://nobucket/x", wait=60).names()  # a second attempt would take a minute
    assert "AWS_ACCESS_KEY_ID" in str(raised.value) and "attempts" not in str(raised.value)

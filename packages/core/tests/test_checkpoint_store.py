"""Stores of checkpoints: order, damage, kills, full disks; and the same against an S3 server that fails."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import socket
import threading
import zlib

import pytest
import torch

from hocket.checkpoints import CheckpointError, DamagedCheckpointWarning
from hocket.checkpoints import format as formats
from hocket.checkpoints.store import Store


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
        with pytest.raises(ValueError, match="is no name for a checkpoint"):
            method(name)
    with pytest.raises(ValueError, match="is no name for a checkpoint"):
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
    with pytest.warns(DamagedCheckpointWarning, match=f"passes over 'ba2'.*{name}"):
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


def test_options_are_for_urls(tmp_path):
    with pytest.raises(TypeError, match=r"Options \(wait\) are for URLs"):
        Store(tmp_path, wait=1)


def test_a_url_without_its_package_says_what_to_install(monkeypatch):
    pytest.importorskip("fsspec")
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"pip install 'hocket\[remote\]'"):
        Store("s3://bucket/run")


# --- S3


class Gate:
    """Stands before the S3 server's application, and fails as `fault` says: a function of method and path."""

    fault = staticmethod(lambda method, path: None)
    log: list[tuple[str, str]] = []

    def __init__(self, application):
        self.application = application

    def __call__(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.log.append((method, f"{path}?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else path))
        fault = self.fault(method, path)
        if fault == "drop":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        if isinstance(fault, int):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{fault} Fault", [("Content-Length", "0")])
            return []
        if fault == "truncate":
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(body[: len(body) // 2])
            environ["CONTENT_LENGTH"] = str(len(body) // 2)
        return self.application(environ, start_response)


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    serving = pytest.importorskip("werkzeug.serving")
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    application = Gate(moto.DomainDispatcherApplication(moto.create_backend_app))
    behind = serving.make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=behind.serve_forever)
    thread.start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{behind.server_port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",  # else the client notices what the server loses
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in variables.items():
            patch.setenv(key, value)
        yield
    behind.shutdown()
    thread.join()
    behind.server_close()


#: botocore's own attempts would hide from the test which of ours succeed.
QUICK = {"wait": 0.01, "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 5}}


@pytest.fixture
def bucket(server, request):
    import boto3

    Gate.fault = staticmethod(lambda method, path: None)
    Gate.log.clear()
    name = f"bucket-{zlib.crc32(request.node.name.encode())}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=name)
    yield name
    Gate.fault = staticmethod(lambda method, path: None)


def objects(bucket):
    import boto3

    return {each["Key"] for each in boto3.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])}


def test_s3(bucket):
    store = Store(f"s3://{bucket}/run")
    for value in range(3):
        store.save(f"ba{value}", tree(value), {})
    assert store.names() == ["ba0", "ba1", "ba2"] and store.latest() == "ba2" and value_of(store, "ba1") == 1
    store.remove("ba2")
    store.save("ba1", tree(11), {})
    assert store.names() == ["ba0", "ba1"] and value_of(Store(f"s3://{bucket}/run"), "ba1") == 11
    folders = {key.split("/")[1] for key in objects(bucket)}
    assert folders == {"ba0", "ba1", "latest"} and len(objects(bucket)) == 1 + 2 * 4
    uploads = [path.rpartition("/")[2] for method, path in Gate.log if method == "PUT" and "/ba2/" in path]
    assert len(uploads) == 4 and uploads[-1] == "manifest.json"


def test_s3_reads_only_what_it_needs(bucket):
    Store(f"s3://{bucket}/run").save("ba1", {"model": torch.ones(500_000), "rest": torch.ones(600_000)}, {})
    Gate.log.clear()
    assert list(Store(f"s3://{bucket}/run").read("ba1", only=["model"])) == ["model"]
    assert len({path for method, path in Gate.log if method == "GET" and path.endswith(".safetensors")}) == 1


@pytest.mark.parametrize("fault", [500, 503, "drop"])
def test_s3_failures_that_pass(bucket, fault):
    """Every third request fails."""
    counter = iter(range(10**6))
    Gate.fault = staticmethod(lambda method, path: fault if next(counter) % 3 == 2 else None)
    store = Store(f"s3://{bucket}/run", **QUICK)
    store.save("ba1", tree(1), {})
    store.save("ba2", tree(2), {})
    assert store.names() == ["ba1", "ba2"] and store.latest() == "ba2" and value_of(store, "ba1") == 1


@pytest.mark.parametrize("fault", [500, "drop", 403, 404])
@pytest.mark.parametrize("at", ["tree", "tensors", "manifest"])
def test_s3_lost_in_the_middle_of_a_save(bucket, at, fault):
    """From the upload of one file on, nothing arrives any more."""
    store = Store(f"s3://{bucket}/run", attempts=2, **QUICK)
    store.save("ba1", tree(1), {})
    lost = []

    def failing(method, path):
        if lost or (method == "PUT" and f"/ba2/{at}" in path):
            lost.append(path)
            return fault
        return None

    Gate.fault = staticmethod(failing)
    with pytest.raises(CheckpointError, match="The checkpoints that were there before are as they were"):
        store.save("ba2", tree(2), {})
    Gate.fault = staticmethod(lambda method, path: None)
    names = {key.split("/")[1] for key in objects(bucket)}
    with contextlib.ExitStack() as stack:
        if "ba2" in names:
            stack.enter_context(pytest.warns(DamagedCheckpointWarning, match="'ba2'.*its upload did not end"))
        assert store.latest() == "ba1"
    assert value_of(store, "ba1") == 1
    store.save("ba3", tree(3), {})
    assert {key.split("/")[1] for key in objects(bucket)} == {"ba1", "ba3", "latest"}


def test_s3_listing_that_fails_is_no_empty_store(bucket):
    store = Store(f"s3://{bucket}/run", attempts=2, **QUICK)
    store.save("ba1", tree(1), {})
    Gate.fault = staticmethod(lambda method, path: 500)
    with pytest.raises(CheckpointError, match="Could not list"):
        store.latest()
    Gate.fault = staticmethod(lambda method, path: 500 if path.endswith("manifest.json") else None)
    with pytest.raises(CheckpointError, match="Could not read"):
        store.names()


def test_s3_uploads_that_lose_bytes_are_repeated(bucket):
    store = Store(f"s3://{bucket}/run", **QUICK)
    truncated = []

    def once(method, path):
        if method == "PUT" and "tensors" in path and not truncated:
            truncated.append(path)
            return "truncate"
        return None

    Gate.fault = staticmethod(once)
    store.save("ba1", tree(1), {})
    assert sum(method == "PUT" and path == truncated[0] for method, path in Gate.log) == 2
    assert store.latest() == "ba1" and value_of(store, "ba1") == 1


def test_a_bucket_that_is_not_there_is_not_made(server, bucket):
    import boto3

    with pytest.raises(CheckpointError, match="Could not upload"):
        Store("s3://no-such-bucket/run", **QUICK).save("ba1", tree(1), {})
    assert "no-such-bucket" not in {each["Name"] for each in boto3.client("s3").list_buckets()["Buckets"]}


def test_s3_damage_is_passed_over(bucket):
    import boto3

    store = Store(f"s3://{bucket}/run")
    for value in range(3):
        store.save(f"ba{value}", tree(value), {})
    client = boto3.client("s3")
    key = next(key for key in objects(bucket) if "/ba2/tensors" in key)
    raw = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    raw[-5] ^= 1
    client.put_object(Bucket=bucket, Key=key, Body=bytes(raw))
    client.delete_object(Bucket=bucket, Key=next(key for key in objects(bucket) if "/ba1/tree" in key))
    with pytest.warns(DamagedCheckpointWarning) as warned:
        assert store.latest() == "ba0"
    messages = [str(each.message) for each in warned]
    assert (
        "another SHA-256" in messages[0]
        and "'ba2'" in messages[0]
        and "missing" in messages[1]
        and "'ba1'" in messages[1]
    )


def test_large_files_are_confirmed_by_their_parts(bucket, tmp_path):
    """Above 100 MB s3fs uploads in parts; the check of the upload downloads nothing."""
    store = Store(f"s3://{bucket}/run")
    store.save("ba1", {"w": torch.arange(27_000_000, dtype=torch.float32)}, {})
    assert any("partNumber" in path for _, path in Gate.log)
    assert not any(method == "GET" and path.endswith(".safetensors") for method, path in Gate.log)
    shutil.copytree(store.fetch("ba1"), tmp_path / "copy")
    assert formats.verify(tmp_path / "copy") == []

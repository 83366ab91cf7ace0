"""Checkpoints in a bucket whose server answers with errors, drops connections, loses bytes or is gone."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import shutil
import socket
import threading
import zlib

import pytest
import torch
from training_script import At, differences, make, outcome

from hocket.checkpoints import CheckpointError, DamagedCheckpointWarning
from hocket_checkpoints.storage import format as formats
from hocket_checkpoints.storage.store import Store


def tree(value):
    return {"model": {"w": torch.full((3,), float(value))}, "rest": torch.full((400_000,), float(value)), "step": value}


def value_of(store, name):
    read = store.read(name)
    assert (read["rest"] == read["step"]).all()
    return read["step"]


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


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        *itertools.product([500], ["tree", "tensors", "manifest"]),
        *(pytest.param("drop", at, marks=pytest.mark.long) for at in ("tree", "tensors", "manifest")),
        (403, "tensors"),
        (404, "manifest"),
    ],
)
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
    with pytest.raises(CheckpointError, match=r"Could not upload.*(is not known|not found as they were: ba1)"):
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


@pytest.mark.long
def test_large_files_are_confirmed_by_their_parts(bucket, tmp_path):
    """Above 100 MB s3fs uploads in parts; the check of the upload downloads nothing."""
    store = Store(f"s3://{bucket}/run")
    store.save("ba1", {"w": torch.arange(27_000_000, dtype=torch.float32)}, {})
    assert any("partNumber" in path for _, path in Gate.log)
    assert not any(method == "GET" and path.endswith(".safetensors") for method, path in Gate.log)
    shutil.copytree(store.fetch("ba1"), tmp_path / "copy")
    assert formats.verify(tmp_path / "copy") == []


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:lose_the_server.* changed in training")
def test_a_run_on_s3_that_loses_its_server(bucket, tmp_path):
    """Single errors and dropped connections are not noticed; a server that is gone ends the run, which goes on from there."""
    more = {"duration": "2ep", "policy": {"every": "3ba"}}
    make(tmp_path, **more).fit()
    expected, url = outcome(tmp_path), f"s3://{bucket}/run"
    faults = {12: 500, 20: "drop", 30: 503}
    requests = iter(range(10**6))
    Gate.fault = staticmethod(lambda method, path: faults.get(next(requests)))

    def lose_the_server():
        assert next(requests) > max(faults)
        Gate.fault = staticmethod(lambda method, path: 404 if method == "PUT" else None)

    with pytest.raises(CheckpointError, match="could not be written to"):
        make(url, At({8: lose_the_server}), **more).fit()
    Gate.fault = staticmethod(lambda method, path: None)
    trainer = make(url, **more)
    assert trainer.state.timestamp.batch == 6
    trainer.fit()
    store = Store(url)
    shutil.copytree(store.fetch(store.latest()), tmp_path / "fetched" / store.latest())
    assert differences(outcome(tmp_path / "fetched"), expected) == []

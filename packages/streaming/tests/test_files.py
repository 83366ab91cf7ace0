"""Files behind paths and URLs, against what was written: on disk, over HTTP, over S3, with every fault."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from records import Records, record
from stand_in import Rule, StandIn, serving

from hocket_streaming.errors import AccessDenied, DamagedData, MissingData, StreamError, Unreachable
from hocket_streaming.store import clients
from hocket_streaming.store.cache import Cache
from hocket_streaming.store.fetching import Chunks
from hocket_streaming.store.files import Files
from hocket_streaming.store.retrying import Attempts

DATA = os.urandom(5000)


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with serving() as server:
        yield server


@pytest.fixture(params=["file", "s3", "http"])
def files(request: pytest.FixtureRequest, tmp_path: Path, server: StandIn) -> Files:
    server.rules.clear()
    server.log.clear()
    server.files = {"bucket/data/a.bin": DATA, "bucket/data/sub/b c.bin": DATA[:7], "bucket/data2/x.bin": b"other"}
    if request.param == "file":
        for name, data in server.files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
        return Files(tmp_path / "bucket/data")
    if request.param == "http":
        return Files(f"{server.url}/bucket/data/")
    return Files("s3://bucket/data", server.options())


def test_reads_files_whole_and_in_part(files: Files, server: StandIn) -> None:
    assert files.read("a.bin") == DATA
    assert files.read("sub/b c.bin", 2, 3) == DATA[2:5]
    assert files.read("a.bin", 4990) == DATA[4990:]
    assert files.read("a.bin", 5, 0) == b""
    assert files.has("a.bin") and not files.has("b.bin") and not files.has("sub")
    assert pickle.loads(pickle.dumps(files)).read("a.bin", 1, 1) == DATA[1:2]
    assert files.url("a.bin").endswith("bucket/data/a.bin")
    if not files.local:
        reads = [(method, span) for method, path, span, _ in server.log if path.endswith("a.bin") and method == "GET"]
        assert reads[0] == ("GET", "") and reads[1] == (
            "GET",
            "bytes=4990-4999" if not reads[1][1].endswith("-") else reads[1][1],
        )
        assert len(reads) == 3  # one request for a read


def test_lists_files(files: Files) -> None:
    if files.protocol == "http":
        with pytest.raises(StreamError, match="plain HTTP has no list of files"):
            files.names()
    else:
        assert files.names() == {"a.bin": 5000, "sub/b c.bin": 7}


def test_a_root_may_be_one_file_or_several(files: Files) -> None:
    one = Files(f"{files.path}/a.bin", files.storage_options)
    assert one.names() == {"a.bin": 5000} and one.read("a.bin") == DATA and one.has("a.bin")
    several = Files([f"{files.path}/a.bin", f"{files.path}/sub/b c.bin"], files.storage_options)
    assert several.names() == {"a.bin": 5000, "sub/b c.bin": 7} and several.path == files.path
    assert several.read("sub/b c.bin") == DATA[:7] and not several.has("other")


def test_writes_whole_files(files: Files) -> None:
    if files.protocol == "http":
        with pytest.raises(StreamError, match="cannot be written"):
            files.write("new/c.bin", DATA)
    else:
        files.write("new/c.bin", DATA)
        assert files.read("new/c.bin") == DATA and files.names()["new/c.bin"] == 5000


def test_says_what_is_missing(files: Files) -> None:
    with pytest.raises(MissingData, match=r"data/none\.bin does not exist"):
        files.read("none.bin")
    with pytest.raises(DamagedData, match=r"a\.bin has 10 bytes from byte 4,990"):
        files.read("a.bin", 4990, 20)
    with pytest.raises(DamagedData, match=r"a\.bin (is shorter|has 0 bytes)"):
        files.read("a.bin", 5000, 20)


@pytest.mark.long
@pytest.mark.parametrize("fault", [500, 503, "cut", "short"])
def test_tries_again_after_what_may_pass(files: Files, server: StandIn, fault: int | str) -> None:
    server.rules = [Rule("a.bin", fault, 2)]
    assert files.read("a.bin", 0, 5000) == DATA
    assert files.local or server.gets("a.bin") == 3  # no further attempts of the client libraries


def test_a_slow_process_tries_as_often_after_answers(files: Files, server: StandIn) -> None:
    if files.local:
        return
    server.rules = [Rule("a.bin", 503, 3)]
    assert files.read("a.bin", 0, 5000, Attempts(seconds=0)) == DATA
    assert server.gets("a.bin") == 4


@pytest.mark.parametrize(("fault", "kind"), [(403, AccessDenied), (404, MissingData), (400, AccessDenied)])
def test_refusals_are_errors_at_once(files: Files, server: StandIn, fault: int, kind: type[StreamError]) -> None:
    if files.local or (files.protocol == "http" and fault == 400):
        return
    server.rules = [Rule("a.bin", fault)]
    with pytest.raises(kind, match=r"bucket/data/a\.bin .*" + ("expired" if fault == 400 else "")):
        files.read("a.bin")
    assert server.gets("a.bin") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "kind"),
    [(500, Unreachable), ("cut", Unreachable), ("drip", Unreachable), ("silent", Unreachable), ("short", DamagedData)],
)
def test_faults_that_stay_are_errors_soon(
    files: Files, server: StandIn, fault: int | str, kind: type[StreamError]
) -> None:
    if files.local:
        return
    server.rules = [Rule("a.bin", fault, seconds=12)]
    began = time.monotonic()
    with pytest.raises(kind, match=r"bucket/data/a\.bin"):
        files.read("a.bin", 0, 5000)
    assert time.monotonic() - began < 10
    assert server.gets("a.bin") <= 5


@pytest.mark.long
def test_a_server_that_is_not_there_is_an_error_soon() -> None:
    began = time.monotonic()
    for files in (
        Files("http://127.0.0.1:9/data/"),
        Files("s3://bucket/data", {"endpoint_url": "http://127.0.0.1:9", "anon": True}),
    ):
        with pytest.raises(Unreachable, match=r"data/a\.bin could not be read"):
            files.read("a.bin")
    assert time.monotonic() - began < 15


def test_certificates_are_verified_but_where_there_is_no_tls() -> None:
    for scheme, verify in (("http", False), ("https", None)):
        for options in (
            {"endpoint_url": f"{scheme}://127.0.0.1:1"},
            {"client_kwargs": {"endpoint_url": f"{scheme}://x"}},
        ):
            assert clients.client("s3://bucket/data", options).client_kwargs.get("verify") is verify
    own = {"endpoint_url": "http://127.0.0.1:1", "client_kwargs": {"verify": "authority.pem"}}
    assert clients.client("s3://bucket/data", own).client_kwargs["verify"] == "authority.pem"


def test_no_secret_is_in_a_message() -> None:
    assert "pa55word" not in Files("https://me:pa55word@127.0.0.1:9/data.bin?X-Amz-Signature=abcdef0123").url()


@pytest.mark.long
def test_speaks_the_protocol_of_s3(tmp_path: Path) -> None:
    """Signed requests to an independent server of the protocol."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        region = {"region_name": "us-east-1"}
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}", "client_kwargs": region}
        urlopen(Request(f"http://{host}:{port}/bucket", method="PUT")).close()
        files = Files("s3://bucket/data", options)
        files.write("a.bin", DATA)
        files.write("sub/b c.bin", DATA[:7])
        assert files.names() == {"a.bin": 5000, "sub/b c.bin": 7}
        assert files.read("a.bin") == DATA and files.read("sub/b c.bin", 2, 3) == DATA[2:5]
        assert (
            files.has("a.bin")
            and not files.has("b.bin")
            and Files("s3://bucket/data/a.bin", options).names() == {"a.bin": 5000}
        )
        with pytest.raises(MissingData, match=r"s3://bucket/data/none\.bin does not exist"):
            files.read("none.bin")
        with pytest.raises(MissingData, match="s3://other does not exist"):
            Files("s3://other", options).names()
        with pytest.raises(DamagedData, match="has 10 bytes from byte 4,990"):
            files.read("a.bin", 4990, 20)
        shards = Records(Files("s3://bucket/records", options), chunks=3, each=50)
        for number in range(3):
            shards.files.write(f"{number:05}.rec", shards.file(number))
        chunks = Chunks(shards, shards.chunks(), Cache(tmp_path / "cache", 1 << 20), 4)
        assert all(shards.get(chunks.open(number // 50), number % 50) == record(number) for number in range(150))
    finally:
        server.stop()

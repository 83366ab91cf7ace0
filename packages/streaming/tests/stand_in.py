"""A stand-in for S3 and for web servers: files in memory, path style, with latency and faults by rule."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import xxhash


@functools.lru_cache(maxsize=1024)  # of the same object again and again, which may be large
def _etag(body: bytes) -> str:
    return f'"{xxhash.xxh3_64_hexdigest(body)}"'


CODES = {400: "ExpiredToken", 403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


@dataclass
class Rule:
    """A fault: of requests whose path has ``match`` in it, the next ``times`` are answered so."""

    match: str
    #: A status; or "cut" (half a body), "short" (a whole answer of half the bytes), "corrupt", "slow", "silent" (no answer),
    #: "drip" (a byte every half second).
    fault: int | str
    times: int = 1 << 30
    seconds: float = 0.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # without asking for the name of the host, which may take seconds


class StandIn:
    """The server. ``files`` are by path, such as ``bucket/data/a.bin``; ``log`` has (method, path, range, bytes sent)."""

    def __init__(self, latency: float = 0.0) -> None:
        self.files: dict[str, bytes] = {}
        self.rules: list[Rule] = []
        self.log: list[tuple[str, str, str, int]] = []
        self.latency = latency
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"stand_in": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def options(self, **more: Any) -> dict[str, Any]:
        """Return storage options of s3fs that lead here."""
        return {
            "key": "key",
            "secret": "secret",
            "endpoint_url": self.url,
            "client_kwargs": {"region_name": "us-east-1"},
            **more,
        }

    def fault(self, path: str) -> Rule | None:
        with self._lock:
            for rule in self.rules:
                if rule.match in path and rule.times > 0:
                    rule.times -= 1
                    return rule
        return None

    def gets(self, part: str = "") -> int:
        return sum(
            method == "GET" and part in path and "list-type" not in path for method, path, _, _ in list(self.log)
        )

    def sent(self) -> int:
        return sum(size for method, _, _, size in list(self.log) if method == "GET")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(latency: float = 0.0) -> Iterator[StandIn]:
    server = StandIn(latency)
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    stand_in: StandIn

    def log_message(self, *about: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        going = super().handle_expect_100()
        self.wfile.flush()
        return going

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(urlsplit(self.path).path)[1:]
        if rule := self.stand_in.fault(path):
            return self._error(int(rule.fault))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            data = _unchunked(data)
        self.stand_in.files[path] = data
        self._answer(200, b"", ETag='"0"')

    def _serve(self, method: str) -> None:
        address = urlsplit(self.path)
        path, query = unquote(address.path)[1:], parse_qs(address.query)
        time.sleep(self.stand_in.latency)
        if "list-type" in query:
            self.stand_in.log.append((method, self.path, "", 0))
            return self._list(path.strip("/"), query)
        span, rule = self.headers.get("Range", ""), self.stand_in.fault(path)
        body, status = self.stand_in.files.get(path), 200
        log = self.stand_in.log
        log.append((method, path, span, 0))
        if rule and rule.fault in ("slow", "silent"):
            time.sleep(rule.seconds)
            if rule.fault == "silent":
                self.close_connection = True
                return
            rule = None
        if rule and isinstance(rule.fault, int):
            return self._error(rule.fault)
        if body is None:
            return self._error(404)
        headers = {"ETag": _etag(body), "Last-Modified": formatdate(0, usegmt=True), "Accept-Ranges": "bytes"}
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            if int(first) >= len(body):
                return self._error(416)
            stop = min(int(last) + 1, len(body)) if last else len(body)
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(body)}"
            body, status = body[int(first) : stop], 206
        if rule and rule.fault == "drip":
            self._drip(body)
            return
        if rule and rule.fault == "corrupt":
            body = bytes([body[0] ^ 1]) + body[1:]
        if rule and rule.fault == "short":
            body = body[: len(body) // 2]
        if method == "HEAD":
            return self._answer(200, b"", **{"Content-Length": str(len(body)), **headers})
        log[-1] = (method, path, span, len(body))
        if rule and rule.fault == "cut":
            self.close_connection = True
            self._answer(status, body[: len(body) // 2], **{"Content-Length": str(len(body)), **headers})
            return
        self._answer(status, body, **headers)

    def _drip(self, body: bytes) -> None:
        """Answer a byte every half second."""
        self.close_connection = True
        with suppress(OSError):
            self._answer(206, b"", **{"Content-Length": str(len(body))})
            for place in range(len(body)):
                self.wfile.write(body[place : place + 1])
                self.wfile.flush()
                time.sleep(0.5)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        names = sorted(name.partition("/")[2] for name in self.stand_in.files if name.startswith(f"{bucket}/{prefix}"))
        items, folders = "", set()
        for name in names:
            folder, slash, _ = name[len(prefix) :].partition("/")
            if slash and query.get("delimiter"):
                folders.add(prefix + folder + "/")
                continue
            body, date = self.stand_in.files[f"{bucket}/{name}"], "2026-01-01T00:00:00.000Z"
            about = f"<Size>{len(body)}</Size><ETag>{escape(_etag(body))}</ETag><LastModified>{date}</LastModified>"
            items += f"<Contents><Key>{escape(name)}</Key>{about}</Contents>"
        items += "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)
        )
        text = (
            f"<?xml version='1.0'?><ListBucketResult><Name>{bucket}</Name><KeyCount>{len(names)}</KeyCount>"
            f"<IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
        )
        self._answer(200, text.encode(), **{"Content-Type": "application/xml"})

    def _error(self, status: int) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{CODES.get(status, status)}</Code><Message>of the test</Message></Error>"
        self._answer(status, b"" if self.command == "HEAD" else text.encode(), **{"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):  # a client that was killed
            self.close_connection = True

    def handle(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            super().handle()


def _unchunked(data: bytes) -> bytes:
    """Return the body of a request in aws-chunked encoding."""
    out = b""
    while data:
        head, _, data = data.partition(b"\r\n")
        size = int(head.partition(b";")[0], 16)
        if not size:
            break
        out, data = out + data[:size], data[size + 2 :]
    return out

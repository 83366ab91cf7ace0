"""A package index on this machine, for as long as a test or a rehearsal needs one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pypiserver


@contextmanager
def index(folder: Path, *, redirect: bool) -> Iterator[str]:
    """Serve the distributions in a folder on a free port of the loopback interface; yield the address without ``/simple/``.

    Anybody may upload. With `redirect`, other names lead to the normal index, so this index can be an installer's only one.
    Names that begin with ``hocket`` never do: an installer that asks for one which is not here is refused, and stops.
    """
    anybody = {"roots": [folder], "password_file": ".", "authenticate": []}
    stored = pypiserver.app(**anybody, disable_fallback=True)
    normal = os.environ.get("PIP_INDEX_URL", pypiserver.config.DEFAULTS.FALLBACK_URL)
    others = pypiserver.app(**anybody, fallback_url=normal) if redirect else stored

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if not environ["PATH_INFO"].startswith("/simple/hocket"):
            return others(environ, start_response)

        def refuse(status: str, *rest: Any) -> Any:  # after a 404, uv would ask its next index
            return start_response("403 Forbidden" if status.startswith("404") else status, *rest)

        return stored(environ, refuse)

    server = make_server("127.0.0.1", 0, application, server_class=_Server, handler_class=_Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log nothing."""

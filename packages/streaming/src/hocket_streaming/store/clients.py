"""Clients of object stores: fsspec's file systems, opened in the process that uses them and closed when it ends.

A client has a thread and sockets, so it is not usable in a forked process, nor may it be closed or collected there: that would
run on the event loop of the parent. Therefore a process keeps its clients until it ends. A forked process leaves the clients of
its parent alone, and opens others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from hocket_streaming.store.retrying import SILENCE

_clients: dict[str, Any] = {}
#: Clients of parents of this process, which must never be collected here.
_inherited: list[dict[str, Any]] = []
_descriptions: dict[str, Any] = {}
_lock = threading.Lock()
#: Bytes a second below which a transfer is taken for a hang.
_SLOWEST = 3e4
_CLOSED_HERE = ("s3", "s3a", "http", "https")


def client(url: str, options: Mapping[str, Any]) -> Any:
    """Return the file system of this process for a URL and options of fsspec, whose own retries are off."""
    protocol = url.partition("://")[0]
    key = repr((protocol, url.split("/")[2], sorted(options.items(), key=lambda item: item[0])))
    if key not in _clients:
        with _lock:
            if key not in _clients:
                _clients[key] = _opened(protocol, url, dict(options))
    return _clients[key]


def within(size: int | None, system: Any, method: str, *args: Any, **options: Any) -> Any:
    """Call a method of a file system that transfers this many bytes; TimeoutError where it takes absurdly long.

    Silence ends an attempt sooner. This is for a server that sends a byte now and then, or never asks for the data of a PUT.
    """
    from fsspec.asyn import AsyncFileSystem, sync

    if not isinstance(system, AsyncFileSystem):
        return getattr(system, method)(*args, **options)
    seconds = 600.0 if size is None else SILENCE + size / _SLOWEST
    return sync(system.loop, getattr(system, f"_{method}"), *args, timeout=seconds, **options)


def _opened(protocol: str, url: str, options: dict[str, Any]) -> Any:
    import fsspec

    options = {**fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(url), **options}
    if protocol in ("s3", "s3a"):
        silence = {"connect_timeout": SILENCE, "read_timeout": SILENCE, "retries": {"total_max_attempts": 1}}
        options["config_kwargs"] = {"max_pool_connections": 64, **silence, **options.get("config_kwargs", {})}
        client_kwargs = options.get("client_kwargs", {})
        if (options.get("endpoint_url") or client_kwargs.get("endpoint_url") or "").startswith("http://"):
            # Without TLS; to load the certificates that it needs takes 0.2 s in every process.
            options["client_kwargs"] = {"verify": False, **client_kwargs}
    elif protocol in ("http", "https") and "timeout" not in options.get("client_kwargs", {}):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
        options["client_kwargs"] = {**options.get("client_kwargs", {}), "timeout": timeout}
    system = fsspec.filesystem(protocol, **options, skip_instance_cache=True, use_listings_cache=False)
    if protocol in ("s3", "s3a"):
        system.retries = 1
        system.max_concurrency = 1  # else it asks for the size of a file before it reads it
        # botocore parses its descriptions of services for every client; forked workers inherit what the parent has parsed.
        if system.session is None:
            from aiobotocore.session import AioSession

            system.session = AioSession(**system.kwargs)
            descriptions = _descriptions.setdefault(protocol, system.session.get_component("data_loader"))
            system.session.register_component("data_loader", descriptions)
    if protocol in _CLOSED_HERE:
        system.asynchronous = True  # no finalizer of its own, which would run in forked processes too
    return system


@atexit.register
def _close() -> None:
    if not _clients:
        return
    from fsspec.asyn import sync

    for system in _clients.values():
        session, creator = (vars(system).get(name) for name in ("_session", "_s3creator"))
        with contextlib.suppress(Exception):  # the process ends, and its sockets with it
            if session is not None and hasattr(session, "close"):
                sync(system.loop, session.close, timeout=1)
            if creator is not None:
                sync(system.loop, creator.__aexit__, None, None, None, timeout=1)


def _forked() -> None:
    global _clients, _lock
    _inherited.append(_clients)
    _clients, _lock = {}, threading.Lock()
    if asyn := sys.modules.get("fsspec.asyn"):  # version 2025.2 keeps the loop of the parent
        asyn.loop[0] = asyn.iothread[0] = None
        asyn.reset_lock()


os.register_at_fork(after_in_child=_forked)

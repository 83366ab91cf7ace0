"""Headless Chromium over its debugging pipe, which needs no library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page of a browser."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()

        def descriptors() -> None:  # Chromium reads commands from 3 and writes to 4
            a, b = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(a, 3), os.dup2(b, 4)

        self._process = subprocess.Popen(
            [PROGRAM, *_OPTIONS, f"--user-data-dir={folder / 'browser'}", "about:blank"],
            preexec_fn=descriptors,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in), os.close(theirs_out)
        self._reader = os.fdopen(self._in, "rb")
        self._buffer, self._number, self._session = b"", 0, None
        #: What the page wrote to its console, and its uncaught exceptions.
        self.messages: list[str] = []
        #: The addresses that it asked for.
        self.requested: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = None
        self._call("Browser.close")
        self._process.wait()
        self._reader.close()
        os.close(self._out)

    def open(self, page: Path, width: int = 1600, height: int = 1000, dark: bool = False) -> None:
        """Load a page and wait until it is loaded."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self.messages, self.requested, self._loaded = [], [], False
        self._call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._receive()

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def settle(self) -> None:
        """Wait until everything in view is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 700)))")

    def screenshot(self, file: Path) -> None:
        """Write what is in view as PNG."""
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _call(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> Mapping[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._in, 1 << 16)
            assert read, "the browser ended"
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.messages.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(str(parameters["args"]))
        elif method == "Log.entryAdded":
            self.messages.append(str(parameters["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        return message

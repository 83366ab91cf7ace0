"""What the code of a plug-in does to the process in a run: variables of the environment, sleep, and text that it prints."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

import hocket
from hocket.hookspecs import Actions, Event
from hocket.hookspecs.events import between
from hocket_testkit.footprint import BELOW, changed, footprint

#: What every run changes, and what is compared by itself.
_APART = (
    "os.environ",
    "the global random numbers",
    "running threads",
    "the filters of warnings",
    "standard output and errors",
)


class Process:
    """The process before a run, and what the plug-in's package did to it since; all else is that of libraries."""

    def __init__(self, owned: Any) -> None:
        self._top = getattr(owned, "__module__", "").partition(".")[0]
        self._thread = threading.get_ident()
        self._before = footprint(BELOW)
        self._empty = not os.listdir()
        #: By name of the variable: where it was written.
        self._variables: dict[str, str] = {}
        #: By "sleep" and "print": how often it was called, and where at last.
        self.calls = {"sleep": (0, ""), "print": (0, "")}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the plug-in's package calls."""
        package = [each for name, each in list(sys.modules.items()) if name.partition(".")[0] == self._top]
        sleepers = [(each, key) for each in package for key, value in list(vars(each).items()) if value is time.sleep]
        watching: list[tuple[Any, str, Any]] = [
            (os, "putenv", self._variable(os.putenv)), (os, "unsetenv", self._variable(os.unsetenv)),
            (sys, "stdout", _Output(sys.stdout, lambda: self._call("print"))),
            *((module, key, self._sleeping(time.sleep)) for module, key in [(time, "sleep"), *sleepers]),
        ]  # fmt: skip
        originals = [(module, key, getattr(module, key)) for module, key, _ in watching]
        try:
            for module, key, value in watching:
                setattr(module, key, value)
            yield
        finally:
            for (module, key, value), (_, _, mine) in zip(originals, watching, strict=True):
                if getattr(module, key) is mine:
                    setattr(module, key, value)

    def differences(self) -> list[str]:
        """Return what is not as before, by name, with the line of the plug-in that changed it where that is known."""
        after = footprint(BELOW)
        names = [each for each in changed(self._before, after) if each not in _APART]
        before, there = self._before["os.environ"], after["os.environ"]
        # Libraries add variables when they are first used: a new one counts if the plug-in wrote it.
        different = [each for each in {**before, **self._variables} if before.get(each) != there.get(each)]
        at = {each: f" (set in {self._variables[each]})" for each in different if each in self._variables}
        return [*(f"the environment variable {each}{at.get(each, '')}" for each in sorted(different)), *names]

    def new_files(self) -> list[str]:
        """Return what is in the working directory now, if that was empty."""
        return sorted(os.listdir()) if self._empty else []

    def _variable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(name: Any, *value: Any) -> Any:
            if place := self._place():
                self._variables[os.fsdecode(name)] = place
            return function(name, *value)

        return call

    def _sleeping(self, function: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            self._call("sleep")
            function(seconds)

        return sleep

    def _call(self, name: str) -> None:
        if threading.get_ident() == self._thread and (place := self._place()):
            self.calls[name] = self.calls[name][0] + 1, place

    def _place(self) -> str:
        """Return the line that called, below functions of Python's own modules; empty if it is not the plug-in's."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if name != __name__ and name.partition(".")[0] not in sys.stdlib_module_names - {"__main__"}:
                own = name.partition(".")[0] == self._top
                return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if own else ""
            frame = frame.f_back
        return ""


class _Output:
    """Standard output that tells of each text."""

    def __init__(self, output: Any, tell: Callable[[], None]) -> None:
        self._output, self._tell = output, tell

    def write(self, text: str) -> int:
        if text.strip():
            self._tell()
        written: int = self._output.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


#: Events of each batch: before the run begins, surgery may draw the weights of new layers.
_BATCHES = between(Event.AFTER_DATALOADER, Event.BATCH_END)


class Draws:
    """Which global generators the hooks of an algorithm draw from in a batch, beside what the model draws."""

    def __init__(self, plugin: Any, model: nn.Module) -> None:
        #: By generator: the hook.
        self.found: dict[str, str] = {}
        self._forwards = 0
        model.register_forward_pre_hook(self._forward)
        if isinstance(plugin, hocket.Algorithm):
            for name in ("apply", *(each for each in vars(Actions) if not each.startswith("_"))):
                function = getattr(plugin, name, None)
                if function is not None and not inspect.isgeneratorfunction(function):
                    setattr(plugin, name, self._watched(name, function))

    def _forward(self, *_: Any) -> None:
        self._forwards += 1

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "apply" and args[0] not in _BATCHES:
                return function(*args, **kwargs)
            before, forwards = _states(), self._forwards
            result = function(*args, **kwargs)
            if forwards == self._forwards:
                self.found |= {each: name for each, state in _states().items() if before.get(each, state) != state}
            return result

        return call


def _states() -> dict[str, int]:
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy.random"] = keys.tobytes(), position
    return {name: hash(value) for name, value in states.items()}

"""The suite for commands of ``hocket``."""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from hocket.errors import Mistake
from hocket.hookspecs.command import Command
from hocket.plugins import registry
from hocket_testkit.conformance import Conformance
from hocket_testkit.footprint import changed, footprint


class CommandConformance(Conformance):
    """The tests that every command must pass. Define ``make``, and ``calls`` with command lines that can be run anywhere.

    Example:
        >>> import hocket
        >>> from hocket_cli.plugins import command
        >>> class TestPlugins(hocket.testkit.CommandConformance):
        ...     calls = {"list --kind schedules": 0}
        ...     def make(self):
        ...         return command
    """

    kind = "commands"
    #: Arguments, as they are typed after the command's name -> the expected exit code.
    calls: ClassVar[dict[str, int]] = {}
    test_make_gives_a_new_plugin_each_time = None  # type: ignore[assignment]  # its module has one
    test_implements_known_hooks_only = None  # type: ignore[assignment]  # it has no hooks
    test_has_a_summary = None  # type: ignore[assignment]  # see test_has_a_line_of_help

    def make(self) -> Command:
        """Return the command."""
        command: Command = super().make()
        return command

    def declared(self) -> Any:
        """Return the command, which the entry point names."""
        return self.make()

    def parser(self) -> argparse.ArgumentParser:
        """Return a new parser of the command's arguments."""
        command = self.make()
        parser = argparse.ArgumentParser(prog=f"hocket {self.plugin_name()}", description=command.summary)
        command.add_arguments(parser)
        return parser

    def test_is_a_command(self) -> None:
        """The entry point names a `hocket.hookspecs.command.Command`."""
        command = self.make()
        assert isinstance(command, Command), (
            f"It is a {type(command).__name__}. Write `command = Command(summary, add_arguments, run)` and name that object."
        )

    def test_has_a_line_of_help(self) -> None:
        """``hocket --help`` shows one line for it, and each argument says what it is for, or can be seen from its name."""
        command = self.make()
        assert len(command.summary.split()) >= 3 and "\n" not in command.summary, (
            f"The summary is {command.summary!r}. Say in one line of three words or more what the command does."
        )
        text = self.parser().format_help()
        assert command.summary.split()[0] in text

    def test_a_wrong_argument_is_refused(self) -> None:
        """An option that does not exist ends with an error of the parser, and runs nothing."""
        with pytest.raises((SystemExit, Mistake)) as refused, contextlib.redirect_stderr(io.StringIO()):
            self.parser().parse_args(["--no-such-option"])
        if isinstance(refused.value, SystemExit):
            assert refused.value.code == 2, f"A wrong option ends with exit code {refused.value.code!r}, not 2."

    def test_help_does_not_import_torch(self) -> None:
        """Its module is imported for ``--help``, and torch takes a second."""
        entry = next((e for e in registry.entries("commands") if e.name == self.plugin_name() and e.obj is None), None)
        if entry is None:
            pytest.skip("no entry point declares it")
        module, _, name = entry.target.partition(":")
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; import argparse, importlib\n"
            f"command = getattr(importlib.import_module({module!r}), {name!r})\n"
            "command.add_arguments(argparse.ArgumentParser()); sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, (
            f"Importing {entry.target} and adding its arguments imports torch. Import it in run(args). {done.stderr[-300:]}"
        )

    def test_returns_its_exit_code(self) -> None:
        """Each of `calls` returns its exit code, prints, and changes nothing in the process."""
        for line, expected in self.calls.items():
            before = footprint()
            code = self._run(line.split())
            assert type(code) is int, (
                f"`{line}` returns {code!r}. run(args) returns an int: 0, 1 if it found something wrong, 2 for a mistake."
            )
            assert code == expected, f"`{line}` returns the exit code {code}, expected {expected}."
            different = [name for name in changed(before, footprint()) if name != "the global random numbers"]
            assert not different, f"`{line}` leaves {', '.join(different)} changed in the process."

    def _run(self, argv: Sequence[str]) -> Any:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                return self.make().run(self.parser().parse_args(argv))
        except SystemExit as error:
            raise AssertionError(
                f"`{' '.join(argv)}` calls sys.exit({error.code!r}). Return the exit code, so that others can call the command."
            ) from None
        except Mistake:
            return 2

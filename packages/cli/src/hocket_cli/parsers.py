"""The parsers of commands, which say what to write instead of an option that does not exist."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn

from hocket.hookspecs.command import Command
from hocket.plugins import PluginError


class _Once(argparse._StoreAction):
    """Store the value of an argument. An option that is given twice is an error: its first value would have no effect."""

    _given: argparse.Namespace | None = None

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if option_string is not None and self._given is namespace:
            both = " ".join(f"{option_string} {value}" for value in (getattr(namespace, self.dest), values))
            raise PluginError(f"{both}: {parser._command} takes {_name(self)} once. Remove one of the two.")
        self._given = namespace
        super().__call__(parser, namespace, values, option_string)


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def add_subparsers(self, **options: Any) -> Any:
        """Add parsers of actions, each of which reports the options that it does not have."""
        return super().add_subparsers(parser_class=_ActionParser, **options)

    def error(self, message: str) -> NoReturn:
        """Raise PluginError that says what to write instead of an option that does not exist, or is missing."""
        if found := re.fullmatch(r"unrecognized arguments: (.*)", message):
            raise PluginError(self._unrecognized(found[1].split()))
        if found := re.match(r"argument (.+?): invalid choice: (['\"])(.*)\2 \(", message):
            raise PluginError(self._no_choice(found[1], found[3]))
        what = message[:1].upper() + message[1:]
        if found := re.fullmatch(r"the following arguments are required: (.*)", message):
            what = self._required(found[1].split(", "))
        elif found := re.fullmatch(r"argument (.+?): expected (.*)", message):
            what = f"{found[1]} of {self._command} needs {found[2]}{self._help(found[1])}"
        elif found := re.fullmatch(r"argument (.+?): invalid (int|float) value: (.*)", message):
            number = {"int": "an integer", "float": "a number"}[found[2]]
            what = f"{found[1]} of {self._command} takes {number}, not {found[3]}{self._help(found[1])}"
        elif found := re.fullmatch(r"argument (.+?): ignored explicit argument (.*)", message):
            what = f"{found[1]} of {self._command} takes no value, and {found[2]} was given"
        raise PluginError(f"{what}. Usage: {self._usage}.")

    def _required(self, names: list[str]) -> str:
        """Say which arguments are missing, and what they are."""
        needed = [each for each in self._actions if _name(each) in names and each.nargs != argparse.REMAINDER]
        about = [f"{self._command} needs {', '.join(map(_name, needed))}"]
        for each in needed:
            if isinstance(each, argparse._SubParsersAction):
                about.append(f"It is one of {', '.join(each.choices)}")
            else:
                about.append(f"{_name(each)} {'takes' if each.option_strings else 'is'} {each.help}")
        return ". ".join(about)

    def _help(self, name: str) -> str:
        text = next(each.help for each in self._actions if _name(each) == name)
        return f": {text}" if text else ""

    @property
    def _command(self) -> str:
        return self.prog.partition(" ")[2]

    @property
    def _usage(self) -> str:
        return " ".join(self.format_usage().split()).removeprefix("usage: ")

    def _no_choice(self, name: str, given: str) -> str:
        """Explain a word that is not among the choices of an argument."""
        from hocket.help import names  # only needed for error messages

        action = next(each for each in self._actions if _name(each) == name)
        choices = list(map(str, action.choices or ()))
        near = names.closest(given, choices)
        meant = f" Did you mean '{near}'?" if near else ""
        if isinstance(action, argparse._SubParsersAction):
            return f"{self._command} has no action '{given}'.{meant} Its actions are {', '.join(choices)}."
        return f"'{given}' is not a value for {name} of {self._command}.{meant} Write one of: {', '.join(choices)}."

    def _unrecognized(self, words: list[str]) -> str:
        """Explain overrides and other words that are written as options."""
        from hocket.help import names
        from hocket_cli.keys import keys
        from hocket_cli.yaml_messages import key_of  # only needed for error messages

        option = next((each for each in words if each.startswith("-")), words[0])
        name, equals, value = option.lstrip("-").partition("=")
        after = words[words.index(option) + 1 :]
        if not equals and after and not after[0].startswith("-"):
            value = after[0]
        if not option.startswith("-"):
            return f"{self._command} takes no argument '{option}'. Usage: {self._usage}."
        said = f"{self._command} has no option '{option}'."
        own = [each for action in self._actions for each in action.option_strings if each.startswith("--")]
        same = names.argument(name, [each[2:] for each in own])
        if near := [f"--{same}"] if same else difflib.get_close_matches(option, own, 1, 0.8):
            return f"{said} Did you mean {near[0]}?"
        known = keys() if any(each.dest == "changes" for each in self._actions) else {}
        key, write = name.replace("-", "_"), ""
        if (key in known and value) or (known and "." in name):
            write = f"A value of the configuration is changed without dashes: {key}={value or '…'}"
        elif text := names.listed(key, "options") if known else None:
            command = self.prog.rpartition(" ")[2]
            write = f"Write {text.format(command=command, file=value if value.endswith(('.yaml', '.yml')) else 'FILE')}"
        elif key in known:
            flag = isinstance(known[key].default, bool)
            write = f"A value of the configuration is changed without dashes: {key}={'true' if flag else '…'}"
        elif known and (text := key_of(key, value or "…", override=True)):
            write = f"Write {text}"
        return f"{said} {write or 'Its options are ' + ', '.join(own)}."


class _ActionParser(_Parser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the arguments of an action. argparse would name the command in an error about its surplus arguments."""
        parsed, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return parsed, others


def _name(action: argparse.Action) -> str:
    """Return the name of an argument, as argparse writes it in its messages."""
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def parser_of(name: str, command: Command) -> argparse.ArgumentParser:
    """Return the parser of a command's arguments."""
    parser = _Parser(prog=f"hocket {name}", description=command.summary, allow_abbrev=False)
    command.add_arguments(parser)
    return parser

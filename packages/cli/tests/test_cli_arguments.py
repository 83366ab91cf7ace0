"""The arguments of all commands: each has a help text, and a wrong one is an error that says what to write."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from hocket import plugins
from hocket.plugins import PluginError
from hocket_cli import main
from hocket_cli.parsers import parser_of


def without_help(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            described = {each.dest for each in action._choices_actions if each.help}
            yield from (f"{parser.prog} {name}" for name in action.choices if name not in described)
            for each in action.choices.values():
                yield from without_help(each)
        elif not action.help:
            yield f"{parser.prog} {action.option_strings or action.dest}"


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from options(each)
        elif action.option_strings and isinstance(action, argparse._StoreAction):
            yield parser, action


@pytest.mark.parametrize("name", plugins.names("commands"))
def test_an_option_with_one_value_is_given_once(name: str) -> None:
    for parser, action in options(parser_of(name, plugins.get("commands", name))):
        value = str(next(iter(action.choices or ["1"])))
        given = [action.option_strings[0], value]
        with pytest.raises(PluginError, match=r"once\. Remove one of the two"):
            parser.parse_known_args([*given, *given])


@pytest.mark.parametrize("name", plugins.names("commands"))
def test_every_argument_has_a_help_text(name: str) -> None:
    assert not list(without_help(parser_of(name, plugins.get("commands", name))))


def test_an_argument_without_a_help_text_is_reported() -> None:
    parser = argparse.ArgumentParser(prog="x")
    action = parser.add_subparsers().add_parser("bare")
    action.add_argument("--json")
    assert list(without_help(parser)) == ["x bare", "x bare ['--json']"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plugins new algorithm x1", "'algorithm' is not a value for kind of plugins new. Did you mean 'algorithms'?"),
        ("plugins list --kind callback", "for --kind of plugins list. Did you mean 'callbacks'?"),
        ("plugins new algorithms x --license GPL", "Write one of: MIT, Apache-2.0, BSD-3-Clause"),
        ("plugins lst", "plugins has no action 'lst'. Did you mean 'list'? Its actions are list, info"),
        ("plugins", "plugins needs action. It is one of list, info"),
        ("tune a.yaml --learning-rate", "tune has no option '--learning-rate'. Did you mean --lr?"),
        ("plugins list --jsn", "plugins list has no option '--jsn'. Did you mean --json?"),
        ("plugins list ema", "plugins list takes no argument 'ema'. Usage: hocket plugins list"),
        ("plugins check ema --timeout x", "--timeout of plugins check takes a number, not 'x': for one check"),
        ("plugins check --timeout", "--timeout of plugins check needs one argument: for one check"),
        ("plugins info", "plugins info needs name. name is the plug-in"),
        ("doctor --json=1", "--json of doctor takes no value, and '1' was given"),
        ("launch", "launch needs target. target is a Python script"),
        ("plugins check emma", "no algorithm 'emma'. Did you mean 'ema'?"),
        ("plugins info early-stoping", "no callback 'early-stoping'. Did you mean 'early-stopping'?"),
        ("plugins check zzzz", "There is no plug-in 'zzzz', nor one of a similar name"),
        ("export runs/a --to onnx --to safetensors", "--to onnx --to safetensors: export takes --to once. Remove one"),
        ("export a --out b x=1 --to onnx --out b", "--out b --out b: export takes --out once"),
        ("plugins check --timeout 1 --timeout 2", "--timeout 1.0 --timeout 2.0: plugins check takes --timeout once"),
        ("plan torch.nn:Linear", "It is an import path and not a configuration. Write `model: torch.nn:Linear`"),
    ],
)
def test_a_wrong_argument_is_an_error_that_says_what_to_write(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert expected in capsys.readouterr().err

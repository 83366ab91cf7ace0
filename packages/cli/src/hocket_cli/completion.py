"""Completion in shells: the scripts, and the candidates that they ask for with ``hocket --complete LINE``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hocket.plugins import KINDS as ALL_KINDS, PluginError, registry
from hocket_cli.keys import KIND_OF_KEY, LISTS, keys
from hocket_cli.parsers import parser_of

_OPTIONS = ("--help", "--no-plugins", "--print-completion", "--version")

#: The script of each shell. bash splits words at = and :, and replaces only what follows them.
SCRIPTS = {
    "bash": r"""_hocket() {
    local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}" word
    word="${line##*[[:space:]]}"
    COMPREPLY=($(hocket --complete "$line" 2>/dev/null))
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace
    [[ $word == *[=:]* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}")
}
complete -F _hocket hocket
""",
    "zsh": r"""#compdef hocket
_hocket() {
    local -a found
    found=("${(@f)$(hocket --complete "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    compadd -Q -S '' -- ${(M)found:#*[=/]}
    compadd -Q -- ${found:#*[=/]}
}
compdef _hocket hocket
""",
    "fish": r"""complete -c hocket -f -a '(hocket --complete (commandline -cp | string collect) 2>/dev/null)'
""",
}


def print_script(shells: Sequence[str]) -> int:
    """Print the script of a shell. Raises PluginError for any other."""
    if len(shells) != 1 or shells[0] not in SCRIPTS:
        raise PluginError(
            f"There is no completion for '{' '.join(shells)}'. Type hocket --print-completion bash, zsh or fish; for bash, "
            'write eval "$(hocket --print-completion bash)" into ~/.bashrc.'
        )
    print(SCRIPTS[shells[0]], end="")
    return 0


def print_candidates(line: str = "") -> int:
    """Print the words that may replace the last word of a command line, one per line."""
    print("\n".join(candidates(line)))
    return 0


def completes(action: argparse.Action, by: Callable[[str], Iterable[str]]) -> None:
    """Let a function of the word's beginning complete the values of an argument, instead of files."""
    vars(action)["completer"] = by


def candidates(line: str) -> list[str]:
    """Return the words that may replace the last word of a command line."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        words = line.split()
    current = "" if not words or line[-1:].isspace() else words.pop()
    words = [word for word in words[1:] if word != "--no-plugins"]
    if words == ["--print-completion"]:
        found: Iterable[str] = SCRIPTS
    elif not words:
        found = [*registry.names("commands"), *(_OPTIONS if current.startswith("-") else ())]
    else:
        try:
            command = registry.get("commands", words[0])
        except PluginError:
            return []
        found = _of_parser(parser_of(words[0], command), words[1:], current)
    return sorted({word for word in found if word.startswith(current)})


def _of_parser(parser: argparse.ArgumentParser, words: Sequence[str], current: str) -> Iterable[str]:
    positionals = [action for action in parser._actions if not action.option_strings]
    options = {name: action for action in parser._actions for name in action.option_strings}
    taken, waiting = 0, None
    for index, word in enumerate(words):
        if waiting is not None:
            waiting = None
        elif word in options:
            waiting = options[word] if options[word].nargs != 0 else None
        elif taken < len(positionals):
            action = positionals[taken]
            if isinstance(action, argparse._SubParsersAction):
                inner = action.choices.get(word)
                return [] if inner is None else _of_parser(inner, words[index + 1 :], current)
            taken += action.nargs not in ("*", "+", argparse.REMAINDER)
    if waiting is not None:
        return _values(waiting, current)
    if current.startswith("-"):
        return options
    return _values(positionals[taken], current) if taken < len(positionals) else []


def _values(action: argparse.Action, current: str) -> Iterable[str]:
    if action.choices is not None:
        return [str(each) for each in action.choices]
    by: Callable[[str], Iterable[str]] = getattr(action, "completer", paths)
    return by(current)


def paths(current: str, suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """Return the files and folders that begin so; files only with one of these suffixes."""
    folder, _, name = current.rpartition("/")
    root = Path(folder or ("/" if current.startswith("/") else "."))
    prefix = current[: len(current) - len(name)]
    if not root.is_dir():
        return []
    shown = [each for each in root.iterdir() if each.name.startswith(name) and (name or each.name[0] != ".")]
    return [
        f"{prefix}{each.name}" + ("/" if each.is_dir() else "")
        for each in shown
        if each.is_dir() or each.name.endswith(suffixes)
    ]


def configurations(current: str) -> list[str]:
    """Return YAML files."""
    return paths(current, (".yaml", ".yml"))


def overrides(current: str) -> list[str]:
    """Return ``key=``, or ``key=value`` with the names of plug-ins, true and false."""
    key, equals, _ = current.partition("=")
    if not equals:
        return [f"{each}=" for each in keys()]
    about = keys().get(key)
    if about is None:
        return []
    values = ["true", "false"] if isinstance(about.default, bool) else []
    if key in KIND_OF_KEY:
        values = [f"[{name}]" if key in LISTS else name for name in registry.names(KIND_OF_KEY[key])]
    return [f"{key}={value}" for value in values]


def plugin_names(current: str) -> list[str]:
    """Return the names of all installed plug-ins."""
    return sorted({name for kind in ALL_KINDS for name in registry.names(kind)})

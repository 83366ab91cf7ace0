"""Configuration files as trees of values that know where they were written."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hocket.basics import safe_files
from hocket.plugins import PluginError

#: Limits of a configuration: its bytes, its levels, and the values that aliases unfold into beyond a few for each written one.
_BYTES, _DEPTH, _VALUES = 1 << 20, 64, 10_000


class ConfigError(PluginError):
    """A configuration is wrong. The message begins with file and line, or with the override on the command line."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(safe_files.printable(f"{where}: {' '.join(message.split())}"))
        self.where, self.text = where, message


@dataclass(slots=True)
class Node:
    """A value of a configuration."""

    #: A scalar, a list of nodes or a dict of nodes.
    value: Any
    #: ``file:line``, or the override.
    where: str
    #: The place of its key; that of the value for items of a list.
    key: str
    #: A scalar as it was written, unless it is in quotes.
    text: str | None = None

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        return [child.plain() for child in self.value] if isinstance(self.value, list) else self.value

    def inside(self) -> Iterator[tuple[Any, Node]]:
        """Yield every key or index with its value, at any depth."""
        children = self.value.items() if isinstance(self.value, dict) else enumerate(self.value)
        for name, child in children:
            yield name, child
            if isinstance(child.value, dict | list):
                yield from child.inside()


def as_node(value: Any, of: Node) -> Node:
    """Return a plain value as a node at the place of another."""
    if isinstance(value, dict):
        return Node({key: as_node(each, of) for key, each in value.items()}, of.where, of.where)
    if isinstance(value, list | tuple):
        return Node([as_node(each, of) for each in value], of.where, of.where)
    return Node(value, of.where, of.where)


class _Resolver(yaml.resolver.BaseResolver):
    """Scalars of YAML 1.2: ``1e-3`` is a number; ``on``, ``no``, ``1:30``, ``1_000``, ``007`` and ``2024-01-01`` are text."""


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*|0x[0-9a-fA-F]+|0o[0-7]+)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
):
    _Resolver.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})$"), list(_first))


class _Loader(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer,
              yaml.constructor.SafeConstructor, _Resolver):  # fmt: skip
    def __init__(self, stream: str) -> None:
        yaml.reader.Reader.__init__(self, stream)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        yaml.constructor.SafeConstructor.__init__(self)
        _Resolver.__init__(self)


class _Dumper(yaml.emitter.Emitter, yaml.serializer.Serializer, yaml.representer.SafeRepresenter, _Resolver):
    def __init__(self, stream: Any, **style: Any) -> None:
        yaml.emitter.Emitter.__init__(self, stream, width=style["width"], allow_unicode=style["allow_unicode"])
        yaml.serializer.Serializer.__init__(self)
        flow, order = style["default_flow_style"], style["sort_keys"]
        yaml.representer.SafeRepresenter.__init__(self, default_flow_style=flow, sort_keys=order)
        _Resolver.__init__(self)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def analyze_scalar(self, scalar: str) -> Any:
        """Decide in which styles a text reads as it was: not every line break does without an escape, nor ``${`` unquoted."""
        found = super().analyze_scalar(scalar)
        if not set("\x85\u2028\u2029").isdisjoint(scalar):
            found.allow_flow_plain = found.allow_block_plain = found.allow_single_quoted = found.allow_block = False
        elif "${" in scalar:
            found.allow_flow_plain = found.allow_block_plain = False
        return found


def dump(value: Any) -> str:
    """Return a plain value as YAML that `read` reads as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)


def flow(value: Any) -> str:
    """Return a plain value as YAML in one line, as messages quote it."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"), default_flow_style=True
    )
    text = text.removesuffix("\n").removesuffix("\n...")
    return re.sub(r"'([\w.]+:[A-Za-z_][\w.]*|…)'(?=[,:}\]]|$)", r"\1", text)  # import paths need no quotes


def read(name: str, keep: str = "") -> Node:
    """Read a file, whose values are a mapping, without the keys that begin with x-, except ``keep``. Raises ConfigError."""
    root = parse(text_of(name), name)
    for key in [key for key in root.value if isinstance(key, str) and key.startswith("x-") and key != keep]:
        del root.value[key]  # a place for anchors
    return root


def text_of(name: str) -> str:
    """Return the text of a configuration file. Raises ConfigError."""
    file = Path(name)
    if file.suffix == ".py":
        quoted = shlex.quote(name)
        raise ConfigError(
            name,
            f"It is a Python program and not a configuration. Write `python {quoted}`, or `hocket launch {quoted}` for several "
            "processes; `hocket train --print-config > config.yaml` writes a configuration.",
        )
    if re.fullmatch(r"[\w.]+:[A-Za-z_][\w.]*", name) and not file.exists():
        raise ConfigError(
            name,
            f"It is an import path and not a configuration. Write `model: {name}` in a YAML file, and give that; `hocket train "
            "--print-config > config.yaml` writes one with every key.",
        )
    try:
        return safe_files.text(file, _BYTES)
    except UnicodeDecodeError as error:
        raise ConfigError(name, f"It is not a text file in UTF-8: {error}. Save it as UTF-8.") from None
    except OSError as error:
        raise ConfigError(name, f"{error.strerror}. {_files(file)}") from None


def parse(text: str, name: str) -> Node:
    """Parse the text of a file, whose values are a mapping. Raises ConfigError."""
    root = _parse(text, name)
    if root is None or not isinstance(root.value, dict):
        given = "It is empty." if root is None or root.value is None else "It is a text."
        write = "Write keys, or let `hocket train --print-config > config.yaml` write a file with every key."
        if root is not None and isinstance(root.value, list):
            given, write = "It is a list.", "Remove the '- ' before the keys."
        raise ConfigError(
            f"{name}:1", f"{given} A configuration is a mapping of keys to values, such as `duration: 10ep`. {write}"
        )
    root.where = root.key = name
    return root


def _files(missing: Path) -> str:
    folder = missing if missing.is_dir() else missing.parent
    found = sorted(each.as_posix() for each in folder.glob("*.y*ml")) if folder.is_dir() else []
    if not found:
        return "Give a YAML file; `hocket train --print-config > config.yaml` writes one with every key."
    near = difflib.get_close_matches(missing.as_posix(), found, 1)
    return f"Did you mean '{near[0]}'?" if near else f"The YAML files there are {', '.join(found[:8])}."


def parse_value(text: str, where: str) -> Node:
    """Parse the value of an override as YAML. A value that is not valid YAML is read as text."""
    try:
        return _parse(text, where, lines=False) or Node(None, where, where, text)
    except ConfigError:
        return Node(text, where, where, text)


def _parse(text: str, name: str, lines: bool = True) -> Node | None:
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        tree = _Tree(loader, name, lines)
        tree.measure(node)
        return tree.node(node)
    except RecursionError:
        raise ConfigError(name, _DEEP) from None
    except yaml.MarkedYAMLError as error:
        # The place is where the text began.
        begun = "end of stream" in (error.problem or "") or "simple key" in (error.context or "")
        mark = (error.context_mark if begun else None) or error.problem_mark
        tab = "\t" in text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else False
        hint = "Indent with spaces, not tabs." if tab else _hint(error, text)
        place = f"{name}:{mark.line + 1}" if mark and lines else name
        context = f"{error.context}, " if error.context else ""
        raise ConfigError(place, f"This is not YAML: {context}{error.problem}. {hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(name, f"This is not YAML: {error}.") from None
    finally:
        if loader is not None:
            loader.dispose()


_DEEP = f"Its values are nested in more than {_DEPTH} levels. Write a flatter configuration."
_INTERPOLATION = (
    "hocket replaces neither ${…} nor {{…}}: write the value, give it on the command line, such as seed=3 or "
    'folder="$HOME/runs", or put the text into quotes if it is meant as it stands.'
)


def _hint(error: yaml.MarkedYAMLError, text: str) -> str:
    """Return what to write for text that is not YAML."""
    problem = f"{error.context} {error.problem}"
    lines = text.splitlines()
    marks = [each.line for each in (error.context_mark, error.problem_mark) if each is not None]
    about = [lines[each] for each in marks if each < len(lines)]
    if any("${" in each or "{{" in each for each in about):
        return _INTERPOLATION
    if "undefined alias" in problem:
        return "An alias *name repeats a value that stands further up as &name. Write that anchor, or put the text into quotes."
    if "another document" in problem:
        return "A file is one configuration. Remove the line `---`, or put what follows it into another file."
    for each in about:
        if (found := re.match(r"\s*(?:- )?([\w-]+):(?![\s:/])(\S.*)", each)) and "{" not in each:
            return f"A space follows the colon. Write `{found[1]}: {found[2]}`."
    if "mapping values are not allowed" in problem or "block mapping" in problem or "block collection" in problem:
        return "Keys of one mapping begin in the same column, and a text with ': ' needs quotes."
    if "flow" in problem or "quoted" in problem or "end of stream" in problem:
        return "Close each bracket and quote, and write commas between items."
    return "Texts with ': ', ' #', brackets or quotes need quotes."


class _Tree:
    """Converts yaml's nodes, with merge keys and aliases resolved."""

    def __init__(self, loader: _Loader, name: str, lines: bool) -> None:
        self._loader, self._name, self._lines = loader, name, lines

    def _where(self, node: Any) -> str:
        return f"{self._name}:{node.start_mark.line + 1}" if self._lines else self._name

    def measure(self, root: Any) -> None:
        """Raise ConfigError for values that contain themselves, are nested deeply, or are repeated by aliases of aliases.

        Each value is visited once, however often it is repeated.
        """
        found: dict[int, tuple[int, int]] = {}  # the values that it unfolds into, and its levels
        entered: set[int] = set()
        left = [root]
        while left:
            node = left[-1]
            if isinstance(node, yaml.MappingNode):
                children = [child for pair in node.value for child in pair]
            else:
                children = node.value if isinstance(node, yaml.SequenceNode) else []
            if id(node) in entered:
                left.pop()
                below = [found[id(child)] for child in children]
                found[id(node)] = 1 + sum(n for n, _ in below), 1 + max((depth for _, depth in below), default=0)
                continue
            entered.add(id(node))
            for child in children:
                if id(child) not in entered:
                    left.append(child)
                elif id(child) not in found:
                    raise ConfigError(self._where(child), "This value contains itself by an alias. Write it out.")
        values, levels = found[id(root)]
        if levels > _DEPTH:
            raise ConfigError(self._name, _DEEP)
        if values > _VALUES + 4 * len(found):
            raise ConfigError(
                self._name,
                f"Its aliases repeat each other so often that {len(found):,} values unfold into {values:,}. Write out what is "
                "meant, or let fewer anchors contain aliases.",
            )

    def node(self, node: Any, key: str | None = None) -> Node:
        where = self._where(node)
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            raise ConfigError(
                where, f"The tag {node.tag} has no meaning here. Name a class as `{{module:Class: {{…}}}}`."
            )
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node), where, key or where)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.node(item) for item in node.value], where, key or where)
        if node.style is None and "${" in node.value:
            raise ConfigError(where, f"{node.value} is not filled in. {_INTERPOLATION}")
        return Node(self._scalar(node), where, key or where, node.value if node.style is None else None)

    def _scalar(self, node: Any) -> Any:
        try:
            return self._loader.construct_object(node)
        except yaml.YAMLError:
            raise
        except Exception as error:  # PyYAML checks no value of an explicit tag, and no number of thousands of digits
            short = node.value if len(node.value) <= 40 else f"{node.value[:40]}…"
            kind = node.tag.rpartition(":")[2]
            text = f"{short!r} is not a value of the kind {kind!r}: {error}. Write another, or put it into quotes."
            raise ConfigError(self._where(node), text) from None

    def _mapping(self, node: Any) -> dict[Any, Node]:
        own: dict[Any, Node] = {}
        merged: dict[Any, Node] = {}
        for name, child in node.value:
            where = self._where(name)
            if name.tag == "tag:yaml.org,2002:merge":
                for each in child.value if isinstance(child, yaml.SequenceNode) else [child]:
                    if not isinstance(each, yaml.MappingNode):
                        raise ConfigError(
                            where, "`<<` merges mappings: write `<<: *name`, with the anchor of a mapping."
                        )
                    merged = self._mapping(each) | merged
                continue
            if not isinstance(name, yaml.ScalarNode):
                braces = name.start_mark.index == node.start_mark.index + 1  # {{…}}
                write = _INTERPOLATION if braces else "Write a name before the colon, or put the key into quotes."
                raise ConfigError(where, f"A key is a list or a mapping; it should be text. {write}")
            key = self._scalar(name)
            if key in own:
                said, write = f"'{name.value}' is given twice", "Remove one of them."
                first = next(each for each in own if each == key)
                if type(first) is not type(key):  # as 1 and true
                    said, write = f"{flow(key)} and {flow(first)} are one key in Python", "Put one of them into quotes."
                raise ConfigError(where, f"{said}, first in {own[key].key}. {write}")
            own[key] = self.node(child, where)
        return merged | own


def suggestion(name: object, known: Iterable[str], otherwise: str | None = None, cutoff: float = 0.6) -> str:
    """Return the known name that resembles one; else ``otherwise``, or all known names."""
    known = list(known)
    folded = {each.lower().replace("-", "_"): each for each in known}
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), folded, 1, cutoff)
    if near:
        return f"Did you mean '{folded[near[0]]}'?"
    return otherwise if otherwise is not None else f"Known: {', '.join(known)}." if known else ""

"""The forms in which a configuration gives plug-ins, batches and metrics, and what to write in place of others."""

from __future__ import annotations

import re
from inspect import isroutine, signature
from typing import Any

from hocket.basics.specification import parse_spec
from hocket.help import names
from hocket.plugins import Entry, PluginConfigError, PluginError, registry
from hocket_cli.document import ConfigError, Node, as_node, flow, suggestion
from hocket_cli.imports import as_call, reference, resolve
from hocket_cli.yaml_messages import as_given, in_yaml

# --- a plug-in


def named(node: Node, kind: str, at: str) -> tuple[str, Node]:
    """Return the name of a plug-in and the node of its arguments, whose key is the place of the name."""
    value = node.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = node.text or str(value)  # precision: 16
    if isinstance(value, str):
        return from_text(value, node, at)
    if isinstance(value, dict) and len(value) == 1:
        ((name, inside),) = value.items()
        return str(name), inside
    example = (registry.names(kind) or ["name"])[0]
    raise ConfigError(
        node.where,
        f"{as_given(node, at)} does not name one {registry.singular(kind)}. Write `{example}`, "
        f"`{{{example}: {{argument: value}}}}` or `module:Class`.",
    )


def from_text(text: str, node: Node, at: str) -> tuple[str, Node]:
    """Return what `named` does for a text, such as ``ema(half_life=30ba)``, at the place of a node. Raises ConfigError."""
    try:
        name, config = parse_spec(text)
    except PluginConfigError as error:
        raise ConfigError(node.where, f"{at}: {error}") from None
    return name, as_node(config, node)


def find(name: str, inside: Node, kind: str, at: str) -> tuple[Entry, Any]:
    """Return the entry of a plug-in that `named` returned, and its class. Raises ConfigError."""
    try:
        entry = registry.find(kind, name)
        return entry, entry.load()
    except PluginError as error:
        raise ConfigError(inside.key, f"{at}: {in_yaml(error)}") from error


def check_nested(node: Node, kind: str, at: str) -> None:
    """Refuse the name of a plug-in beside its arguments. Raises ConfigError that says where they stand."""
    known = _names(kind)
    texts = [each.value for each in node.value.values()] if isinstance(node.value, dict) else []
    aliases = {text: names.alias(kind, text, known) or "" for text in texts if isinstance(text, str)}
    theirs = next(filter(aliases.get, aliases), "")
    if write := as_call(node, {*known, theirs}):
        write = write.replace(theirs, aliases.get(theirs, ""), 1)
        raise ConfigError(node.where, f"{as_given(node, at)} is a mapping of the name and the arguments. {write}")


def check_groups(groups: Node | None, cls: Any, name: str, at: str) -> None:
    """Raise ConfigError for a parameter group without a pattern, or with an option that is almost one of the optimizer."""
    if groups is None:
        return
    from hocket.optim import groups as of_optimizers  # imports torch, without which overrides are read

    known = ["match", *signature(cls).parameters]
    for node in groups.value if isinstance(groups.value, list) else ():
        for key, child in node.value.items() if isinstance(node.value, dict) else ():
            if key not in known and (near := suggestion(key, known, "")):
                raise ConfigError(child.key, f"{at}.{name}: A group has no option '{key}'. {near}")
    try:
        of_optimizers.check_groups(groups.plain())
    except PluginError as error:
        raise ConfigError(groups.where, f"{at}.{name}: {in_yaml(error)}") from None


def _names(kind: str) -> set[str]:
    """Return the names of plug-ins of a kind, with and without their distributions."""
    return {*registry.names(kind), *(f"{each.dist}/{each.name}" for each in registry.entries(kind))}


# --- several plug-ins


def check_list(node: Node, kind: str, key: str) -> None:
    """Refuse plug-ins that are not in a list. Raises ConfigError."""
    if isinstance(node.value, list):
        return
    items = [node]
    if isinstance(node.value, dict) and not reference(node):
        items = [Node({name: each} if each.value else name, each.where, each.key) for name, each in node.value.items()]
    elif isinstance(node.value, str) and re.fullmatch(r"[\w-]+(,\s*[\w-]+)+", node.value):
        items = [Node(each.strip(), node.where, node.key) for each in node.value.split(",")]
    for each in items:
        find(*named(each, kind, key), kind, key)  # the name may be wrong, too
    write = flow([each.plain() for each in items])
    raise ConfigError(node.where, f"{as_given(node, key)} is not a list. Write `{key}: {write}`.")


def check_commas(node: Node, at: str) -> None:
    """Raise ConfigError for ``[name(a=1, b=2)]`` without quotes, which YAML splits at the comma inside the brackets."""
    if isinstance(node.value, dict):
        pieces = [key if child.value is None else child.value for key, child in node.value.items()]
    else:
        pieces = [child.value for child in node.value] if isinstance(node.value, list) else []
    joined, opened = "", 0
    for piece in pieces:
        if not isinstance(piece, str):
            joined, opened = "", 0
            continue
        joined, opened = f"{joined}, {piece}" if opened else piece, opened + piece.count("(") - piece.count(")")
        if not opened and joined != piece:
            quote = '"' if "'" in joined else "'"
            raise ConfigError(
                node.where,
                f"{at}: YAML ends a text in [ ] and {{ }} at a comma, also inside of `{joined}`. Put it in quotes: "
                f"{quote}{joined}{quote}; or write `{_as_mapping(joined)}`.",
            )


def _as_mapping(text: str) -> str:
    try:
        name, config = parse_spec(text)
    except PluginConfigError:
        return "{name: {key: value}}"
    return flow({name: config})


def by_name(node: Node, kind: str) -> bool:
    """Whether a mapping is several optimizers or schedules by name, and not the arguments of one. Raises ConfigError."""
    if not isinstance(node.value, dict) or reference(node) is not None:
        return False
    if len(node.value) != 1:
        if node.value and not any(_names_one(each, kind) for each in node.value.values()):
            raise ConfigError(
                node.where,
                f"{', '.join(map(str, node.value))} are {len(node.value)} {kind}, and the file does not say which "
                "parameters each trains. Write one; or name each, an optimizer by the submodule that it trains: "
                "`{encoder: {adamw: {lr: 0.1}}, head: {sgd: {lr: 0.1}}}`.",
            )
        return True
    ((name, inner),) = node.value.items()
    return isinstance(inner.value, str) or (name not in _names(kind) and _names_one(inner, kind))


def _names_one(node: Node, kind: str) -> bool:
    """Whether a value is a plug-in, and not the arguments of one."""
    if isinstance(node.value, str) or reference(node) is not None:
        return True
    return isinstance(node.value, dict) and len(node.value) == 1 and not _names(kind).isdisjoint(node.value)


# --- batches and metrics


def check_batches(node: Node, at: str) -> None:
    """Refuse functions, numbers and texts in a list that stands for batches. Raises ConfigError."""
    if isinstance(node.value, dict) and at == "eval_data" and reference(node) is None:
        for label, child in node.value.items():
            check_batches(child, f"{at}.{label}")
    for each in node.value if isinstance(node.value, list) else ():
        found = reference(each)
        if not isinstance(each.value, dict | list) and (found is None or isroutine(resolve(found))):
            given = flow(each.plain())
            write = given if found and len(node.value) == 1 else "module:name"
            raise ConfigError(
                each.where,
                f"{at}: A list has the batches themselves, and {given} is {'a function' if found else 'not a batch'}. Write "
                f"`{at}: {write}`, for batches that a function returns"
                + (f"; for several sets, a mapping such as `{at}: {{test: {write}}}`." if at == "eval_data" else "."),
            )


def check_metrics(node: Node, key: str) -> None:
    """Refuse mappings of names to metrics in a list. Raises ConfigError."""
    for each in node.value if isinstance(node.value, list) else ():
        if isinstance(each.value, dict) and reference(each, dotted=True) is None:
            raise ConfigError(
                each.where,
                f"{key}: items of a list have no names, and this one is {flow(each.plain())}. Write "
                f"`{key}: {flow(_metrics_by_name(node))}`.",
            )


def _metrics_by_name(node: Node) -> dict[str, Any]:
    """Return the mapping that a list means: of metrics and of mappings of names to metrics."""
    found: dict[str, Any] = {}
    for each in node.value:
        path, plain = reference(each, dotted=True), each.plain()
        name = re.split("[:.]", path.path if path else str(plain))[-1]
        found |= plain if isinstance(plain, dict) and path is None else {name: plain}
    return found

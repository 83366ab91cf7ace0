"""Specifications: build a plug-in from a name, a name with arguments, a configuration, a class or an instance."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hocket.basics.kinds import misfit
from hocket.basics.plugin_errors import BrokenPluginError, PluginConfigError
from hocket.basics.specification import literal, parse_spec
from hocket.help import names as others
from hocket.help.ours import is_ours
from hocket.hookspecs import HOOKS, PrecisionHooks, PrecisionLike, StrategyHooks, StrategyLike
from hocket.hookspecs.attachment import Attachment
from hocket.plugins import registry, signatures

if TYPE_CHECKING:
    from hocket.basics.types import PluginLike


def build(kind: str, spec: PluginLike, *arguments: object) -> Attachment:
    """Build the plug-in that ``spec`` describes.

    Args:
        kind: one of `hocket.plugins.KINDS`.
        spec: ``"name"``, ``"distribution/name"``, ``"name(key=value, …)"``, ``{"name": {"key": value}}``, a class, or an
            instance.
        arguments: leading positional arguments of the class, such as the parameters for an optimizer.

    Raises:
        PluginConfigError: the specification cannot be understood or does not fit the signature of the class.
        UnknownPluginError, AmbiguousPluginError, BrokenPluginError: the name is unknown or ambiguous, or the plug-in is broken.
    """
    if isinstance(spec, str | Mapping):
        name, config = read(kind, spec)
    elif isinstance(spec, type):
        _check_foreign(kind, spec)
        if wrong := misfit(kind, spec):
            near = others.alias(kind, spec.__name__, registry.names(kind))
            raise PluginConfigError(
                f"{spec.__name__} is not one of the {kind}: {wrong}. Give a name such as "
                f"'{near or (registry.names(kind) or ['name'])[0]}', or a subclass of {_base(kind)}."
            )
        return _attachment(kind, spec, _make(kind, _name_of(kind, spec), spec, arguments, {}), {})
    else:
        _check_instance(kind, spec)
        attachment = _attachment(kind, type(spec), spec, {})
        attachment.instance = True
        return attachment
    entry = registry.find(kind, name)
    plugin = _make(kind, entry.name, entry.load(), arguments, config)
    return Attachment(kind, entry.name, plugin, entry.dist, entry.version, config)


def read(kind: str, spec: str | Mapping[Any, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments that a text or mapping gives. Raises PluginConfigError if it gives none."""
    return _from_text(kind, spec) if isinstance(spec, str) else _from_mapping(kind, spec)


def _from_text(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    try:
        return parse_spec(text)
    except PluginConfigError as error:
        if any(entry.name == text.strip() for entry in registry.entries(kind)):
            registry.find(kind, text.strip())  # raises an error that explains why this name cannot be used
        known = registry.names(kind)
        word, _, rest = re.sub(r"[(,]\s*", " ", text.strip(" )"), count=1).partition(" ")
        near = others.alias(kind, word, known) if word else None
        arguments = rest.strip() if "=" in rest else "key=value"
        error.add_note(f"The {kind} are {', '.join(known)}. Write '{near or (known or ['name'])[0]}({arguments})'.")
        raise


def _from_mapping(kind: str, spec: Mapping[Any, Any]) -> tuple[str, dict[str, Any]]:
    if len(spec) == 1:
        ((name, config),) = spec.items()
        if isinstance(name, str) and (config is None or isinstance(config, Mapping)):
            return name, {str(key): value for key, value in (config or {}).items()}
        if name in registry.names(kind):
            known = [*inspect.signature(registry.find(kind, name).load()).parameters, "key"]
            first = next(each for each in known if each not in ("params", "optimizer"))
            raise PluginConfigError(f"{spec!r} names no argument. Write {{{name!r}: {{{first!r}: {config!r}}}}}.")
    name = {"optimizers": "adamw", "schedules": "cosine"}.get(kind)
    write = "{'name': {'key': value}}" if name is None or not spec else f"{{{name!r}: {dict(spec)!r}}}"
    raise PluginConfigError(
        f"{dict(spec)!r} does not name one of the {kind}: {', '.join(registry.names(kind))}. Write {write}, with one name."
    )


#: The members that an instance of a kind must have.
_CONTRACTS: dict[str, tuple[type, ...]] = {
    "strategies": (StrategyLike, StrategyHooks),
    "precisions": (PrecisionLike, PrecisionHooks),
}


def _members(contracts: tuple[type, ...]) -> list[str]:
    return sorted({name for cls in contracts for name in [*vars(cls), *cls.__annotations__] if name[0] != "_"})


def _check_instance(kind: str, obj: object) -> None:
    if obj is None or isinstance(obj, bool | int | float | bytes | list | tuple | set):
        known = registry.names(kind)
        near = others.alias(kind, str(obj), known) or (known or ["name"])[0]
        raise PluginConfigError(
            f"{obj!r} is not one of the {kind}, which are {', '.join(known)}. Give a name such as '{near}', "
            "{'name': {'key': value}}, or an instance."
        )
    _check_foreign(kind, obj)
    if kind == "algorithms" and not (hasattr(obj, "apply") and hasattr(obj, "events")):
        raise PluginConfigError(
            f"{type(obj).__name__} is not an algorithm: it has no `events` and apply(event, state). Subclass hocket.Algorithm, "
            "or pass it in «callbacks=[…]»."
        )
    if kind in _CONTRACTS and (missing := [name for name in _members(_CONTRACTS[kind]) if not hasattr(obj, name)]):
        raise PluginConfigError(
            f"{type(obj).__name__} is not a {registry.singular(kind)}: it has no {', '.join(missing[:4])}"
            f"{f' and {len(missing) - 4} more' if len(missing) > 4 else ''}. Subclass "
            f"{_base(kind)}, which has a default for everything."
        )
    if kind == "callbacks" and hasattr(obj, "all_ranks"):
        raise PluginConfigError(
            f"{type(obj).__name__} is a logger; pass it in «loggers=[…]», so that only one rank writes."
        )
    if kind in ("callbacks", "loggers") and hasattr(obj, "apply") and hasattr(obj, "events") and hasattr(obj, "phase"):
        raise PluginConfigError(f"{type(obj).__name__} is an algorithm; pass it in «algorithms=[…]».")


def _base(kind: str) -> str:
    """Return the base class of a kind of plug-ins, as users import it."""
    name, public = registry.singular(kind).capitalize(), "Algorithm Callback Logger Strategy Precision Device"
    return f"hocket.{name}" if name in public.split() else "its class"


def _check_foreign(kind: str, obj: object) -> None:
    """Raise PluginConfigError for a plug-in of another library, and for an object without any hook."""
    cls = obj if isinstance(obj, type) else type(obj)
    if any(is_ours(base.__module__) for base in cls.__mro__):
        return
    if library := others.library(obj):
        known = registry.names(kind)
        near = others.alias(kind, cls.__name__, known)
        write = others.elsewhere(kind, cls.__name__)
        write = write or (f"Write {near!r}" if near else f"Write one of {', '.join(known)}")
        raise PluginConfigError(
            f"{cls.__name__} is one of the {kind} of {library}, which hocket does not call. {write}; or subclass {_base(kind)}."
        )
    if kind in ("callbacks", "loggers") and not any(hasattr(obj, hook) for hook in HOOKS - {"close", "flush"}):
        raise PluginConfigError(
            f"{obj!r} is given in {kind}=, but implements no hook. Write a class: class Mine({_base(kind)}) with methods such "
            "as batch_end(self, state) or epoch_end(self, state); `hocket plugins hooks` prints them all."
        )


def _attachment(kind: str, cls: type, obj: object, config: Mapping[str, Any]) -> Attachment:
    entry = registry.entry_of(kind, cls)
    if entry is None:
        return Attachment(kind, _name_of(kind, cls), obj, None, None, config)
    return Attachment(kind, entry.name, obj, entry.dist, entry.version, config)


def _name_of(kind: str, cls: type) -> str:
    """Return the declared name of a class, or else its class name in kebab case."""
    entry, words = registry.entry_of(kind, cls), r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return entry.name if entry else re.sub(words, "-", cls.__name__).lower()


def _written(kind: str, name: str, cls: Any, arguments: Sequence[str]) -> str:
    """Return how to give a plug-in its arguments: by its name, or as an instance if it has none."""
    values = {argument: others.example(cls, argument) for argument in arguments}
    if registry.entry_of(kind, cls) is None:
        return f"an instance, {cls.__name__}({', '.join(f'{key}={value}' for key, value in values.items())})"
    return f"{{'{name}': {{{', '.join(f'{key!r}: {value}' for key, value in values.items())}}}}}"


def _make(kind: str, name: str, cls: Any, arguments: tuple[object, ...], config: Mapping[str, Any]) -> Any:
    """Check the configuration against the signature of the class, and instantiate it."""
    what = f"{registry.singular(kind)} '{name}'"
    if not callable(cls):
        raise BrokenPluginError(
            f"{what} is declared as {cls!r}, which is not a class. Its distribution has to name one in its entry point."
        )
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):  # some built-ins have none
        return cls(*arguments, **config)
    parameters = list(signature.parameters.values())[len(arguments) :]
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    shown = signature.replace(parameters=parameters, return_annotation=signature.empty)
    takes = f"Its signature is {name}{shown}".replace("'", "").replace('"', "")
    for key, value in config.items():
        if key not in known and not anything:
            near = others.argument(key, known) or others.closest(key, known, 0.5)
            unit = others.listed(key, "units")
            hint = f" Write «{near}='{value}{unit}'»." if near and unit else f" Did you mean '{near}'?" if near else ""
            raise PluginConfigError(f"{what} has no argument '{key}'.{hint} {takes}.")
    missing = [p.name for p in parameters if p.name in known and p.default is p.empty and p.name not in config]
    if missing:
        if registry.entry_of(kind, cls) is None and (text := others.elsewhere(kind, cls.__name__)):
            raise PluginConfigError(f"{cls.__name__} is not one of the {kind}. {text}.")
        raise PluginConfigError(
            f"{what} needs {', '.join(missing)}. {takes}; write {_written(kind, name, cls, missing)}."
        )
    hints = signatures.hints(cls)
    for key, value in config.items():
        if key in hints and not signatures.fits(value, hints[key]):
            from hocket.basics.masking import masked  # only needed for error messages

            given, kind = masked(value, name, key), type(value).__name__
            raise PluginConfigError(
                f"{what} was given {key}={given!r}, which is {kind}; it should be {_type_name(hints[key])}. "
                f"{_rewritten(cls, key, given, hints[key])}{takes}."
            )
    try:
        return cls(*arguments, **config)
    except (TypeError, ValueError) as error:
        from hocket.basics.masking import masked

        error.add_note(
            f"While instantiating {what} with {dict(masked(config, name))!r}. {takes}; write {{'{name}': {{…}}}} with other "
            "values."
        )
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".rstrip(".")
        raise BrokenPluginError(f"{what} cannot be instantiated: {text}.") from error


def _rewritten(cls: object, key: str, value: object, hint: object) -> str:
    """Return what to write for a value: as YAML reads 1e-3, a time with a unit, a choice, or the example of the class."""
    if "Time" in str(hint) and isinstance(value, int | float):
        unit = "dur' for that fraction of the duration" if value % 1 else f"ba' for batches, or '{value}ep' for epochs"
        return f"{value!r} has no unit: write {key}='{value}{unit}. "
    meant = literal(value.strip()) if isinstance(value, str) else value
    if isinstance(meant, float) and meant.is_integer() and not signatures.fits(meant, hint):
        meant = int(meant)
    if type(meant) is type(value) or not signatures.fits(meant, hint):
        meant = signatures.choice(value, hint)
    write = others.example(cls, key) if meant is None else repr(meant)
    return f"Write {key}={write}. " if write != "…" else ""


def _type_name(hint: object) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return hint.__name__
    return str(hint).replace("typing.", "").replace("collections.abc.", "")

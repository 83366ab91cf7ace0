"""What to write instead of a call of a public function with arguments of other libraries, too many or too few."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils.data import DataLoader

from hocket.basics.losses import named_loss
from hocket.basics.short_repr import short
from hocket.basics.time import Time
from hocket.help import names
from hocket.help.arguments import SIGNATURES


def unknown(what: str, name: str, value: object) -> str:
    """Return what is wrong with an argument of a function that takes others by any name; empty if it is one of these."""
    known = _named_parameters(SIGNATURES[what])
    meant = names.listed(name, "arguments", what, near=True) or difflib.get_close_matches(name, known, 1, 0.7)
    return _unknown(what, known, name, value) if meant else ""


def _named_parameters(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: each for name, each in signature.parameters.items() if name != "self" and each.kind not in starred}


def explanation(
    function: Callable[..., object],
    signature: inspect.Signature,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> str:
    """Return what is wrong with a call and what to write, or empty if it is not known."""
    owner, _, method = function.__qualname__.rpartition(".")
    what = owner if method == "__init__" else f"{owner}.{method}".removeprefix(".")
    known = _named_parameters(signature)
    if unknown := [name for name in kwargs if name not in known]:
        return " ".join(_unknown(what, known, name, kwargs[name]) for name in unknown)
    positional = [name for name, each in known.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    given = args[1:] if owner else args  # without self
    if len(given) > len(positional):
        by_name = " Give the others by name."
        roles: dict[str, object] = {}
        for each in given[len(positional) :]:
            roles.setdefault(_role(each), each)
        if text := names.listed(method, "attributes", owner):
            write, by_name = text, ""
        elif owner and any(isinstance(each, torch.nn.Module) for each in given) and "model" not in known:
            write = f"trainer.{method}(data): the Trainer has its model already"
            write = write if "data" in known else "hocket.Runtime(device='cpu'), and then model = runtime.setup(model)"
        else:
            shown = [f"{name}=…" for name in positional] + [
                f"{name}={_Shown(each)!r}" for name, each in roles.items() if name in known
            ]
            write = f"{what}({', '.join(shown or [f'{name}=…' for name in list(known)[:2]])})"
        return (
            f"{what} takes {_words(positional)} by position, and was given {len(given)} values: "
            f"{', '.join(short(each) for each in given)}.{by_name} Write {write}."
        )
    if twice := [name for name in positional[: len(given)] if name in kwargs]:
        here = short(given[positional.index(twice[0])])
        return f"{what} was given {twice[0]} twice, {here} and by name. Write each by its name: {twice[0]}=…, duration='10ep'."
    missing = [
        n for n, each in known.items() if each.default is each.empty and n not in (*kwargs, *positional[: len(given)])
    ]
    if missing:
        if text := names.listed(method, "attributes", owner):
            return f"{what} was not given {missing[0]}. Write {text}."
        about = _about(missing[0])
        return f"{what} was not given {missing[0]}{f' ({about})' if about else ''}. Write {what}({missing[0]}=…)."
    return ""


def _unknown(what: str, known: Mapping[str, inspect.Parameter], name: str, value: object) -> str:
    given = f"{what} has no argument {name}={short(value)}."
    trainer = SIGNATURES.get("Trainer.__init__")
    own = names.listed(name, "arguments", what)
    if own is None and trainer is not None and name in trainer.parameters:
        return f"{given} It is one of the Trainer: write hocket.Trainer({name}=…). Here the arguments are {', '.join(known)}."
    tables = [("arguments", what), *([] if what.startswith("Runtime.") else [("arguments", "Trainer")])]
    instead = next((text for each in tables if (text := names.listed(name, *each))), None)
    spelt = difflib.get_close_matches(name, known, 1, 0.7)
    if instead is None and not spelt:
        instead = next((text for each in tables if (text := names.listed(name, *each, near=True))), None)
    there = "" if what == "Trainer" else f" Its arguments are {', '.join(known)}."
    if instead is not None:
        target = instead.removeprefix("«").partition("=")[0]
        text = names.filled(instead, name, value, _Shown(_ours(target, value)))
        of_trainer = own is None and target not in known and trainer is not None and target in trainer.parameters
        where = "in the Trainer " if of_trainer else ""
        return f"{given} Write {where}{text}.{_about_it(target)}{there}"
    if spelt:
        return f"{given} Did you mean {spelt[0]}? Write {spelt[0]}={short(value)}.{_about_it(spelt[0])}{there}"
    return f"{given} Its arguments are {', '.join(known)}. Remove {name}, or write one of them."


def _ours(argument: str, value: object) -> object:
    """Return hocket's name for a plug-in that another library names otherwise, such as 'cuda' for 'gpu'."""
    from hocket.plugins import registry  # only needed for error messages

    kind = {"device": "devices", "precision": "precisions", "strategy": "strategies"}.get(argument)
    return names.alias(kind, value, registry.names(kind)) or value if kind and isinstance(value, str) else value


def _about_it(argument: str) -> str:
    about = _about(argument)
    return f" {argument}: {about}." if about else ""


def _about(argument: str) -> str:
    """Return the first sentence of the Trainer's documentation of an argument, or empty."""
    trainer = getattr(sys.modules.get("hocket.run.trainer"), "Trainer", None)
    for listed, text in re.findall(r"^    ([\w, ]+): ((?:.|\n     )*)", inspect.getdoc(trainer) or "", re.MULTILINE):
        if argument in listed.split(", "):
            return " ".join(text.split()).partition(". ")[0].rstrip(".").replace("``", "")
    return ""


def _role(value: object) -> str:
    """Return the argument that a value given by position is probably meant for."""
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, DataLoader):
        return "eval_data"
    if isinstance(value, str):
        return _named(value)
    if isinstance(value, Time):
        return "duration"
    return "loss" if callable(value) else "eval_data" if hasattr(value, "__iter__") else "name"


def _named(text: str) -> str:
    """Return the argument that a name, or a time, given by position is probably meant for, or empty."""
    from hocket.plugins import registry  # only needed for error messages

    name = text.partition("(")[0].strip()
    if named_loss(name):
        return "loss"
    kinds = {"optimizers": "optimizer", "schedules": "schedule", "precisions": "precision", "devices": "device"}
    for kind, argument in kinds.items():
        there = registry.names(kind)
        if name in there or names.alias(kind, name, there):
            return argument
    return "duration" if text[:1].isdigit() else ""


def _words(listed: Sequence[str]) -> str:
    return " and ".join(listed) if listed else "no argument"


class _Shown:
    """A value within a suggestion: itself if that is short, else an ellipsis."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        plain = isinstance(self._value, str | int | float)
        return repr(self._value) if plain else short(self._value) if callable(self._value) else "…"

    def __str__(self) -> str:
        return self._value if isinstance(self._value, str) else repr(self)

"""Methods and attributes of other libraries: what to write here instead."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from hocket.help import names

T = TypeVar("T")


def missing(owner: str, name: str, obj: object) -> str:
    """Return the message for an attribute that does not exist: what other libraries mean by it, or a similar name."""
    if name.startswith("_"):  # dir() itself looks for some
        return f"{owner} has no {name!r}."
    attributes = [attribute for attribute in dir(obj) if attribute[0] != "_"]
    advice = instead(owner, name, attributes)
    return f"{owner} has no {name!r}; it has {', '.join(attributes)}. {advice}".rstrip()


def unset(owner: str, name: str, arguments: Iterable[str]) -> str:
    """Return the message for an attribute that somebody sets and nobody would read."""
    if name in arguments:
        advice = f"It is an argument: write hocket.{owner}({name}=…) when it is made"
        advice += ", or trainer.fit('5ep') to train for longer." if name == "duration" else "."
    elif text := names.listed(name, "attributes", owner):
        advice = f"See {text}."
    else:
        advice = f"Give hocket.{owner} its arguments when it is made."
    return f"{owner}.{name} cannot be set: nothing would read it. {advice}"


class Elsewhere:
    """An attribute by another library's name, which neither exists nor can be set: errors say what to write instead.

    As a descriptor it costs the other attributes nothing, unlike ``__getattr__``.
    """

    def __init__(self, owner: str, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, obj: object, owner: type) -> Any:
        raise AttributeError(missing(self._owner, self._name, obj), name=self._name)

    def __set__(self, obj: object, value: object) -> None:
        text = names.listed(self._name, "attributes", self._owner)
        raise AttributeError(f"{self._owner}.{self._name} cannot be set: nothing would read it. Write {text}.")


#: The names of other libraries that are no attributes of a class; ``others.toml`` says what to write instead.
_OTHERS = {
    "State": """
        epoch current_epoch global_step step_number batch_idx batch_index lr learning_rate trainer optimizer logger log_dict
        stop should_stop stop_training callback_metrics logged_metrics output predictions logits train_dataloader dataloader
    """,
    "Steps": """
        backward zero_grad optimizer optimizers batch_idx index global_step epoch current_epoch log state trainer step clip loss
    """,
    "LoopSteps": """
        batch batch_idx index global_step backward step zero_grad optimizer_step loss losses manual model optimizer optimizers
        state_dict load_state_dict
    """,
}


def elsewhere(cls: type[T]) -> type[T]:
    """Decorate a class: attributes by names of other libraries say what to write instead."""
    others = _OTHERS[cls.__name__].split()
    for name in others:
        setattr(cls, name, Elsewhere(cls.__name__, name))
    listed = cls.__dir__
    cls.__dir__ = lambda self: [name for name in listed(self) if name not in others]  # type: ignore[method-assign]
    return cls


def instead(owner: str, name: str, known: Iterable[str]) -> str:
    """Return what to write instead of a name of another library, or a similar name, or empty."""
    if text := names.listed(name, "attributes", owner):
        return f"Write {text}."
    near = names.closest(name, known)
    return f"Did you mean '{near}'?" if near else ""


class Columns:
    """The base of tables of values by name, whose attributes are methods only."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            closest = names.closest(name, self, 0.5) or next((column for column in self if "/" in column), "train/loss")
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}; its values are found by name: {', '.join(self) or 'none'}. "
                f"Write [{closest!r}]."
                if name[0] != "_"
                else f"{type(self).__name__} has no {name!r}.",
                name=name,
                obj=self,
            )


class Values(Columns, dict[str, float]):
    """Values by name, such as ``eval/loss``, that lists the names if one does not exist."""

    def __missing__(self, name: object) -> float:
        listed = ", ".join(map(repr, self)) or "none, without an evaluation"
        if closest := names.closest(name, self, 0.5):
            write = f"Write {closest!r}"
        elif "/" in str(name) or not self:
            write = "Values of evaluation sets need eval_data= in the Trainer"
        else:
            write = f"Measured are only losses and metrics=: write metrics={name!r}, with eval_data=, in the Trainer"
        raise KeyError(
            f"There is no value {name!r}; there is {listed}. {write}; sets are named by eval_data={{'val': loader}}."
        )


class Named(enum.EnumMeta):
    """The metaclass of enumerations that suggest a member for a name that does not exist."""

    def __getattr__(cls, name: str) -> Any:
        members = type.__getattribute__(cls, "__dict__").get("_member_map_", {})
        if name in members:
            return members[name]
        raise AttributeError(name if name.startswith("_") else unknown_member(cls, name))

    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise KeyError(unknown_member(cls, str(name))) from None


def unknown_member(cls: Any, name: str) -> str:
    """Return the message for a member of an enumeration that does not exist."""
    members = list(cls.__members__)
    wanted = name.upper()
    known = names.hook(name.lower()) if cls.__name__ == "Event" else None
    near = known.upper() if known and known.upper() in members else names.closest(wanted, members, 0.5)
    hint = f"Write {cls.__name__}.{near}. " if near else f"Write {cls.__name__}.{members[0]}, for instance. "
    return f"{cls.__name__} has no member {name!r}. {hint}The members are {', '.join(members)}."

"""The stages of a fine-tuning: from when on which parameters train, and at which learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from hocket.basics.plugin_errors import PluginConfigError
from hocket.basics.time import Time, TimeError, Unit
from hocket.help.names import closest
from hocket.optim.groups import matches
from hocket.state.state import State

_FORM = "Write «stages=[{'at': '0ep', 'train': 'fc.*', 'lr': 1e-3}, {'at': '2ep', 'train': '*', 'lr': 1e-4}]»."


@dataclass(frozen=True, slots=True)
class Stage:
    """What changes at a time.

    Args:
        at: when it begins.
        train: globs for the names of parameters that train from then on.
        freeze: globs of those that no longer train; they take precedence over ``train``.
        lr: the learning rate of those that ``train`` matches, which a schedule multiplies.
        lr_factor: of their learning rate in the optimizer, instead of ``lr``.
    """

    at: Time
    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    lr: float | None = None
    lr_factor: float | None = None

    @property
    def has_rate(self) -> bool:
        """Whether it sets learning rates."""
        return self.lr is not None or self.lr_factor is not None

    def decides(self, names: Iterable[str], tensor: Tensor) -> bool | None:
        """Whether a tensor of these names trains from this stage on; None if the stage does not name it."""
        names = list(names)
        for patterns, trains in ((self.freeze, False), (self.train, True)):
            if any(matches(name, tensor, pattern) for name in names for pattern in patterns):
                return trains
        return None

    def rate(self, own: float) -> float:
        """Return the learning rate of a parameter group that the optimizer was made with at the rate ``own``."""
        return own * self.lr_factor if self.lr_factor is not None else own if self.lr is None else self.lr

    def begun(self, state: State) -> bool:
        """Whether it has begun, as of the current batch."""
        now = state.elapsed() if self.at.unit is Unit.DURATION else state.timestamp.count(self.at.unit)
        return now >= self.at.value


def trains(stages: Iterable[Stage], names: Iterable[str], tensor: Tensor, otherwise: bool) -> bool:
    """Whether a tensor of these names trains after these stages, of which the last one that names it decides."""
    decisions = [decision for stage in stages if (decision := stage.decides(names, tensor)) is not None]
    return decisions[-1] if decisions else otherwise


def read_stages(given: Sequence[Mapping[str, Any]]) -> tuple[Stage, ...]:
    """Return the stages of a configuration. Raises PluginConfigError if they are none, or not in the order of their times."""
    if not given:
        raise PluginConfigError(f"«stages={given!r}» is not a list of stages. {_FORM}")
    stages = tuple(map(_read, given))
    if stages[0].at.value:
        raise PluginConfigError(
            f"The first stage begins at {stages[0].at}, so nothing says what trains before. Begin with a stage at '0ep': "
            "{'at': '0ep', 'train': 'fc.*'} trains nothing else, {'at': '0ep', 'freeze': 'layer1.*'} trains the others."
        )
    for stage, after in pairwise(stages):
        if stage.at.unit is after.at.unit and not stage.at < after.at:
            raise PluginConfigError(
                f"The stage at {after.at} comes after the one at {stage.at}: give stages in the order of their times, and "
                "what begins at one time in one stage."
            )
    return stages


def _read(given: Mapping[str, Any]) -> Stage:
    known, stage = list(Stage.__dataclass_fields__), f"The stage «{dict(given)!r}»"
    if "at" not in given:
        raise PluginConfigError(f"{stage} has no 'at', the time when it begins. {_FORM}")
    if unknown := [key for key in given if key not in known]:
        raise PluginConfigError(
            f"{stage} has {unknown[0]!r}, which is not one of {', '.join(known)}. Write "
            f"{closest(unknown[0], known) or 'train'!r}."
        )
    try:
        at = Time.parse(given["at"])
    except TimeError as error:
        raise PluginConfigError(f"«at» of {stage[0].lower()}{stage[1:]}: {error}") from None
    if at.unit is Unit.SECOND or (at.unit is Unit.DURATION and at.value >= 1):
        raise PluginConfigError(
            f"{stage} begins at '{given['at']}'. Give a time that is the same in every run, and on all ranks: epochs ('2ep'), "
            "batches ('500ba'), samples, tokens, or a fraction of the duration below 1 ('0.3dur')."
        )
    train, freeze = (_patterns(given, key, stage) for key in ("train", "freeze"))
    if not train and not freeze:
        raise PluginConfigError(f"{stage} neither trains nor freezes anything. {_FORM}")
    rates = {key: given[key] for key in ("lr", "lr_factor") if given.get(key) is not None}
    for key, value in rates.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise PluginConfigError(
                f"{stage} has {key}={value!r}: give a finite number above 0, such as 1.0e-3. Parameters that shall not change "
                "are named by 'freeze' instead of 'train'."
            )
    if len(rates) > 1 or (rates and not train):
        raise PluginConfigError(
            f"{stage} has {' and '.join(rates)}. Give one of lr and lr_factor, together with 'train', whose parameters get it."
        )
    return Stage(at, train, freeze, **rates)


def _patterns(given: Mapping[str, Any], key: str, stage: str) -> tuple[str, ...]:
    patterns: object = given.get(key, ())
    listed: Sequence[Any] = [patterns] if isinstance(patterns, str) else patterns  # type: ignore[assignment]
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) and each for each in listed):
        raise PluginConfigError(
            f"{stage} has «{key}={patterns!r}», which is no glob for names of parameters, nor a list of them. {_FORM}"
        )
    return tuple(listed)

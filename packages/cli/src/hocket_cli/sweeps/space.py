"""The parameters of a sweep: choices and ranges, as YAML and the command line write them."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hocket_cli.document import ConfigError, Node, flow, parse_value, suggestion

#: What a mapping in the place of values may be, and a call on the command line.
FORMS = ("choices", "uniform", "loguniform", "int")
_WRITE = "Write [a, b, c] or {choices: […]}, {uniform: [low, high]}, {loguniform: [low, high]} or {int: [low, high]}"

_UNMATCHED = "Brackets or quotes do not match. Close each one, and put a text with a single one into quotes."


@dataclass(frozen=True, slots=True)
class Choices:
    """Values of which one is chosen, all with equal probability."""

    values: tuple[Any, ...]

    def draw(self, numbers: random.Random) -> Any:
        """Return one at random."""
        return self.values[numbers.randrange(len(self.values))]

    def samples(self) -> tuple[Any, ...]:
        """Return the values to check before the first trial."""
        return self.values

    def plain(self) -> Any:
        """Return it as YAML."""
        return list(self.values)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two bounds, which are included: ``uniform``, ``loguniform`` or ``int``."""

    form: str
    low: float
    high: float

    def draw(self, numbers: random.Random) -> float:
        """Return a number at random, with six significant digits."""
        if self.form == "int":
            return numbers.randint(int(self.low), int(self.high))
        if self.form == "uniform":
            drawn = numbers.uniform(self.low, self.high)
        else:
            drawn = math.exp(numbers.uniform(math.log(self.low), math.log(self.high)))
        return min(max(float(f"{drawn:.6g}"), self.low), self.high)

    def samples(self) -> tuple[Any, ...]:
        """Return the values to check before the first trial: the bounds, which may be integers, and a real number."""
        return (self.low, self.high) if self.form == "int" else (self.low, self.draw(random.Random(0)), self.high)

    def plain(self) -> Any:
        """Return it as YAML."""
        return {self.form: [self.low, self.high]}


Space = dict[str, Choices | Range]


def of_node(node: Node, key: str) -> Choices | Range:
    """Return the values of a parameter in a sweep's file. Raises ConfigError."""
    value = node.value
    if isinstance(value, list):
        return _made("choices", node, key, node.where)
    if isinstance(value, dict):
        if len(value) == 1 and next(iter(value)) in FORMS:
            ((form, inside),) = value.items()
            return _made(form, inside, key, node.where)
        near = suggestion(next(iter(value)), FORMS, "") if len(value) == 1 else ""
        if not near and (inside := list(_below(node, key))):
            write = "; ".join(f"`{at}: {flow(each)}`" for at, each in inside)
            raise ConfigError(node.where, f"{key} is a mapping; a parameter has its key in one line. Write {write}.")
        raise ConfigError(node.where, f"{key}={flow(node.plain())} gives no values to try. {near} {_WRITE}.")
    return Choices((value,))


def _below(node: Node, at: str) -> Iterator[tuple[str, Any]]:
    """Yield the values to try that stand in nested mappings, with their keys as a parameter has them."""
    for key, each in node.value.items():
        if isinstance(each.value, list) and key not in FORMS:
            yield f"{at}.{key}", each.plain()
        elif isinstance(each.value, dict):
            below = at if ":" in str(key) else f"{at}.{key}"  # import paths are omitted
            if len(each.value) == 1 and next(iter(each.value)) in FORMS:
                yield below, each.plain()
            else:
                yield from _below(each, below)


def of_text(key: str, text: str) -> Choices | Range | None:
    """Return the values of a parameter on the command line: ``a,b,c`` or ``loguniform(low,high)``; None for a single value."""
    where = f"'{key}={text}'"
    if call := re.fullmatch(rf"({'|'.join(FORMS)})\((.*)\)", text.strip()):
        return _made(call[1], Node(_values(call[2], where), where, where), key, where)
    if near := re.fullmatch(r"(\w+)\(\s*[-+\d.eE]+\s*,\s*[-+\d.eE]+\s*\)", text.strip()):
        raise ConfigError(where, f"There is no distribution '{near[1]}'. {suggestion(near[1], FORMS)}")
    values = _values(text, where) if "," in text else []
    return Choices(tuple(each.plain() for each in values)) if len(values) > 1 else None


def _values(text: str, where: str) -> list[Node]:
    """Split at commas outside of brackets and quotes. Raises ConfigError if these do not match."""
    parts, opened, start = [], "", 0
    # A quote begins after a separator: that of "don't" is a letter.
    for found in re.finditer(r"""(?<!\w)(?:'[^']*'|"(?:\\.|[^"\\])*")|(?<!\w)['"]|[,()\[\]{}]""", text, re.DOTALL):
        match found[0]:
            case "(" | "[" | "{" as bracket:
                opened += bracket
            case ")" | "]" | "}" | "'" | '"' as closing:
                if opened[-1:] + closing not in ("()", "[]", "{}"):
                    raise ConfigError(where, _UNMATCHED)
                opened = opened[:-1]
            case "," if not opened:
                parts.append(text[start : found.start()])
                start = found.end()
    if opened:
        raise ConfigError(where, _UNMATCHED)
    parts += [text[start:]] if text[start:].strip() else []
    if not all(each.strip() for each in parts):
        raise ConfigError(where, "There is no value between two commas. Write null, or '' for an empty text.")
    return [parse_value(each, where) for each in parts]


def _made(form: str, node: Node, key: str, where: str) -> Choices | Range:
    values = node.plain()
    if not isinstance(values, list) or not values:
        raise ConfigError(where, f"{key}: {form} needs a list of values. {_WRITE}.")
    if form == "choices":
        return Choices(tuple(values))
    numbers = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(values) != 2 or len(numbers) != 2 or not numbers[0] < numbers[1]:
        raise ConfigError(where, f"{key}: {form} needs two numbers, the smaller first, and has {flow(values)}.")
    if form == "int" and not all(isinstance(each, int) for each in numbers):
        raise ConfigError(where, f"{key}: int needs two integers, and has {flow(values)}.")
    if form == "loguniform" and numbers[0] <= 0:
        raise ConfigError(where, f"{key}: loguniform needs positive numbers, and has {flow(values)}.")
    return Range(form, *numbers)


def grid(space: Space) -> Iterator[dict[str, Any]]:
    """Yield every combination; the last parameter changes fastest. Raises ConfigError for a range of real numbers."""
    every = []
    for key, each in space.items():
        if isinstance(each, Range) and each.form != "int":
            raise ConfigError(
                f"{key}",
                f"A grid has no end with {flow(each.plain())}. List values, or take sampler random and trials.",
            )
        every.append(each.values if isinstance(each, Choices) else range(int(each.low), int(each.high) + 1))
    for values in itertools.product(*every):
        yield dict(zip(space, values, strict=True))


def drawn(space: Space, seed: int, number: int) -> dict[str, Any]:
    """Return the values of one random trial, which depend on the seed and its number only."""
    numbers = random.Random(f"{seed}/{number}")
    return {key: each.draw(numbers) for key, each in space.items()}


def described(values: Mapping[str, Any]) -> str:
    """Return parameters as a command line has them."""
    return " ".join(f"{key}={flow(value)}" for key, value in values.items())

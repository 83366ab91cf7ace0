"""The record of a sweep, ``sweep.json``: what it varies, and each trial with its status, values and metric."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hocket.plugins import PluginError
from hocket_cli.document import flow
from hocket_cli.sweeps.trial import read, write

NAME = "sweep.json"
#: The folder below that of the sweep with the processes' output, and what they and the sweep tell each other.
PRIVATE = ".sweep"

Status = Literal["running", "finished", "pruned", "failed", "interrupted"]
OVER = ("finished", "pruned", "failed")


@dataclass(slots=True)
class Entry:
    """One trial."""

    number: int
    #: Its folder in that of the sweep, which is also its run's name.
    name: str
    parameters: dict[str, Any]
    status: Status = "running"
    #: The metric, the last one of a pruned trial; None without one.
    value: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    #: Its number in Optuna's study, if there is one.
    asked: int | None = None


@dataclass(slots=True)
class Record:
    """A sweep in its folder."""

    folder: Path
    #: What must not change when the sweep is continued.
    definition: dict[str, Any]
    trials: list[Entry] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, definition: dict[str, Any]) -> Record:
        """Continue the sweep in the folder, or begin it. Raises PluginError if the folder has another one, or other files."""
        file = folder / NAME
        name = f"Write --name with another name than {folder.name}, or remove the folder if it is not needed."
        if not file.exists():
            if folder.exists() and (not folder.is_dir() or any(each != PRIVATE for each in os.listdir(folder))):
                raise PluginError(f"{folder} exists and has no {NAME}, so it is not the folder of a sweep. {name}")
            return cls(folder, definition)
        try:
            saved = read(file)
            before, trials = dict(saved["definition"]), [Entry(**each) for each in saved["trials"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PluginError(f"{file} cannot be read ({error}), so its trials are unknown. {name}") from None
        now = json.loads(json.dumps(definition))
        if all(each.value is None for each in trials):  # nothing was compared yet
            before |= {key: now[key] for key in ("metric", "mode") if key in now}
        if differ := list(_differences({key: before.get(key) for key in now}, now)):
            more = f"; and {len(differ) - 4} other values" if len(differ) > 4 else ""
            said = "; ".join(f"{key} was {_given(was)}, is {_given(new)}" for key, was, new in differ[:4]) + more
            raise PluginError(f"{folder} has another sweep: {said}. To continue that one, repeat its command. {name}")
        return cls(folder, definition, trials)

    def save(self) -> None:
        """Write the file atomically."""
        (self.folder / PRIVATE).mkdir(parents=True, exist_ok=True)
        write(self.folder / NAME, {"definition": self.definition, "trials": [asdict(each) for each in self.trials]})

    def ranked(self) -> list[Entry]:
        """Return the trials, the best first; those without a value last."""
        sign = 1 if self.definition["mode"] == "min" else -1
        nothing = float("inf")
        return sorted(
            self.trials,
            key=lambda each: (
                each.status != "finished",
                nothing if each.value is None or each.value != each.value else sign * each.value,
                each.number,
            ),
        )

    def best(self) -> Entry | None:
        """Return the best finished trial, or None."""
        first = next(iter(self.ranked()), None)
        return first if first is not None and first.status == "finished" and first.value is not None else None

    def table(self) -> str:
        """Return the trials as text, the best first."""
        rows = [["trial", "status", str(self.definition["metric"]), *self.definition["parameters"], "seconds"]]
        for each in self.ranked():
            value = "" if each.value is None else f"{each.value:.6g}"
            parameters = [flow(each.parameters.get(key)) for key in self.definition["parameters"]]
            rows.append([each.name, each.status, value, *parameters, f"{each.seconds:.0f}"])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


class _Absent:
    """In place of a value that is not given."""


def _differences(before: dict[str, Any], now: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose values differ, at any depth, with both; mappings without a common key differ as a whole."""
    for key in dict.fromkeys([*before, *now]):
        was, new = before.get(key, _Absent), now.get(key, _Absent)
        if isinstance(was, dict) and isinstance(new, dict) and was.keys() & new.keys():
            yield from _differences(was, new, f"{at}{key}.")
        elif was != new:
            yield f"{at}{key}", was, new


def _given(value: Any) -> str:
    return "not given" if value is _Absent else flow(value)

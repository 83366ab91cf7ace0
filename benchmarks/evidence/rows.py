"""What is measured beside the plain baseline: rows of rows.yaml, and recipes in benchmarks/speedrun/TASK/RECIPE.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from evidence.tasks import TASKS, Task
from hocket import plugins
from hocket_cli import document

FILE = Path(__file__).parent / "rows.yaml"
SPEEDRUN = Path(__file__).parents[1] / "speedrun"
PLAIN = "plain"


@dataclass(frozen=True)
class Row:
    """Settings that differ from the plain baseline of a task, by the name of an algorithm, optimizer or recipe."""

    name: str
    tasks: tuple[str, ...] = tuple(TASKS)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the Trainer, and ``batch_size``. An optimizer without ``lr`` gets the tuned one."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the task's model, for the plain runs that the row is compared with, too."""
    both: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer that those plain runs have, too."""
    grid: Mapping[str, list[Any]] = field(default_factory=dict)
    """Values of ``lr`` to tune over, as the baseline is tuned."""
    recipe: bool = False
    skip: str = ""
    """Why an algorithm has no row."""

    @property
    def grid_points(self) -> list[dict[str, Any]]:
        """The combinations of the grid; none without one."""
        return (
            [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())] if self.grid else []
        )

    def seeds(self, given: range) -> range:
        """The given seeds, and for a recipe as many again: what is claimed of it is about time and quality together."""
        return range(given.start, given.stop + len(given) * self.recipe)

    @property
    def missing(self) -> list[str]:
        """Names of algorithms and the optimizer that no installed distribution provides."""
        named = [("algorithms", each) for each in self.arguments.get("algorithms", ())]
        named += [("optimizers", self.arguments["optimizer"])] if "optimizer" in self.arguments else []
        return [name for kind, spec in named if (name := plugin_name(spec)) not in plugins.names(kind)]


def plugin_name(spec: str | Mapping[str, Any]) -> str:
    """The name in ``"name"``, ``"name(x=1)"``, ``"distribution/name"`` or ``{"name": {"x": 1}}``."""
    text = spec.partition("(")[0].strip() if isinstance(spec, str) else str(next(iter(spec)))
    return text.rpartition("/")[2]


def read(file: Path) -> dict[str, Any]:
    """A YAML file, with numbers as in hocket's configuration files: ``1e-3`` is one."""
    return document.read(str(file)).plain()  # type: ignore[no-any-return]


def rows(file: Path = FILE) -> dict[str, Row]:
    """Every algorithm and optimizer with settings, and algorithms of the registry without, which get their defaults."""
    declared = {name: _row(name, dict(settings or {})) for name, settings in read(file).items()}
    others = sorted(set(plugins.names("algorithms")) - set(declared))
    return declared | {name: Row(name, arguments={"algorithms": [name]}) for name in others}


def _row(name: str, settings: dict[str, Any]) -> Row:
    own = {key: settings.pop(key) for key in ("model", "both", "grid", "skip") if key in settings}
    tasks = tuple(settings.pop("tasks", TASKS))
    if unknown := set(tasks) - set(TASKS):
        raise ValueError(f"{name}: there is no task {', '.join(unknown)}; use some of {', '.join(TASKS)}.")
    if "optimizer" not in settings:
        settings.setdefault("algorithms", [name])
    return Row(name, tasks, settings, **own)


def recipes(folder: Path = SPEEDRUN) -> list[Row]:
    """A row for each recipe's file, named ``TASK/RECIPE``."""
    found = []
    for file in sorted(folder.glob("*/*.yaml")):
        arguments = read(file)
        grid = arguments.pop("grid", {})
        task = file.parent.name
        found.append(Row(f"{task}/{file.stem}", (task,), arguments, grid=grid, recipe=True))
    return found


def trainer_arguments(task: Task, row: Row, tuned: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the Trainer, and ``batch_size``, of a row on a task; ``tuned`` are the task's chosen values by row."""
    merged = {**task.baseline, **tuned.get(PLAIN, {}), **row.both, **row.arguments, **tuned.get(row.name, {})}
    learning_rate, optimizer = merged.pop("lr", None), merged["optimizer"]
    if isinstance(optimizer, str) and "(" not in optimizer:
        optimizer = {optimizer: {}}
    if learning_rate is not None and isinstance(optimizer, Mapping):
        ((name, config),) = optimizer.items()
        merged["optimizer"] = {name: {"lr": learning_rate, **(config or {})}}
    return merged


def shown(arguments: Mapping[str, Any]) -> str:
    """Settings in one line of YAML."""
    return yaml.safe_dump(dict(arguments), default_flow_style=True, width=10_000, sort_keys=False).strip()[1:-1]

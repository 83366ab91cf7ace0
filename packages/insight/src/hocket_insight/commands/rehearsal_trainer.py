"""Make the Trainer of a configuration for a rehearsal, on tensors without storage."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from hocket.run.trainer import Trainer
from hocket_cli.config import Configuration, trainer_from
from hocket_cli.document import Node
from hocket_cli.objects import is_checking
from hocket_insight.memory.rehearsal import ARGUMENTS, EstimateError, Stage

#: Strategies whose libraries start processes or compute gradients on their own.
_ELSEWHERE = ("deepspeed", "ray")


def trainer_of(
    args: argparse.Namespace, stage: Stage, strategy: str, arguments: dict[str, Any]
) -> AbstractContextManager[Trainer]:
    """Return the Trainer of a configuration, with another strategy if one is given."""
    return trainer_from(args, ("train_data",), lambda document: _Rehearsed(document, stage, strategy), **arguments)


class _Rehearsed(Configuration):
    def __init__(self, document: Node, stage: Stage, strategy: str) -> None:
        super().__init__(document)
        self._stage, self._strategy = stage, strategy
        for key in ARGUMENTS.keys() & self._given.keys():
            del self._given[key]

    def _value(self, key: str) -> Any:
        if key == "model" and not is_checking():
            return self._stage.model(lambda: super(_Rehearsed, self)._value(key))
        value = super()._value(key)
        if key == "strategy" and self._strategy not in ("", _name(value)):
            return self._strategy
        return value

    def _assemble(self, values: Mapping[str, Any]) -> Trainer:
        values = dict(values)
        values.setdefault("strategy", self._strategy or "auto")
        if (name := _name(values["strategy"])) in _ELSEWHERE:
            raise EstimateError(
                f"strategy='{name}' computes in a library of its own, whose memory cannot be estimated. Add --strategies "
                "fsdp for what sharding by torch takes, or measure: hocket train with fast_dev_run=2 and "
                "callbacks=[memory-monitor]."
            )
        if values.get("microbatch") == "auto":
            values["microbatch"] = None
            self._stage.notes.append("microbatch='auto' is shown for the full batch; --memory finds what fits.")
        with self._stage.modes():
            return super()._assemble(values)


def _name(strategy: Any) -> str:
    return next(iter(strategy)) if isinstance(strategy, Mapping) else str(strategy)

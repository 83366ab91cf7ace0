"""What DeepSpeed is given: its configuration, and the package itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.plugins import PluginError

#: Sections of a configuration that something else of hocket is for.
_ELSEWHERE = {
    "optimizer": "Pass the optimizer to the Trainer, DeepSpeed's own too: "
    "optimizer=lambda parameters: deepspeed.ops.adam.FusedAdam(parameters, lr=1e-3).",
    "scheduler": "Pass the schedule to the Trainer: schedule='cosine(warmup=0.05dur)'.",
    "train_batch_size": "Pass it to the Trainer, as in global_batch=32.",
}


def read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """A copy of the configuration. Raises ValueError for sections that hocket does not leave to DeepSpeed."""
    content = (
        json.loads(Path(config).read_text()) if isinstance(config, str | Path) else copy.deepcopy(dict(config or {}))
    )
    for section, instead in _ELSEWHERE.items():
        if section in content:
            raise ValueError(f"DeepSpeed's configuration has {section!r}, which hocket does not hand on. {instead}")
    return content


def import_deepspeed() -> Any:
    """The package. Raises PluginError if it is not installed."""
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise PluginError(
            "strategy='deepspeed' needs the package deepspeed, which is not installed. It comes with an extra; type: "
            "pip install 'hocket[deepspeed]'. It builds parts of itself when they are first used, for which a C++ compiler "
            "(g++) has to be there too. Without it, strategy='ddp' trains on the same processes."
        ) from None
    return deepspeed

"""Read DeepSpeed's configuration, and import the package."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.errors import WrongValue
from hocket.help import installing
from hocket.plugins import PluginError

#: Sections of a configuration that hocket's own arguments replace.
_ELSEWHERE = {
    "optimizer": "Pass the optimizer to the Trainer, DeepSpeed's own too: "
    "«optimizer=lambda parameters: deepspeed.ops.adam.FusedAdam(parameters, lr=1e-3)».",
    "scheduler": "Pass the schedule to the Trainer: «schedule='cosine(warmup=0.05dur)'».",
    "train_batch_size": "Pass it to the Trainer, as in «global_batch=32».",
}


def read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return a copy of the configuration. Raises ValueError for sections that hocket's own arguments replace."""
    content = (
        json.loads(Path(config).read_text()) if isinstance(config, str | Path) else copy.deepcopy(dict(config or {}))
    )
    for section, instead in _ELSEWHERE.items():
        if section in content:
            raise WrongValue(f"DeepSpeed's configuration has {section!r}, which hocket does not pass on. {instead}")
    return content


def import_deepspeed() -> Any:
    """Return the package. Raises PluginError if it is not installed."""
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise PluginError(
            "«strategy='deepspeed'» needs the package deepspeed, which is not installed. Type: "
            f"{installing.command('deepspeed', 'hocket-strategies')}. It also needs a C++ compiler "
            "(g++) to build its extensions on first use. Without it, «strategy='ddp'» trains on the same processes."
        ) from None
    return deepspeed

"""What loggers make of records that a vendor has no type for, and of values that a killed process has already written."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hocket.errors import MissingPackage
from hocket.help import installing

if TYPE_CHECKING:
    from hocket import State


def require(logger: str, module: str, extra: str = "") -> None:
    """Import the library of a logger, so that this does not happen beside the first steps of training.

    Raises ModuleNotFoundError, with what to type, if it is not installed.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # a broken installation
        raise MissingPackage(
            f"The logger '{logger}' needs the package {module.replace('_', '-')}, which is not installed. Type: "
            f"{installing.command(extra or logger)}.",
            name=module,
        ) from None


def position(state: State) -> dict[str, float]:
    """Return the columns of the position beside the batch: epoch, sample, token and seconds of training."""
    now = state.timestamp
    return {"epoch": now.epoch, "sample": now.sample, "token": now.token, "seconds": round(now.seconds, 6)}


def flat(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings as ``outer/inner``; values other than numbers, texts and None become JSON."""
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/")
        elif value is None or isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def pixels(image: Any) -> Any:
    """Return an image, a tensor (C, H, W) of uint8 or of floats in [0, 1], as a uint8 array (H, W, C), or (H, W) if C is 1."""
    if image.is_floating_point():
        image = (image.float().clamp(0, 1) * 255).round().byte()
    array = image.permute(1, 2, 0).contiguous().numpy()
    return array[:, :, 0] if array.shape[2] == 1 else array


def relative(name: str) -> str:
    """Return a name as a relative path that cannot lead out of its folder."""
    return "/".join(part for part in name.split("/") if part.strip(". ")) or "unnamed"


_Value = TypeVar("_Value")


class Written:
    """The values that an earlier process wrote after the checkpoint that this one resumed from.

    A resumed run computes these values again. Vendors that keep both would show each twice, so the second is skipped.

    Args:
        last: the last batch at which the vendor has a value, by name; empty for a run that this process has begun, or
            continues after it was closed.
    """

    def __init__(self, last: Mapping[str, int] | None = None) -> None:
        self._last = last or {}

    def missing(self, batch: int, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return the values that have not been written at this batch."""
        return {name: value for name, value in values.items() if self._last.get(name, -1) < batch}

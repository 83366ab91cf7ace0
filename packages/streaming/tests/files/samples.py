"""The samples of the files in this folder. Libraries write them in environments of their own; only numpy is needed here."""

from __future__ import annotations

from typing import Any

import numpy as np

SCALARS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
TEXTS = ("do", "", "réµ\n", "a longer text " * 3, "♪")
#: Columns of MDS, with their encodings.
MDS = {
    "number": "int", "text": "str", "raw": "bytes", "json": "json", "exact": "str_decimal", "big": "str_int",
    "real": "str_float", "fixed": "ndarray:float32:2,3", "typed": "ndarray:int16", "any": "ndarray", "pil": "pil",
    "png": "png", "jpeg": "jpeg", "pngs": "list[png]", **{name: name for name in SCALARS},
}  # fmt: skip


def plain(k: int) -> dict[str, Any]:
    """Sample ``k`` of numbers and texts."""
    return {"number": k * 10**9 - 7, "text": TEXTS[k % 5], "raw": bytes(range(k % 7))}


def array(k: int) -> np.ndarray:
    return (np.arange(6, dtype="float32").reshape(2, 3) + k) / 3


def pixels(k: int, channels: int = 3) -> np.ndarray:
    """A small smooth image, which JPEG keeps within a few grey levels."""
    x, y = np.meshgrid(np.arange(8), np.arange(6))
    return np.stack([8 * x + 4 * y + 5 * k + 20 * c for c in range(channels)], -1).astype("uint8")


def of_mds(k: int, image: Any = None) -> dict[str, Any]:
    """Sample ``k`` of the columns `MDS`; ``image`` makes images of pixels."""
    from decimal import Decimal

    image = image or (lambda array: array)
    return {
        **plain(k),
        "json": {"k": [k, None, {"é": k / 2}]},
        "exact": Decimal(k) / Decimal(8),
        "big": 10**30 + k,
        "real": k / 7,
        "fixed": array(k),
        "typed": np.arange(1 + k % 3, dtype="int16"),
        "any": np.arange(2 * (k + 1), dtype="float64").reshape(2, k + 1),
        "pil": image(pixels(k)),
        "png": image(pixels(k)),
        "jpeg": image(pixels(k)),
        "pngs": [image(pixels(k)), image(pixels(k + 1))],
        **{name: np.dtype(name).type(k + 3) for name in SCALARS},
    }


def of_litdata(k: int, torch: Any = None) -> dict[str, Any]:
    """Sample ``k`` of litdata: nested, with tensors if there is torch."""
    tensor = torch.tensor if torch else np.asarray
    return {
        **plain(k),
        "flag": k % 2 == 0,
        "real": k / 7,
        "arrays": [array(k), np.arange(k + 1, dtype="int32")],
        "pair": (k, {"inner": f"{k}"}),
        "flat": tensor(np.arange(k + 1, dtype="int64")),
        "square": tensor(array(k)),
    }


def tokens(k: int) -> np.ndarray:
    """Document ``k`` of tokens."""
    return np.arange(100 * k, 100 * k + 10 + k, dtype="int32")

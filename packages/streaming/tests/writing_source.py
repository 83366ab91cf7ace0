"""Sources of the tests of the writer, named as ``writing_source:…``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np


def numbered(part: int, parts: int) -> Iterator[dict[str, Any]]:
    """Yield samples whose values follow from their numbers; ``HOCKET_TEST_SAMPLES`` says how many, 2,000 by default."""
    for number in range(part, int(os.environ.get("HOCKET_TEST_SAMPLES", "2000")), parts):
        yield {"number": number, "text": "é" * (number % 7), "x": np.full((2, number % 5 + 1), number, "float32")}


def heavy(part: int, parts: int) -> Iterator[dict[str, Any]]:
    """Yield 200 MB."""
    for number in range(part, 20_000, parts):
        yield {"number": number, "content": bytes(10_000)}


def documents() -> Iterator[str]:
    yield from ("do", "ré mi", "", "fa sol la si" * 30)


def tokens() -> Iterator[dict[str, Any]]:
    yield {"tokens": np.arange(5, dtype="uint8")}
    yield {"tokens": np.arange(5)}
    yield {"tokens": np.arange(250, 260)}


def latin() -> Iterator[bytes]:
    yield b"caf\xe9"


def nothing() -> Iterator[str]:
    yield from ()


def late() -> Iterator[dict[str, Any]]:
    """Yield a sample that does not fit the first thousand."""
    for number in range(1500):
        yield {"score": number if number < 1200 else "none"}


def sorted_by_class(part: int, parts: int) -> Iterator[dict[str, Any]]:
    """Yield 40,000 samples of 10 classes, class after class."""
    for number in range(part * 40_000 // parts, (part + 1) * 40_000 // parts):
        yield {"number": number // 4000}

"""Bytes, as people write and read them."""

from __future__ import annotations

import re

from hocket.errors import WrongValue

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size_of(text: str) -> int:
    """Return the bytes of a size, such as ``20GB``, ``64MiB`` or ``1000``.

    Raises:
        WrongValue: it is not a size.

    Example:
        >>> from hocket_streaming.sizes import size_of
        >>> size_of("20GB"), size_of("64 MiB"), size_of("1000")
        (20000000000, 67108864, 1000)
    """
    known = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if known is None or known[2] not in _UNITS:
        raise WrongValue(f"{text!r} is not a size. Write such as 20GB, 64MiB or 1000.")
    return int(float(known[1]) * _UNITS[known[2]])


def bandwidth_of(text: str) -> float:
    """Return the bytes a second of a bandwidth in bytes, such as ``125MB/s``, or in bits, such as ``1Gbit/s`` or ``1Gbps``.

    Example:
        >>> from hocket_streaming.sizes import bandwidth_of
        >>> bandwidth_of("125MB/s"), bandwidth_of("1Gbit"), bandwidth_of("1Gbps")
        (125000000.0, 125000000.0, 125000000.0)
    """
    size = re.sub(r"/s\s*$", "", text)
    bits = re.sub(r"(bits?|bps)\s*$", "", size)
    try:
        return size_of(bits) / (1 if bits == size else 8)
    except WrongValue:
        raise WrongValue(
            f"«bandwidth={text}» is not a bandwidth. Write bytes a second as 125MB/s, or bits as 1Gbit/s."
        ) from None


def counted(number: int, name: str) -> str:
    """Return a number with the name of what it counts.

    Example:
        >>> from hocket_streaming.sizes import counted
        >>> counted(1, "chunk"), counted(2000, "chunk")
        ('1 chunk', '2,000 chunks')
    """
    return f"{number:,} {name}" + "s" * (number != 1)


def shown(size: float) -> str:
    """Return bytes for people, in powers of 1000.

    Example:
        >>> from hocket_streaming.sizes import shown
        >>> shown(25e9), shown(512)
        ('25.0 GB', '512 B')
    """
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next((f"{size / number:.1f} {unit}" for unit, number in units if size >= number), f"{size:.0f} B")

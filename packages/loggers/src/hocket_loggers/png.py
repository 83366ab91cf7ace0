"""Encode an image as PNG (ISO/IEC 15948), which needs no library but zlib."""

from __future__ import annotations

import ctypes
import struct
import zlib

import torch
from torch import Tensor

from hocket.errors import WrongValue

#: Colour types of PNG by number of channels: grey, grey with alpha, RGB, RGB with alpha.
_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}


def png(image: Tensor, most: int = 1024) -> bytes:
    """Return the file of an image.

    Args:
        image: a tensor (C, H, W) or (H, W) with 1 to 4 channels; uint8, or floats in [0, 1], which are clamped. NaN is black.
        most: the largest height and width; of larger images every n-th pixel is kept.

    Raises:
        ValueError: it is not such a tensor.

    Example:
        >>> import torch
        >>> from hocket_loggers.png import png
        >>> png(torch.rand(3, 8, 8))[1:4]
        b'PNG'
    """
    pixels = torch.as_tensor(image).detach().cpu()
    if pixels.ndim == 2:
        pixels = pixels.unsqueeze(0)
    if pixels.ndim != 3 or pixels.shape[0] not in _COLOURS or not pixels.numel():
        raise WrongValue(
            f"An image has the shape {tuple(image.shape)}. Log images of shape (C, H, W) with 1 to 4 channels, or (H, W)."
        )
    step = max(-(-side // most) for side in pixels.shape[1:])
    pixels = pixels[:, ::step, ::step]
    if pixels.dtype != torch.uint8:
        scale = 255 if pixels.is_floating_point() or pixels.dtype == torch.bool else 1
        pixels = pixels.float().nan_to_num(0.0).mul(scale).round().clamp(0, 255).to(torch.uint8)
    channels, height, width = pixels.shape
    rows = torch.zeros(height, 1 + width * channels, dtype=torch.uint8)  # each row begins with its filter: none
    rows[:, 1:] = pixels.permute(1, 2, 0).reshape(height, -1)
    data = ctypes.string_at(rows.data_ptr(), rows.numel())  # numpy may be missing
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*chunks, strict=True)))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

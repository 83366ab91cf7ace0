"""Operations on batches of pixels, each image with its own strength.

All take images ``(n, C, H, W)`` of 1 or 3 channels, uint8 or floating point in [0, 1], and return images of that shape and
dtype. Strengths are ``(n, 1, 1, 1)``. Pixels are those of PIL's operations.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def _float(images: Tensor) -> Tensor:
    return images if images.is_floating_point() else images.float()


def to_dtype(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp ``pixels``, which are changed, to the range of ``dtype`` and convert; uint8 is truncated, as PIL does."""
    if dtype.is_floating_point:
        return pixels.clamp_(0, 1).to(dtype)
    return pixels.clamp_(0, 255).to(torch.int16).to(dtype)  # four times as fast as without int16


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    flat = high == low
    low, span = _float(low), _float(high - low).masked_fill(flat, 1)
    if images.is_floating_point():
        return (images - low.masked_fill(flat, 0)).div_(span)
    # Exact, so that truncation is right.
    low, gain = low.masked_fill(flat, 0), span.new_full((), 255).where(~flat, 1)
    return to_dtype((images - low).mul_(gain).div_(span), images.dtype)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    if images.is_floating_point():
        return equalize(images.mul(255).round_().to(torch.uint8), _).to(images.dtype).div_(255)
    values = images.flatten(2).long()
    counts = values.new_zeros(*values.shape[:2], 256).scatter_add_(2, values, values.new_ones(()).expand_as(values))
    total = counts.cumsum(2)
    last = counts.gather(2, values.amax(2, keepdim=True))
    step = (total[..., -1:] - last) // 255
    table = ((total - counts + step // 2) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device)).to(torch.uint8)
    return table.gather(2, values).view_as(images)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    if images.is_floating_point():
        levels = 2**bits
        return (images * levels).floor_().minimum(levels - 1).div_(levels)
    return images & (256 - 2 ** (8 - bits)).to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    if images.is_floating_point():
        return torch.where(images < threshold / 255, images, 1 - images)
    darker = (images.short() - threshold.short()).bitwise_right_shift_(15)  # -1 where darker, else 0
    return images ^ ~darker.to(images.dtype)


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return _float(images)
    red, green, blue = images.unbind(1)  # PIL's weights, in 65536ths; exact in float32 for uint8
    grey = (_float(red) * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)
    grey = grey.div_(65536) if images.is_floating_point() else grey.add_(32768).div_(65536).floor_()
    return grey.unsqueeze(1)


def _blend(other: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return to_dtype((_float(images) - other).mul_(factor).add_(other), images.dtype)


def color(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(_grey(images), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    mean = _grey(images).mean((1, 2, 3), keepdim=True)
    return _blend(mean if images.is_floating_point() else mean.add_(0.5).floor_(), images, factor)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return to_dtype(_float(images) * factor, images.dtype)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    if min(height, width) < 3:
        return images
    pixels = _float(images)
    rows = (pixels[..., :-2, :] + pixels[..., 1:-1, :]).add_(pixels[..., 2:, :])
    centre = pixels[..., 1:-1, 1:-1]
    smooth = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:]).add_(centre, alpha=4)
    smooth = smooth.div_(13) if images.is_floating_point() else smooth.add_(6.5).div_(13).floor_()
    out = images.clone()  # the border stays
    out[..., 1:-1, 1:-1] = _blend(smooth, images[..., 1:-1, 1:-1], factor)
    return out


def warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Sample ``images`` ``(n, C, H, W)`` bilinearly at affine positions; what is outside is black.

    Args:
        images: uint8 or floating point.
        matrices: ``(n, 6)``, ``a, b, c, d, e, f`` of the position ``(a x + b y + c, d x + e y + f)``, in pixels, from
            which pixel ``(x, y)`` is taken. The corner of the image is (0, 0), the centre of its first pixel (0.5, 0.5).
    """
    pixels = _float(images)
    height, width = images.shape[-2:]
    a, b, c, d, e, f = matrices.view(-1, 6, 1).to(pixels.dtype).unbind(1)
    x, y = (torch.arange(size, device=images.device, dtype=pixels.dtype) + 0.5 for size in (width, height))
    # From -1 to 1 between the edges. As complex numbers, whose sum is the grid that grid_sample takes.
    along_x = torch.complex(2 / width * (a * x + c) - 1, 2 / height * (d * x + f) - 1).unsqueeze(1)
    along_y = torch.complex(2 / width * (b * y), 2 / height * (e * y)).unsqueeze(2)
    grid = torch.view_as_real(along_x + along_y)
    out = F.grid_sample(pixels, grid, "bilinear", "border", align_corners=False)
    furthest = (along_x.real + along_y.real).abs_().maximum((along_x.imag + along_y.imag).abs_())
    out.mul_((1 - furthest).ceil_().clamp_(0, 1).unsqueeze(1))
    return out if images.is_floating_point() else to_dtype(out.add_(0.5), images.dtype)


def shift(images: Tensor, matrices: Tensor) -> Tensor:
    """Do what :func:`warp` does, for translations by whole pixels, by copying: on the CPU a tenth of the time."""
    moves = [(round(right), round(down)) for _, _, right, _, _, down in matrices.tolist()]
    return torch.stack([F.pad(image, (-x, x, -y, y)) for image, (x, y) in zip(images.unbind(), moves, strict=True)])

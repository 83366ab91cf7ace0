"""Small image models for examples, tests and benchmarks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with a residual connection (He et al. 2015, arXiv 1512.03385, figure 2).

    ``(B, in_channels, H, W) -> (B, out_channels, ceil(H / stride), ceil(W / stride))``. Where the shape changes, the
    input goes through a strided 1×1 convolution (the paper's option B).
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), norm=nn.BatchNorm2d(out_channels)
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu(residual + self.shortcut(x))
        return out


def small_resnet(
    num_classes: int = 10, in_channels: int = 1, widths: Sequence[int] = (16, 32, 64), blocks_per_stage: int = 1
) -> nn.Sequential:
    """Return a ResNet for images of 8×8 to 64×64 pixels, laid out like the CIFAR ResNets of arXiv 1512.03385, section 4.2.

    A 3×3 convolution, then one stage of residual blocks per width, each but the first halving height and width, then
    the mean over the pixels and a linear classifier: ``(B, in_channels, H, W)`` to logits ``(B, num_classes)``. With
    the defaults 77 thousand parameters, and four strided convolutions for BlurPool to work on.

    Example:
        >>> import torch
        >>> from hocket_vision import small_resnet
        >>> small_resnet(num_classes=10)(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
    )
    width = widths[0]
    for stage, out in enumerate(widths):
        blocks = []
        for block in range(blocks_per_stage):
            blocks.append(ResidualBlock(width, out, stride=2 if stage and not block else 1))
            width = out
        layers[f"stage{stage + 1}"] = nn.Sequential(*blocks)
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["classifier"] = nn.Linear(width, num_classes)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model

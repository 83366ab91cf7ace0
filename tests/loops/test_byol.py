"""BYOL against a loop by hand."""

from __future__ import annotations

from typing import Any

import torch
from loops.harness import Draw, Loop, rows
from torch import Tensor
from torch.nn.functional import affine_grid, cosine_similarity, grid_sample
from torch.optim import Adam


class TestBYOL(Loop):
    example = "byol"
    microbatch = None  # batch norm sees microbatches

    @staticmethod
    def by_hand(example: Any, batches: list[Any], draw: Draw) -> dict[str, Tensor]:
        nets = example.BYOL()
        online, target, predictor = nets.online, nets.target, nets.predictor
        adam = Adam([*online.parameters(), *predictor.parameters()], lr=1e-3)
        for images in batches:
            adam.zero_grad()
            affine = [torch.eye(2, 3) + 0.15 * draw(torch.randn, len(images), 2, 3) for _ in range(2)]
            one, other = (
                grid_sample(images, affine_grid(each, [*images.shape], align_corners=False), align_corners=False)
                for each in affine
            )
            for rank in range(draw.ranks):  # batch norm sees a rank's slice
                a, b = rows(one, rank, draw.ranks), rows(other, rank, draw.ranks)
                first = cosine_similarity(predictor(online(a)), target(b)).mean()
                second = cosine_similarity(predictor(online(b)), target(a)).mean()
                ((4 - 2 * (first + second)) / draw.ranks).backward()
            adam.step()
            with torch.no_grad():
                for followed, parameter in zip(online.parameters(), target.parameters(), strict=True):
                    parameter.copy_(torch.lerp(parameter, followed, 0.01))
        return nets.state_dict()

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
            views = []
            for _ in range(2):
                affine = torch.eye(2, 3) + 0.1 * draw(torch.randn, len(images), 2, 3)
                moved = grid_sample(
                    images, affine_grid(affine, [*images.shape], align_corners=False), align_corners=False
                )
                views.append(moved + 0.1 * draw(torch.randn, *images.shape))
            one, other = views
            for rank in range(draw.ranks):  # batch norm sees a rank's slice
                a, b = rows(one, rank, draw.ranks), rows(other, rank, draw.ranks)
                first = cosine_similarity(predictor(online(a)), target(b))
                second = cosine_similarity(predictor(online(b)), target(a))
                ((4 - 2 * (first + second)).mean() / draw.ranks).backward()
            adam.step()
            with torch.no_grad():
                for followed, parameter in zip(online.parameters(), target.parameters(), strict=True):
                    parameter.copy_(torch.lerp(parameter, followed, 0.05))
        return nets.state_dict()

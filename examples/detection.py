"""Object detection with torchvision's Faster R-CNN: find handwritten zeros and ones in an image.

    python examples/detection.py

After Ren et al. (2015, arXiv:1506.01497); their equation 1 is two of the four losses that the network returns in training. In
evaluation it returns boxes. Losses are means over sampled boxes, not images: each microbatch and each rank has its own mean.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FasterRCNN, FastRCNNPredictor, TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign, box_iou

import hocket


class Detector(hocket.Task):
    def __init__(self) -> None:
        super().__init__()
        backbone = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU())
        backbone.out_channels = 64
        anchors, pool = AnchorGenerator(((8,),), ((1.0,),)), MultiScaleRoIAlign(["0"], 4, 2)
        heads = {"box_head": TwoMLPHead(64 * 4 * 4, 64), "box_predictor": FastRCNNPredictor(64, 3)}
        size = {"min_size": 32, "max_size": 32, "rpn_post_nms_top_n_train": 16}
        self.network = FasterRCNN(backbone, rpn_anchor_generator=anchors, box_roi_pool=pool, **heads, **size)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return self.network(*batch)

    def loss(self, outputs: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
        return outputs

    def eval_forward(self, batch: Any) -> list[dict[str, Tensor]]:
        return self.network(batch[0])

    def count(self, batch: Any) -> int:
        return len(batch[0])


class Recall:
    """The share of digits that have a detection with their label, a score above 0.5 and a box that overlaps by half."""

    def reset(self) -> None:
        self.found: list[bool] = []

    def update(self, detections: Any, targets: Any) -> None:
        for seen, target in zip(detections, targets, strict=True):
            right = (seen["labels"][:, None] == target["labels"]) & (box_iou(seen["boxes"], target["boxes"]) > 0.5)
            self.found += right[seen["scores"] > 0.5].any(0).tolist()

    def compute(self) -> float:
        return sum(self.found) / len(self.found)


def data(images: int = 240, seed: int = 0) -> DataLoader[Any]:
    generator, digits, scenes = torch.Generator().manual_seed(seed), load_digits(n_class=2), []
    for rows in torch.randint(len(digits.images), (images, 2), generator=generator):
        corners = torch.randint(9, (2, 2), generator=generator) * torch.tensor([1, 3]) + torch.tensor([[0, 0], [16, 0]])
        image, boxes = torch.zeros(3, 32, 32), torch.cat([corners, corners + 8], 1)
        for row, (x, y, right, bottom) in zip(rows, boxes, strict=True):
            image[:, y:bottom, x:right] = torch.tensor(digits.images[row] / 16)
        scenes.append((image, {"boxes": boxes.float(), "labels": torch.tensor(digits.target[rows] + 1)}))
    return DataLoader(scenes, 8, shuffle=True, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))


def make_trainer(**changes: Any) -> hocket.Trainer:
    options = {"model": Detector(), "train_data": data(), "optimizer": "adamw(lr=3e-3)", "duration": "3ep", "seed": 1}
    options |= {"eval_data": {"unseen": data(48, seed=1)}, "metrics": {"recall": Recall()}}
    return hocket.Trainer(**options | changes)


if __name__ == "__main__":
    print("recall in unseen images:", make_trainer(loggers=["progress"]).fit().metrics["unseen/recall"])

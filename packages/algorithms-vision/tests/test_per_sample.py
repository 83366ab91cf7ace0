"""Algorithms that transform samples or batches: where they find images and targets, and in which part of a run they act."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hocket
from hocket_vision import AlternatingFlip, AugMix, ColOut, ProgressiveResizing, RandAugment

IMAGES = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Mean(nn.Module):
    """One number for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.weight * images.flatten(1).mean(1)


class Unlabelled(hocket.Task):
    """Trains on images alone: the only item of a batch, or at a key."""

    def __init__(self, key: Any = 0) -> None:
        super().__init__()
        self.model, self.key = Mean(), key

    def forward(self, batch):
        return self.model(batch[self.key])

    def loss(self, outputs, batch):
        return outputs.square().mean()


def batches_of(algorithm: hocket.Algorithm, **arguments: Any) -> list[Any]:
    """Return the batches of a fit after ``after_dataloader``."""
    seen = []

    class Look(hocket.Callback):
        def batch_start(self, state):
            seen.append(state.batch)

    arguments = {"optimizer": "sgd(lr=0.1)", "duration": "1ep", "seed": 1, **arguments}
    hocket.Trainer(
        algorithms=[algorithm], callbacks=[Look()], device="cpu", checkpoints=False, **arguments
    ).fit()  # fmt: skip
    return seen


class Dicts(Dataset):
    """Samples with two images, of which the model sees the second."""

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index):
        return {"thumbnail": IMAGES[index], "pixels": IMAGES[index], "score": torch.tensor(float(index))}


@pytest.mark.parametrize("kind", [AugMix, RandAugment])
@pytest.mark.parametrize("arguments", [{"inputs": "pixels"}, {"inputs": "thumbnail", "input_key": "pixels"}])
def test_samples_are_augmented_where_the_trainer_finds_its_inputs(kind, arguments):
    key = arguments.get("input_key")
    (batch,) = batches_of(
        kind(severity=9, input_key=key), model=Mean(), loss=F.mse_loss, inputs=arguments["inputs"], targets="score",
        train_data=DataLoader(Dicts(), 12),
    )  # fmt: skip
    assert batch["thumbnail"].equal(IMAGES) and not batch["pixels"].equal(IMAGES)
    assert batch["score"].equal(torch.arange(12.0))


def collated(samples):
    images, scores = zip(*samples, strict=True)
    return {"pixels": torch.stack(images), "score": torch.stack(scores)}


def test_samples_that_are_arranged_otherwise_than_batches_need_a_key():
    data = DataLoader(TensorDataset(IMAGES, torch.arange(12.0)), 12, collate_fn=collated)
    arguments = {"model": Mean(), "loss": F.mse_loss, "inputs": "pixels", "targets": "score", "train_data": data}
    for algorithm in (AugMix(), ColOut(batch=False), AlternatingFlip()):
        with pytest.raises(KeyError, match=r"input of a sample is not at 'pixels'.*tuple of 2.*input_key="):
            batches_of(algorithm, **arguments)
    (batch,) = batches_of(AugMix(input_key=0), **arguments)
    assert not batch["pixels"].equal(IMAGES)


def test_inputs_that_a_function_returns_are_refused():
    data = DataLoader(TensorDataset(IMAGES, torch.arange(12.0)), 12)
    with pytest.raises(
        KeyError, match=r"augmix cannot replace what the function given as inputs= returns\. Pass input_key"
    ):
        batches_of(AugMix(), model=Mean(), loss=F.mse_loss, inputs=lambda batch: batch[0], train_data=data)


# --- data without targets


@pytest.mark.parametrize("batch", [False, True])
def test_images_alone_lose_rows_and_columns(batch):
    (seen,) = batches_of(
        ColOut(0.25, 0.5, batch=batch), model=Unlabelled(), train_data=DataLoader(TensorDataset(IMAGES), 12)
    )
    assert len(seen) == 1 and seen[0].shape == (12, 3, 6, 4)
    assert torch.isin(seen[0], IMAGES).all()


def test_images_alone_are_flipped_and_resized():
    first, second = batches_of(
        AlternatingFlip(), model=Unlabelled(), train_data=DataLoader(TensorDataset(IMAGES), 12), duration="2ep"
    )
    assert first[0].equal(second[0].flip(-1)) and not first[0].equal(IMAGES)
    (small,) = batches_of(
        ProgressiveResizing(initial_scale=0.5), model=Unlabelled(), train_data=DataLoader(TensorDataset(IMAGES), 12)
    )
    assert small[0].shape == (12, 3, 4, 4)


class Indexed(Dataset):
    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index):
        return {"image": IMAGES[index], "index": index}


@pytest.mark.parametrize(
    ("make", "without"),
    [
        (lambda **settings: ColOut(0.25, 0.5, input_key="image", **settings), "resize_target"),
        (lambda **settings: ColOut(0.25, 0.5, batch=False, input_key="image", **settings), "resize_target"),
        (lambda **settings: AlternatingFlip("index", input_key="image", **settings), "flip_targets"),
        (lambda **settings: AlternatingFlip(input_key="image", **settings), "flip_targets"),
    ],
)
def test_a_dict_may_hold_targets_until_one_says_otherwise(make, without):
    arguments = {"model": Unlabelled("image"), "train_data": DataLoader(Indexed(), 12)}
    with pytest.raises(KeyError, match="target_key") as caught:
        batches_of(make(), **arguments)
    assert f"{without}=False" in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    (batch,) = batches_of(make(**{without: False}), **arguments)
    assert not batch["image"].equal(IMAGES)


def test_indices_that_are_not_in_the_batch_are_named():
    with pytest.raises(KeyError, match=r"nothing at 'position'; it has .*'index'"):
        batches_of(AlternatingFlip("position"), model=Unlabelled("image"), train_data=DataLoader(Indexed(), 12))


# --- a part of the run


@pytest.mark.parametrize(
    "make",
    [
        lambda **span: AugMix(severity=9, batch=True, **span),
        lambda **span: RandAugment(severity=9, batch=True, **span),
        lambda **span: ColOut(batch=True, **span),
        lambda **span: AlternatingFlip(index_key=2, **span),
    ],
    ids=["augmix", "randaugment", "colout", "alternating-flip"],
)
def test_batches_are_transformed_from_start_to_stop(make):
    batch = (IMAGES, torch.zeros(12), torch.arange(12))
    seen = batches_of(
        make(start="0.2dur", stop="3ba"), model=Mean(), loss=F.mse_loss, inputs=0, targets=1, train_data=[batch] * 5
    )
    assert [images.equal(IMAGES) for images, *_ in seen] == [True, False, False, True, True]


@pytest.mark.parametrize("kind", [AugMix, RandAugment, lambda **span: ColOut(batch=False, **span), AlternatingFlip])
@pytest.mark.parametrize("span", [{"start": "1ba"}, {"stop": "0.9dur"}])
def test_samples_have_no_part_of_a_run(kind, span):
    with pytest.raises(ValueError, match=r"start= or stop=.*(batch=True|index_key=)"):
        kind(**span)

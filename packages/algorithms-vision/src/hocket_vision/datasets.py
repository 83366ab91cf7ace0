"""Real image data that needs no download."""

from __future__ import annotations

from typing import Literal

import torch
from torch.utils.data import DataLoader, TensorDataset

from hocket.errors import MissingPackage, WrongValue
from hocket.help import installing


def digits(
    split: Literal["train", "test"] = "train",
    batch_size: int = 64,
    seed: int = 0,
    *,
    size: int = 8,
    num_workers: int = 0,
    drop_last: bool = False,
) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return scikit-learn's 1,797 handwritten digits (UCI, Alpaydin and Kaynak 1998).

    Args:
        split: ``"train"`` (1,437 images, shuffled) or ``"test"`` (360, in order): a stratified held-out fifth, always
            the same for every seed, so that no test image is ever trained on.
        batch_size: images per batch.
        seed: seed of the shuffled order of ``"train"``.
        size: pixels on a side; above 8 the images are scaled up (bilinear, antialiased).
        num_workers: number of loading processes; see :class:`torch.utils.data.DataLoader`.
        drop_last: whether to drop an incomplete last batch.

    Returns:
        A loader of ``(images, labels)``: float32 ``(B, 1, size, size)`` in [0, 1] and int64 ``(B,)``.

    Raises:
        ModuleNotFoundError: if scikit-learn is not installed.
        ValueError: for an unknown split.

    Example:
        >>> from hocket_vision import digits
        >>> images, labels = next(iter(digits("train", batch_size=64)))
        >>> images.shape
        torch.Size([64, 1, 8, 8])
    """
    if split not in ("train", "test"):
        raise WrongValue(f"split must be 'train' or 'test', but is {split!r}.")
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "The digits dataset comes with scikit-learn, which is not installed. Type: "
            f"{installing.command('datasets', 'hocket-algorithms-vision')}.",
            name=error.name,
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    chosen = train if split == "train" else test
    images = torch.from_numpy(pixels[chosen]).float().reshape(-1, 1, 8, 8) / 16
    if size != 8:
        images = torch.nn.functional.interpolate(images, (size, size), mode="bilinear", antialias=True).clamp(0, 1)
    return DataLoader(
        TensorDataset(images, torch.from_numpy(labels[chosen]).long()),
        batch_size=batch_size,
        shuffle=split == "train",
        num_workers=num_workers,
        drop_last=drop_last,
        generator=torch.Generator().manual_seed(seed),
    )

"""Seeds and deterministic kernels."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch on all devices. Raises ValueError for a seed outside of 0 to 2**32 - 1.

    Example:
        >>> import torch
        >>> from hocket_migration.composer.utils import reproducibility
        >>> reproducibility.seed_all(17)
        >>> torch.initial_seed()
        17
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed_all({seed}): a seed is a number from 0 to 2**32 - 1.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def seed_context(seed: int) -> Iterator[None]:
    """Seed everything inside the context, and restore the random numbers afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            seed_all(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def get_random_seed() -> int:
    """Return a random seed."""
    return random.SystemRandom().randrange(2**32)


def configure_deterministic_mode() -> None:
    """Use deterministic kernels only, in the whole process. ``Trainer(deterministic_mode=True)`` does it for a run."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

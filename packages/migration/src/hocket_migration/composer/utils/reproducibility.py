"""Seeds and deterministic kernels."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hocket.errors import WrongValue
from hocket_migration.composer.utils import dist

#: The largest seed.
MAX_SEED = 2**32 - 1


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch on all devices. Raises ValueError for a seed outside of 0 to 2**32 - 1.

    Example:
        >>> import torch
        >>> from hocket_migration.composer.utils import reproducibility
        >>> reproducibility.seed_all(17)
        >>> torch.initial_seed()
        17
    """
    if not 0 <= seed <= MAX_SEED:
        raise WrongValue(f"seed_all({seed}): a seed is a number from 0 to 2**32 - 1.")
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
    return random.SystemRandom().randrange(MAX_SEED + 1)


def get_rng_state() -> list[dict[str, Any]]:
    """Return the states of the random numbers of Python, NumPy and torch, of each rank."""
    state: dict[str, Any] = {
        "python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
    }  # fmt: skip
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return dist.all_gather_object(state)


def load_rng_state(rng_state_dicts: Sequence[dict[str, Any]]) -> None:
    """Restore what :func:`get_rng_state` returned; on a rank that had none, change nothing."""
    rank = dist.get_global_rank()
    if rank >= len(rng_state_dicts):
        return
    state = rng_state_dicts[rank]
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def configure_deterministic_mode() -> None:
    """Use deterministic kernels only, in the whole process. ``Trainer(deterministic_mode=True)`` does it for a run."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

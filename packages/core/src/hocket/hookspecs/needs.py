"""What algorithms and tasks may need of a strategy."""

from __future__ import annotations

import enum


class Need(enum.Flag):
    """Features of a strategy that an algorithm or a task needs; the plan refuses a strategy without them.

    Example:
        >>> import hocket
        >>> class Prune(hocket.Algorithm):
        ...     needs = hocket.Need.FULL_PARAMETERS
        >>> hocket.Need.SECOND_GRADIENT in Prune.needs
        False
    """

    NOTHING = 0
    FULL_PARAMETERS = enum.auto()  # full parameters instead of shards
    SECOND_GRADIENT = enum.auto()  # computing the gradients of a batch more than once
    SEVERAL_STEPS = enum.auto()  # stepping a subset of the optimizers, for tasks with train_batch

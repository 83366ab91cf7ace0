"""Checks of arguments that several tools take."""

from __future__ import annotations

from hocket.errors import WrongType


def check_trainer(trainer: object, call: str) -> None:
    """Raise WrongType for something else than a Trainer, such as its model."""
    from hocket.run.trainer import Trainer

    if not isinstance(trainer, Trainer):
        raise WrongType(
            f"{call}({type(trainer).__name__}, …): a {type(trainer).__name__} is not a Trainer, which has model and data. "
            f"Write {call}(hocket.Trainer(model, …), …)."
        )

"""Lightning's loggers under hocket: the user's, or Lightning's default."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from hocket.errors import WrongType, WrongValue


def made(given: Any, framework: ModuleType, fast_dev_run: Any, folder: str) -> list[Any]:
    """Return the loggers that ``logger=`` names, with Lightning's default in a folder. Raises TypeError for other objects."""
    kinds = framework.loggers
    if given is False:
        return []
    if fast_dev_run:
        return [kinds.logger.DummyLogger()]
    if given is None or given is True:
        try:
            return [kinds.TensorBoardLogger(save_dir=folder)]
        except ModuleNotFoundError:
            return [kinds.CSVLogger(save_dir=folder)]
    listed = list(given) if isinstance(given, list | tuple) else [given]
    for each in listed:
        if not isinstance(each, kinds.Logger):
            raise WrongType(
                f"logger={type(each).__name__} is not a Logger of {framework.__name__}. Loggers of hocket are given as "
                "hocket={'loggers': […]}."
            )
    return listed


def log_hyperparameters(loggers: Iterable[Any], module: Any, datamodule: Any) -> None:
    """Pass the saved hyperparameters of a module and its data module, and the module's graph, to all loggers.

    Raises ValueError if both have different values under one name.
    """
    values: dict[str, Any] | None = None
    for owner in (module, datamodule):
        if owner is None or not owner._log_hyperparams:
            continue
        values = values or {}
        for name, value in owner.hparams_initial.items():
            if name == "_class_path":  # of LightningCLI
                continue
            if name in values and values[name] is not value and repr(values[name]) != repr(value):
                raise WrongValue(
                    f"The module and the data module have different hyperparameters {name!r}: {values[name]!r} and {value!r}. "
                    "Rename one of them, or write save_hyperparameters(logger=False)."
                )
            values[name] = value
    for logger in loggers:
        if values is not None:
            logger.log_hyperparams(values)
        logger.log_graph(module)
        logger.save()

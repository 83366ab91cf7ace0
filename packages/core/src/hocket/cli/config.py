"""Configuration files: YAML with the arguments of a Trainer, checked against its signature."""

from __future__ import annotations

import argparse
import difflib
from inspect import signature
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import nn
from torch.utils.data import DataLoader

from hocket.plugins import PluginConfigError
from hocket.plugins.spec import build
from hocket.trainer import Trainer


def make_trainer(
    model: nn.Module,
    data: str | dict[str, Any] | None = None,
    train_data: DataLoader[Any] | None = None,
    eval_data: DataLoader[Any] | dict[str, DataLoader[Any]] | None = None,
    metrics: dict[str, nn.Module] | None = None,
    **arguments: Any,
) -> Trainer:
    """Return a Trainer made from the keys of a configuration file; other keys are arguments of `hocket.Trainer`.

    Args:
        model: ``class_path`` of a module's class, or of a function that returns one, and its ``init_args``.
        data: a plug-in of kind ``datasets``, such as ``digits`` or ``{digits: {batch_size: 64}}``: its splits ``"train"``
            and ``"test"``.
        train_data: training data by ``class_path``, instead of ``data``.
        eval_data: one evaluation set by ``class_path``, or several by label, instead of ``data``.
        metrics: evaluation metrics by name, each by ``class_path``.
    """
    if data is not None:
        train_data = build("datasets", data, "train").obj
        eval_data = {"test": build("datasets", data, "test").obj}
    return Trainer(model=model, train_data=train_data, eval_data=eval_data, metrics=metrics, **arguments)


def _keys() -> set[str]:
    taken = [*signature(make_trainer).parameters, *signature(Trainer.__init__).parameters]
    return {*taken} - {"self", "arguments"}


def trainer_from(args: argparse.Namespace) -> Trainer:
    """Return the Trainer that a file describes. Exits the process with a message if the file cannot be parsed.

    Raises PluginConfigError for a key or a value that the Trainer does not accept.
    """
    parser = ArgumentParser(prog="hocket", usage=argparse.SUPPRESS, add_help=False)
    parser.add_argument("--config", action="config")
    parser.add_function_arguments(make_trainer, fail_untyped=False)
    for change in args.changes:
        if "=" not in change:
            parser.error(
                f"'{change}' is not an override. Write key=value, such as duration=2ep or model.init_args.width=8."
            )
        key, keys = change.partition("=")[0].partition(".")[0], _keys()
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            raise PluginConfigError(
                f"'{key}' is not a key of a configuration. "
                + (f"Did you mean '{near[0]}'?" if near else f"The keys are {', '.join(sorted(keys))}.")
            )
    config = parser.parse_args(["--config", args.config, *(f"--{change}" for change in args.changes)])
    if config.seed is not None:
        torch.manual_seed(config.seed)  # for the initial weights of the model
    arguments = parser.instantiate(config).as_dict()
    del arguments["config"]
    try:
        return make_trainer(**arguments)
    except ValueError as error:
        raise PluginConfigError(str(error)) from error

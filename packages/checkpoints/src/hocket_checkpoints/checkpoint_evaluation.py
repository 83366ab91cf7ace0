"""Evaluate the weights of a checkpoint, and return to those of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.basics import seeding
from hocket.basics.dtensors import shard_like
from hocket.basics.plain_data import decode, encode
from hocket.basics.sparse_quantized import sized_like
from hocket.data.stateful import has_state
from hocket.errors import CheckpointError, WrongValue
from hocket.hookspecs import Event
from hocket.loop.agreement import ranks_of
from hocket_checkpoints.components.omitted_weights import differences
from hocket_checkpoints.content import of_run
from hocket_checkpoints.resuming import locate
from hocket_checkpoints.weight_differences import Report, mismatched, own_model

if TYPE_CHECKING:
    from hocket.state.state import State
    from hocket_checkpoints.periodic_saving import Checkpoints

#: What is read: weights, the description of those that are omitted, and the state of algorithms such as the averages of EMA,
#: which evaluation uses instead.
_READ = ("model", "version", "omitted", "plugins.algorithms")


@contextmanager
def weights_of(state: State, where: str | Path, checkpoints: Checkpoints | None) -> Iterator[None]:
    """Put a checkpoint's weights into the model, and its state into the algorithms, inside the context.

    Args:
        where: ``"best"`` or ``"latest"`` of ``checkpoints``, or the folder or URL of any checkpoint.

    Every rank enters it. Afterwards the tensors hold their values bitwise again.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or does not fit the model.
        ValueError: ``"best"`` or ``"latest"`` without checkpoints.
    """
    if where in state.eval_sets and not os.path.lexists(where):
        raise CheckpointError(
            f"'{where}' is an evaluation set, and a text is a checkpoint: 'best', 'latest', or a path. Write evaluate() to "
            f"evaluate all sets, or evaluate({{'{where}': loader}}) for one."
        )
    ranks = ranks_of(state)
    with seeding.preserved(devices=False):
        if where in ("best", "latest"):
            if checkpoints is None:
                raise WrongValue(
                    f"'{where}' is one of this run's checkpoints, but it writes none. Pass "
                    "«checkpoints=hocket.Checkpoints('runs/a')¦checkpoints='runs/a'» to the Trainer, or the path of a "
                    "checkpoint here."
                )
            path = ranks.first(lambda: checkpoints.listing.path_of(str(where)))
        else:
            path = os.fspath(where)
        store, name = locate(path, None if checkpoints is None else checkpoints.store, ranks, write="checkpoint=")
        tree = store.read(name, only=_READ, like=of_run(state).like(), ranks=ranks)
    algorithms = {
        each.name: each.obj for each in state.bus.attachments if each.kind == "algorithms" and has_state(each.obj)
    }
    saved = tree.get("plugins", {}).get("algorithms", {})
    for each, algorithm in algorithms.items():
        if each not in saved and Event.EVAL_BEFORE_ALL in algorithm.events and algorithm.state_dict():
            raise CheckpointError(
                f"{path} has no state of the algorithm '{each}', which this Trainer evaluates with. Evaluate it in a Trainer "
                "without that algorithm."
            )
    # Checkpoints of weights only have the model's own names.
    prefix = "" if "version" in tree else state.model_prefix
    weights = {f"{prefix}{key}": value for key, value in decode(tree["model"], copy=False).items()}
    pairs = ranks.agree(lambda: _pairs(state, weights, tree.get("omitted") or {}, path))
    kept = [(tensor, tensor.detach().clone()) for tensor, _ in pairs]
    states = {
        each: decode(encode(algorithm.state_dict(), f"algorithm '{each}'", gather=False))  # copies
        for each, algorithm in algorithms.items()
        if each in saved
    }
    try:
        _copy(pairs)
        for each in states:
            algorithms[each].load_state_dict(decode(saved[each], copy=False))
        yield
    finally:
        _copy(kept)
        for each, before in states.items():
            algorithms[each].load_state_dict(before)


def _pairs(
    state: State, weights: Mapping[str, Any], omitted: Mapping[str, Any], path: str
) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor of the model with its value in the checkpoint, sharded like it; frozen ones may be omitted."""
    if problems := differences(state, omitted):
        raise CheckpointError(f"{path} cannot be evaluated. {' '.join(problems)}")
    own = {
        name: each
        for name, each in state.task.state_dict(keep_vars=True).items()
        if isinstance(each, Tensor) and name not in omitted
    }
    given = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    report = Report(
        tuple(name for name in own if name not in given),
        tuple(name for name in given if name not in own),
        mismatched(given, own),
    )
    if report:
        raise CheckpointError(
            f"The weights of {path} do not fit the model, and nothing was evaluated.\n{report}\n"
            f"«Make the Trainer with the model that they were trained with¦{own_model(path)}»."
        )
    return [(tensor, shard_like(given[name], tensor)) for name, tensor in own.items()]


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in pairs:
        sized_like(tensor, value).copy_(value)

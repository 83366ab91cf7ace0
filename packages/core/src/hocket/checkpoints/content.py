"""What is in a checkpoint: a tree from which another Trainer goes on as this one would have, to the last bit.

The tree is made of dicts with string keys, lists, tensors, numbers, strings, bytes and None (see `hocket.checkpoints.plain`).
What differs between ranks is gathered under ``ranks``, by rank; all else is the same on every rank. Tensors are the run's own
where that saves a copy: write the tree, or copy it, before training goes on.

With as many ranks as before, each takes what was its own. With another number, ranks go on with the same global batches; those
that were not there before have random numbers as if they began.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hocket.checkpoints import differences
from hocket.checkpoints.fits import ContentError, class_named, class_of, compare, in_order
from hocket.checkpoints.ignoring import ignoring
from hocket.checkpoints.plain import decode, encode
from hocket.checkpoints.shapes import fitting_optimizer_state, misfit_of_model, shapes_of
from hocket.data.batches import Counts, map_tensors
from hocket.data.stateful import has_state
from hocket.distributed.dtensors import mesh_of
from hocket.plugins import catalog
from hocket.plugins.bus import Bus
from hocket.plugins.spec import Voice
from hocket.state import State
from hocket.task import Task
from hocket.time import Time, Unit

if TYPE_CHECKING:
    from hocket.checkpoints.format import Like
    from hocket.trainer import Trainer

#: Counts up when the tree changes; see :func:`load_state_dict`.
VERSION = 1


# --- out of a Trainer


def state_dict(trainer: Trainer, gather: bool = True) -> dict[str, Any]:
    """The tree; unless ``gather``, with DTensors where this rank holds a shard only.

    Raises RuntimeError in the middle of a batch, TypeError for a plug-in's state that is not plain data.
    """
    state, loop = trainer.state, trainer._loop
    bus: Bus = state.bus
    where = loop.state_dict()  # raises first
    model = (bus.model_state if gather else bus.model_shards)(state.prepared)
    optimizer_state = bus.optimizer_state if gather else bus.optimizer_shards
    optimizers = [
        {
            "class": class_of(optimizer),
            "state": encode(optimizer_state(state.prepared, optimizer), "the optimizer", gather),
        }
        for optimizer in state.optimizers
    ]
    own = {
        "random": trainer._randomness.state_dict(),
        "generators": state.generators.state_dict(),
        "train_metrics": loop.metrics.state_dict(),
        "data": loop.data.state_dict() if loop.has_data else None,
        "eval_data": {label: each.source.position() for label, each in state.eval_sets.items()},
        "loss": encode([state.loss, dict(state.loss_parts)]),
        "rank_samples": state.rank_samples,
        "task": encode(state.task.extra_state(), f"extra_state() of {type(state.task).__name__}"),
    }
    return {
        "version": VERSION,
        "run_id": state.run.id,
        "run_name": state.run_name,
        "world_size": state.strategy.world_size,
        "attached": described(bus.voices),
        "configuration": differences.configuration(trainer),
        "model_prefix": state.model_prefix,
        "model": encode(dict(model), "the model", gather),
        "modes": _modes(state),
        "optimizers": {str(index): each for index, each in enumerate(optimizers)},
        "schedules": {
            str(index): {"class": class_of(each), "state": encode(each.state_dict(), "the schedule")}
            for index, each in enumerate(state.schedules)
        },
        "plugins": _plugin_states(bus.voices, gather),
        "timestamp": state.timestamp.state_dict(),
        "previous": state.previous.state_dict(),
        "progress": {name: getattr(state.progress, name) for name in _PROGRESS},
        "requested": state.requests.state_dict(),
        "metrics": dict(state.metrics),
        "logged": encode(state.logged, "what was logged"),
        "microbatch": state.microbatch,
        "batch": {"samples": state.batch_samples, "tokens": state.batch_tokens, "norm": encode(state.gradient_norm)},
        "epoch_length": state.epoch_length,
        "max_duration": _time(state.max_duration),
        "fit": {**where, "until": _time(state.progress.fit_until), "asked": trainer._asked},
        "guard": encode(loop._guard.state_dict(), "the guard"),
        "ranks": bus.all_gather_object(map_tensors(_copy, own)),
    }


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU: ranks cannot reach the devices of others."""
    return tensor.to("cpu", copy=True)


_PROGRESS = ("ready", "started", "processed", "completed")


def _modes(state: State) -> dict[str, list[str]]:
    """What weights do not tell: which parameters are frozen, and which modules are in eval mode."""
    return {
        "frozen": [name for name, each in state.task.named_parameters() if not each.requires_grad],
        "eval": [name for name, each in state.task.named_modules() if not each.training],
    }


def shards(trainer: Trainer) -> Like:
    """How this run is sharded, by path in the tree: for `hocket.checkpoints.format.read`."""
    state = trainer.state
    model = {f"model.{name}": value for name, value in state.bus.model_shards(state.prepared).items()}
    parameters = [
        [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for optimizer in state.optimizers
    ]
    named = dict([*state.model.named_parameters(), *state.prepared.named_parameters()])

    def find(path: str, reference: dict[str, Any]) -> Any:
        if found := _OF_PARAMETER.match(path):
            optimizer, index = map(int, found.groups())
            return parameters[optimizer][index]
        if path.startswith("plugins.") and "pieces" in reference:
            names = path.split(".")  # what plug-ins keep of shards has the shards' names at its end
            return next((named[name] for n in range(len(names)) if (name := ".".join(names[n:])) in named), None)
        return model.get(path)

    def like(path: str, reference: dict[str, Any]) -> Tensor | None:
        try:
            found = find(path, reference)
        except IndexError:  # of another optimizer, which is refused later
            return None
        fits = isinstance(found, Tensor) and mesh_of(found) is not None and list(found.shape) == reference["shape"]
        return found if fits else None

    return like


#: The path of what an optimizer keeps for a parameter.
_OF_PARAMETER = re.compile(r"optimizers\.(\d+)\.state\.state\.~int\.(\d+)\.")


def _load_modes(state: State, modes: Mapping[str, list[str]]) -> None:
    frozen, evaluating = set(modes["frozen"]), set(modes["eval"])
    for name, parameter in state.task.named_parameters():
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, module in state.task.named_modules():
        module.training = name not in evaluating


def _plugin_states(voices: tuple[Voice, ...], gather: bool) -> dict[str, dict[str, Any]]:
    """By kind and name; plug-ins that keep nothing are left out."""
    states: dict[str, dict[str, Any]] = {}
    for voice in voices:
        if has_state(voice.obj) and (state := voice.obj.state_dict()):
            states.setdefault(voice.kind, {})[voice.name] = encode(
                state, f"{catalog.singular(voice.kind)} '{voice.name}'", gather
            )
    return states


def described(voices: tuple[Voice, ...]) -> list[dict[str, Any]]:
    """What is attached; its configuration is None where that is not known, or is no plain data."""
    return [
        {
            "kind": voice.kind,
            "name": voice.name,
            "class": class_of(voice.obj),
            "dist": voice.dist,
            "version": voice.version,
            "config": _config(voice),
        }
        for voice in voices
    ]


def _config(voice: Voice) -> Any:
    try:
        return None if voice.instance else encode(dict(voice.config))
    except TypeError:
        return None


def _time(time: Time | None) -> list[Any] | None:
    return None if time is None else [time.value, str(time.unit)]


# --- into a Trainer


def load_state_dict(
    trainer: Trainer, tree: Mapping[str, Any], strict: bool, ignore: Sequence[str] = (), copy: bool = True
) -> None:
    """Make the Trainer go on where another was. The tree is not changed.

    Args:
        strict: whether everything in the tree and in the Trainer must have its counterpart; otherwise what has none, weights
            of another shape included, is left as it is, with a warning.
        ignore: globs of dotted paths in the tree; what they match is left as it is in the Trainer.
        copy: whether the tree is used again, so that none of its tensors may be kept.

    Raises:
        ContentError: the Trainer has other plug-ins with state, other algorithms, other optimizers, or weights or optimizer
            state of other names or shapes. Nothing was loaded.
    """
    state, loop = trainer.state, trainer._loop
    bus: Bus = state.bus
    if loop.stage:
        raise RuntimeError("State cannot be loaded during a fit. Load it before fit begins.")
    if tree.get("version") != VERSION:
        raise ContentError(
            f"The checkpoint's content has version {tree.get('version')!r}, and this hocket reads {VERSION}. Upgrade the older."
        )
    weights = shapes_of(decode(tree["model"], copy=False))
    if ignore:
        tree = ignoring(tree, state_dict(trainer), ignore)
    model = decode(tree["model"], copy=False)
    problems = compare(state, tree, weights)
    if strict and (misfit := misfit_of_model(state, model)):
        problems.insert(0, misfit)
    if _forgets_extra_state(state, tree):
        problems.append(
            f"The checkpoint has an extra state of its task, but {type(state.task).__name__} does not define "
            "load_extra_state(state)."
        )
    if problems:
        if strict:
            raise ContentError(" ".join(problems) + " To leave parts out, pass ignore=['…'] or strict=False.")
        warnings.warn("Loaded with strict=False. " + " ".join(problems), stacklevel=3)

    if changes := differences.changed(trainer, tree):
        warnings.warn(
            f"This run is configured otherwise than that of the checkpoint: {'; '.join(changes)}. To continue as it was, give "
            "the Trainer what it was given then.",
            stacklevel=3,
        )

    own = partial(decode, copy=copy)
    # In the order in which they were made: sharded optimizers look at the parameters.
    bus.load_model_state(state.prepared, _model(state, model, strict))
    _load_modes(state, tree["modes"])
    for index, (optimizer, saved) in enumerate(zip(state.optimizers, in_order(tree["optimizers"]), strict=False)):
        if class_named(saved["class"]) == class_of(optimizer):
            fitting = own(saved["state"])
            if not strict:
                fitting, _ = fitting_optimizer_state(state, index, fitting, weights)
            if fitting is not None:
                bus.load_optimizer_state(state.prepared, optimizer, fitting)
    for schedule, saved in zip(state.schedules, in_order(tree["schedules"]), strict=False):
        if class_named(saved["class"]) == class_of(schedule):
            schedule.load_state_dict(own(saved["state"]))
    for voice in bus.voices:
        saved_state = tree["plugins"].get(voice.kind, {}).get(voice.name)
        if saved_state is not None and has_state(voice.obj):
            voice.obj.load_state_dict(own(saved_state))

    state.timestamp.load_state_dict(tree["timestamp"])
    state.previous.load_state_dict(tree["previous"])
    for name in _PROGRESS:
        setattr(state.progress, name, tree["progress"][name])
    state.requests.load_state_dict(tree["requested"])
    state.metrics = dict(tree["metrics"])
    state.logged = own(tree["logged"])
    state.microbatch = tree["microbatch"]
    state.step.counts = Counts(tree["batch"]["samples"], tree["batch"]["tokens"])
    state.step.gradient_norm = own(tree["batch"]["norm"])
    state.progress.max_duration, state.progress.fit_until = (
        _from_time(tree["max_duration"]),
        _from_time(tree["fit"]["until"]),
    )
    trainer._asked = tree["fit"]["asked"]
    loop._guard.load_state_dict(own(tree["guard"]))
    loop.load_state_dict({name: value for name, value in tree["fit"].items() if name not in ("until", "asked")})
    _load_ranks(trainer, tree["ranks"], own, strict)
    if state.epoch_length is None:
        state.progress.epoch_length = tree["epoch_length"]


def _forgets_extra_state(state: State, tree: Mapping[str, Any]) -> bool:
    saved = any(each.get("task") is not None for each in tree["ranks"])  # older checkpoints have none
    return saved and type(state.task).load_extra_state is Task.load_extra_state


def _load_ranks(trainer: Trainer, ranks: list[Mapping[str, Any]], copied: Callable[[Any], Any], strict: bool) -> None:
    state, loop = trainer.state, trainer._loop
    rank, world = state.strategy.rank, state.strategy.world_size
    mine = ranks[rank] if rank < len(ranks) else None
    own = ranks[0] if mine is None else mine
    if mine is not None:
        trainer._randomness.load_state_dict(mine["random"])
    state.generators.load_state_dict(own["generators"])
    if ranks[0]["train_metrics"]["metrics"].keys() == loop.metrics.names or strict:
        loop.metrics.load_state_dicts([each["train_metrics"] for each in ranks[rank::world]])
    loss, parts = copied(own["loss"])
    state.step.loss, state.step.losses = (None if loss is None else loss.to(state.device)), parts
    state.step.samples = own["rank_samples"]
    if own.get("task") is not None and type(state.task).load_extra_state is not Task.load_extra_state:
        state.task.load_extra_state(copied(own["task"]))
    for label, each in state.eval_sets.items():
        if label in own["eval_data"]:
            each.source.restore(own["eval_data"][label])
    position = [each["data"] for each in ranks]
    if loop.has_data:
        load_position(trainer, position)
    else:
        trainer._position = position


def load_position(trainer: Trainer, ranks: list[Any]) -> None:
    """The place in the training data, by rank. Raises DataError where it is that of other ranks, each with its own data."""
    trainer._position = None
    strategy = trainer.state.strategy
    same = len(ranks) == strategy.world_size
    mine = ranks[strategy.rank] if same else ranks[0]
    if mine is None:
        return
    data = trainer._loop.data
    data.load_state_dict(mine if same else data.reshare(ranks, strategy.world_size))
    trainer.state.progress.epoch_length = data.length


def _from_time(saved: list[Any] | None) -> Time | None:
    return None if saved is None else Time(saved[0], Unit(saved[1]))


def _model(state: State, saved: dict[str, Any], strict: bool) -> dict[str, Any]:
    """What to load: with ``strict`` what was saved; otherwise that of it which fits, among what is there."""
    if strict:
        return saved
    there: dict[str, Any] = dict(state.bus.model_state(state.prepared))
    fits = {
        name: value
        for name, value in saved.items()
        if name in there and getattr(value, "shape", None) == getattr(there[name], "shape", None)
    }
    left_out, missing = sorted(saved.keys() - fits.keys()), sorted(there.keys() - fits.keys())
    if left_out or missing:
        warnings.warn(
            f"The model's weights: {len(fits)} loaded; left out of the checkpoint: {', '.join(left_out) or 'none'}; left as "
            f"they were in the model: {', '.join(missing) or 'none'}.",
            stacklevel=4,
        )
    return {**there, **fits}

"""What is in a checkpoint: a tree from which another Trainer goes on as this one would have, to the last bit.

The tree is made of dicts with string keys, lists, tensors, numbers, strings, bytes and None (see `hocket.checkpoints.plain`).
What differs between ranks is gathered under ``ranks``, by rank; all else is the same on every rank. Tensors are the run's own
where that saves a copy: write the tree, or copy it, before training goes on.

With as many ranks as before, each takes what was its own. With another number, ranks go on with the same global batches; those
that were not there before have random numbers as if they began.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hocket import setup
from hocket.checkpoints.plain import decode, encode
from hocket.data.feed import DataError
from hocket.data.sources import Sources, has_state
from hocket.plugins import catalog
from hocket.plugins.bus import Bus
from hocket.plugins.errors import PluginError
from hocket.plugins.spec import Voice
from hocket.state import State
from hocket.time import Time, Unit

if TYPE_CHECKING:
    from hocket.trainer import Trainer

#: Counts up when the tree changes; see :func:`load_state_dict`.
VERSION = 1


class ContentError(PluginError, ValueError):
    """A checkpoint that does not fit the Trainer that it is loaded into."""


# --- out of a Trainer


def state_dict(trainer: Trainer) -> dict[str, Any]:
    """The tree. Raises RuntimeError in the middle of a batch, TypeError for a plug-in's state that is not plain data."""
    state, loop = trainer.state, trainer._loop
    bus: Bus = state.bus
    where = loop.state_dict()  # raises first
    model = bus.model_state(state.prepared)
    optimizers = [
        {"class": _class(optimizer), "state": encode(bus.optimizer_state(state.prepared, optimizer), "the optimizer")}
        for optimizer in state.optimizers
    ]
    own = {
        "random": trainer._randomness.state_dict(),
        "generators": state.generator_states(),
        "train_metrics": loop.metrics.state_dict(),
        "data": loop.feed.state_dict() if loop.has_data else None,
        "eval_data": {label: Sources(each.given).capture() for label, each in state.eval_sets.items()},
        "loss": encode([state.loss, dict(state.loss_parts)]),
        "rank_samples": state.rank_samples,
    }
    return {
        "version": VERSION,
        "run_name": state.run_name,
        "world_size": state.strategy.world_size,
        "attached": [_described(voice) for voice in bus.voices],
        "model": encode(dict(model), "the model"),
        "optimizers": {str(index): each for index, each in enumerate(optimizers)},
        "schedules": {
            str(index): {"class": _class(each), "state": encode(each.state_dict(), "the schedule")}
            for index, each in enumerate(state.schedules)
        },
        "plugins": _plugin_states(bus.voices),
        "timestamp": state.timestamp.state_dict(),
        "previous": state.previous.state_dict(),
        "progress": {name: getattr(state.progress, name) for name in _PROGRESS},
        "requested": state.requests(),
        "metrics": dict(state.metrics),
        "logged": encode(state.logged, "what was logged"),
        "microbatch": state.microbatch,
        "batch": {"samples": state.batch_samples, "tokens": state.batch_tokens, "norm": encode(state.gradient_norm)},
        "epoch_length": state.epoch_length,
        "max_duration": _time(state.max_duration),
        "fit": {**where, "until": _time(state.fit_until), "asked": trainer._asked},
        "guard": encode(loop._guard.state_dict(), "the guard"),
        "ranks": copy.deepcopy(bus.all_gather_object(own)),
    }


_PROGRESS = ("ready", "started", "processed", "completed")


def _plugin_states(voices: tuple[Voice, ...]) -> dict[str, dict[str, Any]]:
    """By kind and name; plug-ins that keep nothing are left out."""
    states: dict[str, dict[str, Any]] = {}
    for voice in voices:
        if has_state(voice.obj) and (state := voice.obj.state_dict()):
            states.setdefault(voice.kind, {})[voice.name] = encode(
                state, f"{catalog.singular(voice.kind)} '{voice.name}'"
            )
    return states


def _described(voice: Voice) -> dict[str, Any]:
    return {
        "kind": voice.kind,
        "name": voice.name,
        "class": _class(voice.obj),
        "dist": voice.dist,
        "version": voice.version,
        "config": setup.plain(voice.config),
    }


def _class(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _time(time: Time | None) -> list[Any] | None:
    return None if time is None else [time.value, str(time.unit)]


# --- into a Trainer


def load_state_dict(trainer: Trainer, tree: Mapping[str, Any], strict: bool) -> None:
    """Make the Trainer go on where another was. The tree is not changed, and none of its tensors is kept.

    Args:
        strict: whether everything in the tree and in the Trainer must have its counterpart; otherwise what has none, weights
            of another shape included, is left as it is, with a warning.

    Raises:
        ContentError: the Trainer has other plug-ins with state, other algorithms, or other optimizers. Nothing was loaded.
        RuntimeError: the model's names or shapes differ.
    """
    state, loop = trainer.state, trainer._loop
    bus: Bus = state.bus
    if loop.stage:
        raise RuntimeError("State cannot be loaded during a fit. Load it before fit begins.")
    if tree.get("version") != VERSION:
        raise ContentError(
            f"The checkpoint's content has version {tree.get('version')!r}, and this hocket reads {VERSION}. Upgrade the older."
        )
    if problems := _compare(state, tree):
        if strict:
            raise ContentError(" ".join(problems) + " To load what fits and leave out the rest, pass strict=False.")
        warnings.warn("Loaded with strict=False. " + " ".join(problems), stacklevel=3)

    # In the order in which they were made: sharded optimizers look at the parameters.
    bus.load_model_state(state.prepared, _model(state, decode(tree["model"]), strict))
    for optimizer, saved in zip(state.optimizers, _in_order(tree["optimizers"]), strict=False):
        if saved["class"] == _class(optimizer):
            bus.load_optimizer_state(state.prepared, optimizer, decode(saved["state"]))
    for schedule, saved in zip(state.schedules, _in_order(tree["schedules"]), strict=False):
        if saved["class"] == _class(schedule):
            schedule.load_state_dict(decode(saved["state"]))
    for voice in bus.voices:
        saved_state = tree["plugins"].get(voice.kind, {}).get(voice.name)
        if saved_state is not None and has_state(voice.obj):
            voice.obj.load_state_dict(decode(saved_state))

    state.timestamp.load_state_dict(tree["timestamp"])
    state.previous.load_state_dict(tree["previous"])
    for name in _PROGRESS:
        setattr(state.progress, name, tree["progress"][name])
    state.load_requests(tree["requested"])
    state.metrics = dict(tree["metrics"])
    state.logged = decode(tree["logged"])
    state.microbatch = tree["microbatch"]
    state.batch_samples, state.batch_tokens = tree["batch"]["samples"], tree["batch"]["tokens"]
    state.gradient_norm = decode(tree["batch"]["norm"])
    state.max_duration, state.fit_until = _from_time(tree["max_duration"]), _from_time(tree["fit"]["until"])
    trainer._asked = tree["fit"]["asked"]
    loop._guard.load_state_dict(decode(tree["guard"]))
    loop.load_state_dict({name: value for name, value in tree["fit"].items() if name not in ("until", "asked")})
    _load_ranks(trainer, tree["ranks"], strict)
    state.epoch_length = tree["epoch_length"] if state.epoch_length is None else state.epoch_length


def _in_order(numbered: Mapping[str, Any]) -> list[Any]:
    return [numbered[str(index)] for index in range(len(numbered))]


def _load_ranks(trainer: Trainer, ranks: list[Mapping[str, Any]], strict: bool) -> None:
    state, loop = trainer.state, trainer._loop
    rank, world = state.strategy.rank, state.strategy.world_size
    mine = ranks[rank] if rank < len(ranks) else None
    own = ranks[0] if mine is None else mine
    if mine is not None:
        trainer._randomness.load_state_dict(mine["random"])
    state.load_generator_states(own["generators"])
    if ranks[0]["train_metrics"]["metrics"].keys() == loop.metrics.names or strict:
        loop.metrics.load_state_dicts([each["train_metrics"] for each in ranks[rank::world]])
    loss, parts = decode(own["loss"])
    state.loss, state.loss_parts = (None if loss is None else loss.to(state.device)), parts
    state.rank_samples = own["rank_samples"]
    for label, each in state.eval_sets.items():
        Sources(each.given).restore(own["eval_data"].get(label, {}))
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
    if not same and mine["under_way"] and mine["pass"]["of_rank"]:
        raise DataError(
            f"{len(ranks)} ranks, each with data of its own, were in the middle of a pass, which {strategy.world_size} cannot "
            "continue. Start as many ranks, or let the strategy divide the data: leave out DistributedSampler and split_data."
        )
    trainer._loop.feed.load_state_dict(mine)
    trainer.state.epoch_length = trainer._loop.feed.length


def _from_time(saved: list[Any] | None) -> Time | None:
    return None if saved is None else Time(saved[0], Unit(saved[1]))


# --- whether they fit


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


def _compare(state: State, tree: Mapping[str, Any]) -> list[str]:
    """What does not fit, one sentence or two each."""
    problems = []
    saved, here = tree["optimizers"], [_class(optimizer) for optimizer in state.optimizers]
    before = [each["class"] for each in _in_order(saved)]
    if before != here:
        problems.append(
            f"The checkpoint has the state of {', '.join(before) or 'no optimizer'}, but the Trainer has "
            f"{', '.join(here) or 'none'}. Give the Trainer the same optimizer=."
        )
    before, here = [each["class"] for each in _in_order(tree["schedules"])], [_class(each) for each in state.schedules]
    if before != here:
        problems.append(
            f"The checkpoint has {len(before)} schedules ({', '.join(before)}), the Trainer {len(here)} "
            f"({', '.join(here)}). Give the Trainer the same schedule=."
        )
    attached = {(voice.kind, voice.name): voice for voice in state.bus.voices}
    described = {(each["kind"], each["name"]): each for each in tree["attached"]}
    for (kind, name), each in described.items():
        states = tree["plugins"].get(kind, {})
        if (kind, name) not in attached and (kind == "algorithms" or (kind in _SEVERAL and name in states)):
            problems.append(
                f"The checkpoint was taken with the {catalog.singular(kind)} '{name}' ({each['class']}), which is not "
                f"attached. {_how_to_get(kind, each)}"
            )
        elif name in states and (kind, name) in attached and _class(attached[kind, name].obj) != each["class"]:
            problems.append(
                f"'{name}' is a {each['class']} in the checkpoint and a {_class(attached[kind, name].obj)} here. Attach the "
                f"same {kind}, in the same order."
            )
    for (kind, name), voice in attached.items():
        keeps = kind in _SEVERAL and has_state(voice.obj) and bool(voice.obj.state_dict())
        if (kind, name) not in described and (kind == "algorithms" or keeps):
            problems.append(
                f"The {catalog.singular(kind)} '{name}' is attached, but the checkpoint was taken without it. Leave it out."
            )
    return problems


#: Kinds of which there can be any number; of the others there is always one, which may be another than before.
_SEVERAL = ("algorithms", "callbacks", "loggers")


def _how_to_get(kind: str, each: Mapping[str, Any]) -> str:
    """What to type for a plug-in that a checkpoint was taken with."""
    short = each["name"].rpartition("-")[0] if each["name"].rpartition("-")[2].isdigit() else each["name"]
    if {short, each["name"]} & set(catalog.names(kind)):
        return f"Pass {kind}=['{short}'] to the Trainer."
    if each["dist"] in (None, "this process"):
        return f"Pass an instance of it to the Trainer: {kind}=[{each['class'].rpartition('.')[2]}(…)]."
    return (
        f"It comes with {each['dist']} {each['version']}, which is not installed or switched off; type: "
        f"pip install '{each['dist']}=={each['version']}', and pass {kind}=['{short}'] to the Trainer."
    )

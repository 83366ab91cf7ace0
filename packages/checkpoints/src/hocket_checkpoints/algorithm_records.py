"""The algorithms that a checkpoint was taken with, and what to type for those that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hocket.basics.plain_data import decode
from hocket.errors import CheckpointError
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.plugins import registry
from hocket.state.component import ContentError
from hocket.state.state import State
from hocket_checkpoints.classes import class_named, full_name
from hocket_checkpoints.components.plugins import how_to_get, short_name


def recorded_algorithms(path: Path | str, every: bool = False) -> list[dict[str, dict[str, Any]]]:
    """Return the algorithms that a checkpoint was taken with, by name and configuration, for ``Trainer(algorithms=…)``.

    Args:
        path: the checkpoint's folder or URL; a checkpoint of weights only suffices.
        every: whether to return all algorithms. By default only those that change the model's structure (that act on
            ``init``), which its weights need.

    Raises:
        ContentError: an algorithm is not installed (the message names its distribution), is of another class than it was, or
            was given as an instance, whose configuration is not known.
        CheckpointError: there is no such checkpoint, or it is damaged.

    Example:
        >>> import hocket, torch
        >>> from hocket.checkpoints import recorded_algorithms
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu", duration="2ba",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 2, algorithms=["ema"],
        ...     checkpoints=hocket.Checkpoints("runs/a"),
        ... )
        >>> name = trainer.fit().checkpoints[-1]
        >>> recorded_algorithms(f"runs/a/{name}", every=True)
        [{'hocket-algorithms-general/ema': {}}]
    """
    specifications: list[dict[str, dict[str, Any]]] = []
    from hocket_checkpoints.storage import format as formats
    from hocket_checkpoints.storage.urls import local_folder

    with local_folder(path, ["attached"]) as local:
        attached = formats.read(local, only=["attached"])["attached"]
    for each in attached:
        if each["kind"] != "algorithms":
            continue
        short = short_name(each["name"])
        name = short if each["dist"] in (None, "this process") else f"{each['dist']}/{short}"
        if short not in registry.names("algorithms"):
            raise ContentError(f"{path} was taken with the algorithm '{short}'. {how_to_get('algorithms', each)}")
        found = registry.find("algorithms", name).load()
        if class_named(full_name(found)) != class_named(each["class"]):
            raise ContentError(
                f"'{short}' was a {each['class']} when {path} was taken, and is a {full_name(found)} "
                f"now. Pass an instance of the right one: «algorithms=[{each['class'].rpartition('.')[2]}(…)]»."
            )
        if not every and Event.INIT not in found.events:
            continue
        if each["config"] is None:
            raise ContentError(
                f"{path} does not say how its algorithm '{short}' was made, because it was given as an instance or with "
                f"arguments that are not plain data. Pass one made the same way: «algorithms=[{found.__qualname__}(…)]»."
            )
        specifications.append({name: decode(each["config"])})
    return specifications


def warn_of_surgery(path: Path | str, state: State) -> None:
    """Warn if algorithms changed the model of a hocket checkpoint and are not attached here."""
    try:
        recorded = recorded_algorithms(path)
    except CheckpointError:
        return
    except ContentError as error:
        warn(str(error))
        return
    here = {short_name(attachment.name) for attachment in state.bus.attachments}
    missing = [each for each in recorded if not {name.rpartition("/")[2] for name in each} & here]
    if missing:
        warn(
            f"The weights of {path} were trained in a model that algorithms had changed, and this Trainer does not have these "
            f"algorithms. Unless the model is changed already, give the Trainer «algorithms={missing}»."
        )

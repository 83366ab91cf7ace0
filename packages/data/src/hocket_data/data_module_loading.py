"""The data module of a run: when its methods are called, with which random numbers, and its state in checkpoints."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from hocket.basics import seeding
from hocket.basics.plain_data import encode
from hocket.basics.short_repr import short
from hocket.data.checks import whose_module
from hocket.errors import WrongType
from hocket.help import names, optional_packages, warn
from hocket.loop.agreement import ranks_of
from hocket.state.state import State
from hocket_data.data_module import DataModule

_METHODS = ("prepare", "setup", "train", "eval", "predict", "extra_state", "load_extra_state")


class ModuleData:
    """The data of a module in one run.

    Args:
        seed: the run's; None for that of rank 0's global torch generator.
    """

    def __init__(self, module: DataModule, state: State, seed: int | None) -> None:
        self.module = module
        self._state, self._seed = state, seed
        self._ready = False
        #: Extra state of a checkpoint, until the module is set up.
        self._extra: Any = None
        #: Data that was made: "train", "eval".
        self.made: set[str] = set()

    def described(self, name: str) -> str:
        """Return the name of the data that a method returns, for messages."""
        return f"{name}() of «data={type(self.module).__name__}(…)»"

    def make(self, name: str) -> Any:
        """Return what ``train``, ``eval`` or ``predict`` returns. All ranks call it together, and all raise if one fails."""
        module, ranks = self.module, ranks_of(self._state)
        if self._seed is None:
            self._seed = self._state.bus.broadcast_object(torch.initial_seed())
        if not self._ready:
            ranks.agree(lambda: self._call("prepare") if self._state.strategy.local_rank == 0 else None)
            ranks.agree(lambda: self._call("setup"))
            extra, self._extra, self._ready = self._extra, None, True
            if extra is not None:
                ranks.agree(lambda: module.load_extra_state(extra))
        made = ranks.agree(lambda: self._call(name))
        self.made.add(name)
        return made

    def _call(self, name: str) -> Any:
        assert self._seed is not None
        with seeding.preserved():
            # As a generator of a plug-in: independent of the random numbers of training, and of the other methods.
            seeding.seed_everything(self._seed * 0x9E3779B1 + zlib.crc32(f"data.{name}".encode()))
            return getattr(self.module, name)()

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the module's extra state as a tree."""
        return {
            "seed": self._seed,
            "extra": encode(self.module.extra_state(), f"extra_state() of {type(self.module).__name__}"),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`; the module gets its extra state when it is set up."""
        self._seed = saved["seed"]
        if not self._ready:
            self._extra = saved["extra"]
        elif saved["extra"] is not None:
            self.module.load_extra_state(saved["extra"])

    def misfits(self) -> list[str]:
        """Return why the module cannot load the extra state of a checkpoint; empty if it can."""
        kind = type(self.module)
        if kind.load_extra_state is DataModule.load_extra_state:
            return [
                f"The checkpoint has the state of a data module, but {kind.__name__} defines no load_extra_state(state)."
            ]
        return []


def check(data: object, train_data: object, eval_data: object) -> None:
    """Raise TypeError unless ``data=`` is a data module, with what to write, or if the other data is given too."""
    for other, given in (("train_data", train_data), ("eval_data", eval_data)):
        if given is not None:
            raise WrongType(f"{other}= and «data={short(data)}» are both given. data stands for both: omit {other}=.")
    kind = type(data).__name__
    if isinstance(data, type) and issubclass(data, DataModule):
        raise WrongType(f"«data={data.__name__}» is a class. Give an instance: «data={data.__name__}(…)».")
    if whose_module(data) == "lightning":
        theirs = {name: write for name in dir(data) if (write := names.listed(name, "methods", "DataModule"))}
        raise WrongType(
            f"«data={kind}(…)» has the methods of a LightningDataModule. Inherit from hocket.data.DataModule, write "
            f"setup(self) without a stage, and {'; '.join(f'instead of {name}: {write}' for name, write in theirs.items())}. "
            "Or give its loaders: «train_data=module.train_dataloader()», «eval_data={'val': module.val_dataloader()}»."
        )
    if not isinstance(data, DataModule):
        what = f"«data={short(data)}» is not a hocket.data.DataModule, an object with the method train() and others. "
        if isinstance(data, str | Mapping):
            raise WrongType(
                f"{what}A plug-in of kind datasets is a function of the split: write train_data="
                "hocket.plugins.get('datasets', 'digits')('train'), «eval_data={'test': …}»."
            )
        raise WrongType(f"{what}Batches, such as a DataLoader, are given as «train_data=…», «eval_data={{'test': …}}».")
    for name in _METHODS:
        method, arguments = getattr(data, name), list(inspect.signature(getattr(DataModule, name)).parameters)
        write = f"Define def {name}({', '.join(arguments)})."
        if not callable(method):
            raise WrongType(f"{name} of «data={kind}(…)» is {short(method)}, and has to be a method. {write}")
        try:
            inspect.signature(method).bind(*arguments[1:])
        except TypeError as error:
            raise WrongType(f"{name} of «data={kind}(…)» takes other arguments: {error}. {write}") from None
    if message := optional_packages.ask("failures.uncalled.uncalled", type(data), DataModule):
        warn(message)

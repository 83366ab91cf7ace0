"""What modules and callbacks use of ``trainer.strategy``, and how a wrapped optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.data.nesting import map_tensors
from hocket.errors import WrongState, WrongValue
from hocket.hookspecs.needs import Need
from hocket_migration import files

if TYPE_CHECKING:
    from hocket.hookspecs.bus import BusLike
    from hocket.state.state import State
    from hocket_migration.lightning.optimizers import SchedulerConfig
    from hocket_migration.lightning.trainer_view import TrainerView


class StrategyView:
    """``trainer.strategy``: ranks, collectives, backward and steps, done by hocket's strategy and precision."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self._optimizers: list[Any] = []
        #: The optimizers as the module gets them from ``self.optimizers()``.
        self._lightning_optimizers: list[Any] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        #: Called with a loss, and with an optimizer and its closure, by the module; set while it trains.
        self._backward: Callable[..., None] | None = None
        self._step: Callable[..., Any] | None = None

    # --- optimizers

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers. Those that are set during a fit take the place of the ones that train.

        Raises AttributeError where they cannot.
        """
        return self._optimizers

    @optimizers.setter
    def optimizers(self, given: Sequence[Any]) -> None:
        trainer = self._trainer
        optimizers = [getattr(each, "_optimizer", each) for each in given]  # Lightning's wrappers
        run = trainer.run_state
        if run is not None and run.optimizers and list(map(id, run.optimizers)) != list(map(id, optimizers)):
            optimizers = _replaced(run, optimizers)
        wrapper = trainer.framework.core.optimizer.LightningOptimizer
        self._optimizers, self._lightning_optimizers = optimizers, [wrapper(each) for each in optimizers]
        for each in self._lightning_optimizers:
            each._strategy = self

    # --- ranks

    @property
    def world_size(self) -> int:
        """Number of processes."""
        run = self._trainer.run_state
        return 1 if run is None else run.strategy.world_size

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        run = self._trainer.run_state
        return 0 if run is None else run.strategy.rank

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this machine."""
        run = self._trainer.run_state
        return 0 if run is None else run.strategy.local_rank

    node_rank = 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        run = self._trainer.run_state
        return torch.device("cpu") if run is None else run.device

    @property
    def lightning_module(self) -> Any:
        """The module."""
        return self._trainer.lightning_module

    @property
    def model(self) -> Any:
        """The module, as the strategy prepared it."""
        run = self._trainer.run_state
        return self._trainer.lightning_module if run is None else run.prepared

    # --- collectives

    @property
    def _bus(self) -> BusLike:
        assert self._trainer.run_state is not None
        return self._trainer.run_state.bus

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            self._bus.all_gather_object(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank 0's object on all ranks."""
        if src:
            raise WrongValue(f"trainer.strategy.broadcast(…, src={src}): objects are broadcast from rank 0. Omit src.")
        return obj if self.world_size == 1 else self._bus.broadcast_object(obj)

    def reduce(self, value: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return tensors reduced over all ranks, by ``"mean"`` or ``"sum"``."""
        if self.world_size == 1:
            return value
        name = str(reduce_op or "mean").lower().rpartition(".")[2].replace("avg", "mean")
        bus, world = self._bus, self.world_size

        def over(tensor: Tensor) -> Tensor:
            total = bus.all_reduce(tensor if name != "mean" else tensor.double(), "sum" if name == "mean" else name)
            return (total / world).to(tensor.dtype) if name == "mean" else total

        return map_tensors(over, value)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether ``decision`` is true on all ranks, or on any."""
        if self.world_size == 1:
            return decision
        return bool(self._bus.all_reduce(torch.tensor(int(decision)), "min" if all else "max").item())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return a tensor of all ranks, stacked along a new dimension 0; with one rank, the tensor as it is."""
        if self.world_size == 1:
            return tensor
        gathered = [each.to(tensor.device) for each in self._bus.all_gather_object(tensor.detach().cpu())]
        if sync_grads:
            gathered[self.global_rank] = tensor
        return torch.stack(gathered)

    # --- files

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint that a callback wrote."""
        if self.is_global_zero:
            files.remove(path)

    # --- steps

    def backward(self, loss: Tensor, optimizer: Any = None, *arguments: Any, **keywords: Any) -> None:
        """Compute gradients; ``LightningModule.manual_backward`` calls this."""
        if self._backward is None:
            raise WrongState(
                "self.manual_backward(loss) is called outside of training_step, or by a module with automatic optimization. "
                "Set self.automatic_optimization = False, and call it in training_step."
            )
        self._backward(loss, *arguments, **keywords)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], **keywords: Any) -> Any:
        """Step; the ``step`` of the module's optimizers calls this."""
        if self._step is None:
            raise WrongState(
                "An optimizer of self.optimizers() is stepped outside of training_step and optimizer_step. Step it there."
            )
        return self._step(optimizer, closure, **keywords)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SET:
            raise AttributeError(f"trainer.strategy.{name} cannot be set under hocket, where it would have no effect.")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.strategy.{name} is not available under hocket. Use trainer.hocket.state.strategy, hocket's strategy."
        )


_SET = {
    "optimizers", "lr_scheduler_configs", "_trainer", "_optimizers", "_lightning_optimizers", "_backward", "_step",
}  # fmt: skip


def _replaced(run: State, optimizers: list[Any]) -> list[Any]:
    """Let a run continue with other optimizers, and return them. Raises AttributeError where it cannot."""
    why = ""
    if len(optimizers) != len(run.optimizers):
        why = f"{len(optimizers)} optimizers would take the place of {len(run.optimizers)}"
    elif Need.FULL_PARAMETERS not in run.strategy.offers:
        why = f"strategy {type(run.strategy).__name__} shards the weights that they were made with"
    elif run.schedules:
        why = "hocket's schedule= sets the learning rates of the optimizers that it was made with"
    if why:
        raise AttributeError(
            f"trainer.optimizers cannot be set during this fit: {why}. Return the optimizers from configure_optimizers, and "
            "change their param_groups in hooks; or call fit again."
        )
    for each in optimizers:
        run.bus.check_optimizer(each)
    run.optimizers[:] = [run.bus.prepare_optimizer(each) for each in optimizers]
    return list(run.optimizers)

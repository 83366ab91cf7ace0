"""Strategy hooks. Exactly one strategy is attached; plug-ins may wrap its hooks. Subclass :class:`hocket.Strategy`.

`StrategyLike` defines the attributes and methods of a strategy, `StrategyHooks` its hooks. Devices have no hooks: their
interface is the abstract class :class:`hocket.Device`. All ranks have to call collectives in the same order; with one
process, collectives return their input.
"""

# Specifications have no bodies.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from hocket.hookspecs.markers import hooks

if TYPE_CHECKING:
    import torch

    from hocket.devices import Device
    from hocket.hookspecs.needs import Need
    from hocket.hookspecs.precision import PrecisionLike


class StrategyLike(Protocol):
    """The interface of a strategy besides its hooks. :class:`hocket.Strategy` implements it for one process."""

    @property
    def offers(self) -> Need:
        """The features that algorithms may use; the plan refuses algorithms that need others."""

    @property
    def distributed(self) -> bool:
        """Whether it trains in several processes, which ``Trainer(devices=…)`` may start for it."""

    @property
    def rank(self) -> int:
        """The rank of this process, from 0. All rank numbers are valid after ``setup_environment``."""

    @property
    def local_rank(self) -> int:
        """The rank of this process among the processes of its machine."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    @property
    def data_rank(self) -> int:
        """The index of this rank's slice of a global batch. Ranks that compute one forward pass together have the same one."""

    @property
    def data_ranks(self) -> int:
        """The number of slices of a global batch; a divisor of ``world_size``."""

    @property
    def data_group(self) -> Any:
        """The process group of the ranks that hold the same part of the model and get different data; None for all ranks."""

    @property
    def averages_gradients(self) -> bool:
        """Whether the strategy averages gradients over ranks.

        If False, each rank steps alone, and the loop weights losses so that gradients are means over the rank's own samples.
        The loop reads it for every batch; it is identical on all ranks.
        """

    @property
    def microbatch_events(self) -> bool:
        """Whether the events from before_forward to after_backward are called.

        False for an engine that implements the action `gradients` and computes a batch without them, as pipelines do. The
        plan then refuses algorithms that act on these events.
        """

    @property
    def materializes(self) -> bool:
        """Whether ``prepare_model`` initializes parameters and buffers that are on the meta device."""

    @property
    def places(self) -> bool:
        """Whether ``prepare_model`` moves the model to the device part by part, so that the full model need not fit there."""

    @property
    def own_loop(self) -> bool:
        """Whether it implements events or actions but also works under `hocket.Runtime`, which does not call them."""

    def fingerprint(self) -> int:
        """Return a hash, below 2**32, of this rank's operations since the last call.

        It is compared after each batch and has to be identical on all ranks.
        """

    def diverged(self) -> None:
        """Raise an error that says how ranks differ. Called on every rank if their fingerprints differ."""

    def shutdown(self) -> None:
        """Leave the process group, if this strategy joined it."""


@hooks(firstresult=True)
class StrategyHooks:
    """Set-up, the step, collectives and full weights."""

    def setup_environment(self, device: Device, /) -> torch.device:
        """Join the other processes (if any) and return the device of this one. Called once, before all other hooks."""

    def prepare_model(self, module: torch.nn.Module, precision: PrecisionLike, /) -> torch.nn.Module:
        """Return the module to call in training. ``model_state`` has to return its parameters under their plain names.

        ``precision`` is the precision of the run, for strategies that send weights and gradients in another dtype.
        """

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, /) -> torch.optim.Optimizer:
        """Return the optimizer to step. It was made before ``prepare_model``: exchange parameters replaced there."""

    def prepare_data(self, loader: Iterable[Any], train: bool, global_batch: int | None, /) -> Iterable[Any]:
        """Return this rank's slices of a loader that every rank is given; every sample goes to exactly one rank.

        Each batch of the loader goes to one rank: one batch per rank makes a *global* batch. With ``global_batch``, for
        training data only, a global batch has that many samples for any world size, including 1; see
        `hocket.data.global_batches.sized`. Ranks that compute one forward pass together (with the same
        ``strategy.data_rank``) get the same slices. Loaders of `hocket.data.Several` are prepared one by one.

        The result is an iterable, or a `hocket.data.Source` that divides the data it reads (`hocket.data.adapt` with
        ``slices``); an iterable gets the adapter of its kind. All ranks get the same number of training batches; a rank
        without a slice of a global batch gets `hocket.data.batches.Padding`, a batch that counts 0 samples. Evaluation
        batches without a slice are skipped, or padding if every rank has to take part in every forward pass.

        Raises ValueError if ``global_batch`` is not possible.
        """

    def accumulate(self, module: torch.nn.Module, last: bool, /) -> AbstractContextManager[Any]:
        """Return the context of forward and backward of a microbatch; only ``last`` has to reduce gradients over ranks."""

    def call_prepared(
        self,
        module: torch.nn.Module,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        parameters: Sequence[torch.nn.Parameter],
        deferred: bool,
        /,
    ) -> Any:
        """Call a function that uses parts of a prepared module instead of the module itself, and return its result.

        An example is a loss function of a `hocket.Task` that steps several optimizers. For ``parameters``, do what a call of
        the module would do, such as gathering shards and reducing gradients in the backward pass; the other parameters get
        no gradients. All ranks call it, within `accumulate`. With ``deferred``, gradients are added after the backward pass of
        this call too, and `reduce_gradients` is called after the last of them.
        """

    def reduce_gradients(self, module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], /) -> bool:
        """Average the gradients of ``parameters`` over ranks, within `accumulate`.

        Called after calls of `call_prepared` that deferred it, and for steps by hand (``step.manual``), whose forward and
        backward passes no hook of the strategy surrounds.
        """

    def all_reduce(self, tensor: torch.Tensor, op: str, /) -> torch.Tensor:
        """Return the sum, mean, min or max (``op``) of a tensor of one shape over ranks, as a new tensor or in place."""

    def all_gather_object(self, item: object, /) -> list[Any]:
        """Return the picklable objects of all ranks, by rank.

        Subclasses of `hocket.Strategy` get bytes: tensors of a device travel on the CPU, and arrive on each rank's device.
        """

    def broadcast_object(self, item: object, /) -> Any:
        """Return rank 0's object on every rank."""

    def barrier(self) -> bool:
        """Return once every rank has called it."""

    def model_state(self, module: torch.nn.Module, /) -> dict[str, Any]:
        """Return the full ``state_dict`` of the module, under the names of the unwrapped module, on every rank."""

    def model_shards(self, module: torch.nn.Module, /) -> dict[str, Any]:
        """Return ``model_state`` for checkpoints: DTensors where this rank holds only a shard, without gathering or copying."""

    def load_model_state(self, module: torch.nn.Module, state_dict: dict[str, Any], /) -> bool:
        """Load a full ``state_dict``, or one of ``model_shards``; every key must match (else RuntimeError)."""

    def optimizer_state(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, /) -> dict[str, Any]:
        """Return the full state of the optimizer, on every rank."""

    def optimizer_shards(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, /) -> dict[str, Any]:
        """Return ``optimizer_state`` for checkpoints: DTensors where this rank holds only a shard."""

    def load_optimizer_state(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state_dict: dict[str, Any],
        /,
    ) -> bool:
        """Load the full state of the optimizer, or the state that ``optimizer_shards`` returned."""


def replicas(strategy: StrategyLike) -> int:
    """Return the number of ranks that compute on the same slice: a sum over all ranks counts each slice so many times."""
    return strategy.world_size // strategy.data_ranks

"""Where it runs. Exactly one strategy is attached; others may wrap its hooks. Subclass :class:`hocket.Strategy`.

`StrategyLike` is what strategies have to be, `StrategyHooks` what they do. Devices have no hooks: their contract is the
abstract class :class:`hocket.Device`. Collectives are called by every rank in the same order; with one process they return
their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from hocket.hookspecs.markers import hookspec

if TYPE_CHECKING:
    import torch

    from hocket.algorithm import Need
    from hocket.devices import Device
    from hocket.hookspecs.precision import PrecisionLike


class StrategyLike(Protocol):
    """What the loop and plug-ins ask of a strategy besides its hooks. :class:`hocket.Strategy` has it all, for one process."""

    @property
    def offers(self) -> Need:
        """What algorithms may need of it; the plan refuses others."""

    @property
    def distributed(self) -> bool:
        """Whether it trains on several processes, which ``Trainer(devices=…)`` may start for it."""

    @property
    def rank(self) -> int:
        """Of this process, from 0; like all numbers of ranks right from ``setup_environment`` on."""

    @property
    def local_rank(self) -> int:
        """Of this process among those of its machine."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    @property
    def data_rank(self) -> int:
        """Which share of a global batch this rank computes on. Ranks that compute one forward pass together have one share."""

    @property
    def data_ranks(self) -> int:
        """How many shares a global batch has; a divisor of ``world_size``."""

    @property
    def data_group(self) -> Any:
        """Process group of the ranks that hold the same part of the model and see other data; None for all ranks."""

    @property
    def averages_gradients(self) -> bool:
        """Whether the strategy averages gradients over ranks.

        If False, each rank steps alone, and the loop weights losses so that gradients are means over the rank's own samples.
        The loop reads it for every batch; it is identical on all ranks.
        """

    @property
    def microbatch_events(self) -> bool:
        """Whether the events from before_forward to after_backward happen.

        False for an engine that answers the action `gradients` and computes a batch without them, as pipelines do. The plan
        then refuses algorithms that act on these events.
        """

    @property
    def materializes(self) -> bool:
        """Whether ``prepare_model`` gives values to parameters and buffers that are on the meta device."""

    @property
    def places(self) -> bool:
        """Whether ``prepare_model`` moves the model to the device, part by part, so that it need not fit there as a whole."""

    @property
    def own_loop(self) -> bool:
        """Whether it also works under `hocket.Runtime`, which calls no events, although it implements some."""

    def fingerprint(self) -> int:
        """What this rank has done since the last call, below 2**32; after each batch it has to be the same on all ranks."""

    def diverged(self) -> None:
        """Raise an error that says how ranks differ. Called on every rank after their fingerprints did."""

    def shutdown(self) -> None:
        """Leave the other processes, if this strategy joined them itself."""


class StrategyHooks:
    """Set-up, the step, collectives and full weights."""

    @hookspec(firstresult=True)
    def setup_environment(self, device: Device, /) -> torch.device:
        """Join the other processes (or none) and say on which device this one computes. Called once, first of all."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def prepare_model(self, module: torch.nn.Module, precision: PrecisionLike, /) -> torch.nn.Module:
        """The module to call in training; parameters must stay reachable under plain names by ``model_state``.

        ``precision`` is what the run computes in, for strategies that send weights and gradients in another dtype.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, /) -> torch.optim.Optimizer:
        """The optimizer to step. It was made before ``prepare_model``; parameters which that replaced are exchanged here."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def prepare_data(self, loader: Iterable[Any], train: bool, global_batch: int | None, /) -> Iterable[Any]:
        """Return this rank's slices of a loader that every rank is given; every sample on exactly one rank.

        The loader's batches are each rank's own: as many of them as there are ranks make a *global* batch. With
        ``global_batch``, for training data only, a global batch has that many samples on any number of ranks, one included;
        see `hocket.data.global_batches.sized`. Ranks that compute one forward pass together (``strategy.data_rank`` is the
        same) have the same slices.

        The result is an iterable, or a `hocket.data.Source` that divides what it reads (`hocket.data.adapt` with ``slices``);
        an iterable gets the adapter of its kind. Ranks see the same number of training batches; one without a slice of a
        global batch gets `hocket.data.batches.Padding`, a batch that counts 0 samples. Evaluation batches without a slice are
        skipped, or padding where every rank has to take part in every forward pass.

        Raises ValueError where ``global_batch`` cannot be had.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def accumulate(self, module: torch.nn.Module, last: bool, /) -> AbstractContextManager[Any]:
        """Around forward and backward of a microbatch; gradients need to be reduced over ranks only when ``last``."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def call_prepared(
        self,
        module: torch.nn.Module,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        parameters: Sequence[torch.nn.Parameter],
        /,
    ) -> Any:
        """Call a function that calls parts of a prepared module, instead of the module itself, and return what it returns.

        Such as a loss function of a `hocket.Task` that steps several optimizers. What a call of the module does for its
        parameters, such as gathering their shards and reducing their gradients in the backward pass, is done for
        ``parameters``; the others get no gradients. Called within `accumulate`, on all ranks alike.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def all_reduce(self, tensor: torch.Tensor, op: str, /) -> torch.Tensor:
        """Sum, mean, min or max (``op``) of a tensor of one shape over ranks, as a new tensor or in place."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def all_gather_object(self, item: Any, /) -> list[Any]:
        """One picklable object of every rank, by rank."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def broadcast_object(self, item: Any, /) -> Any:
        """Rank 0's object, on every rank."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def barrier(self) -> bool:
        """Return once every rank has called it."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def model_state(self, module: torch.nn.Module, /) -> dict[str, Any]:
        """The full ``state_dict`` of the module under the names of the unwrapped module, on every rank."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def model_shards(self, module: torch.nn.Module, /) -> dict[str, Any]:
        """As ``model_state``, for checkpoints: DTensors where this rank holds a shard only. Nothing is gathered or copied."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def load_model_state(self, module: torch.nn.Module, state_dict: dict[str, Any], /) -> bool:
        """Load a full ``state_dict``, or one of ``model_shards``; every key must match (else RuntimeError)."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def optimizer_state(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, /) -> dict[str, Any]:
        """The full state of the optimizer, on every rank."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def optimizer_shards(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, /) -> dict[str, Any]:
        """As ``optimizer_state``, for checkpoints: DTensors where this rank holds a shard only."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def load_optimizer_state(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state_dict: dict[str, Any],
        /,
    ) -> bool:
        """Load the full state of the optimizer, or that of ``optimizer_shards``."""
        raise NotImplementedError

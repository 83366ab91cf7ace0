"""The base class of strategies, for one process on one device."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from hocket.basics.sparse_quantized import sized_like
from hocket.data.global_batches import sized
from hocket.devices import Device
from hocket.errors import Unsupported
from hocket.hookspecs.needs import Need


class Strategy:
    """Base class of strategies, with defaults for one process on one device. See :mod:`hocket.hookspecs.strategies`.

    Example:
        >>> import hocket, torch
        >>> class ChannelsLast(hocket.Strategy):
        ...     def prepare_model(self, module):
        ...         return module.to(memory_format=torch.channels_last)
        >>> trainer = hocket.Trainer(model=torch.nn.Conv2d(3, 8, 3), strategy=ChannelsLast(), device="cpu")
    """

    # `hocket.hookspecs.StrategyLike` documents these attributes.
    offers: ClassVar[Need] = Need.FULL_PARAMETERS | Need.SECOND_GRADIENT | Need.SEVERAL_STEPS
    distributed: ClassVar[bool] = False
    #: "auto" chooses the highest priority among the declared defaults for ``distributed-strategy`` (``hocket.v1.defaults``).
    priority: ClassVar[float] = 0
    averages_gradients: bool = True
    microbatch_events: ClassVar[bool] = True
    #: Set by :meth:`setup_environment`.
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    data_group: Any = None
    materializes: ClassVar[bool] = False
    places: ClassVar[bool] = False
    own_loop: ClassVar[bool] = False

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        for name in ("all_gather_object", "broadcast_object"):
            if name in vars(cls):
                setattr(cls, name, _packed(vars(cls)[name]))

    @property
    def data_rank(self) -> int:
        """See :class:`hocket.hookspecs.StrategyLike`: by default each rank has a different slice of the batch."""
        return self.rank

    @property
    def data_ranks(self) -> int:
        """See :class:`hocket.hookspecs.StrategyLike`: by default each rank has a different slice of the batch."""
        return self.world_size

    def setup_environment(self, device: Device) -> torch.device:
        """See :meth:`hocket.hookspecs.StrategyHooks.setup_environment`."""
        return device.torch_device(self.local_rank)

    def prepare_model(self, module: nn.Module) -> nn.Module:
        """See :meth:`hocket.hookspecs.StrategyHooks.prepare_model`."""
        return module

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """See :meth:`hocket.hookspecs.StrategyHooks.prepare_optimizer`."""
        return optimizer

    def prepare_data(self, loader: Iterable[Any], train: bool, global_batch: int | None = None) -> Iterable[Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.prepare_data`."""
        return loader if global_batch is None else sized(loader, global_batch)

    def accumulate(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.accumulate`."""
        return nullcontext()

    def call_prepared(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        parameters: Sequence[nn.Parameter],
        deferred: bool,
    ) -> Any:
        """See :meth:`hocket.hookspecs.StrategyHooks.call_prepared`. Strategies for several ranks have to override it."""
        if self.world_size > 1:
            raise Unsupported(
                f"Strategy {type(self).__name__} does not define how ranks reduce the gradients of a part of the model, so it "
                "cannot train a Task with train_batch. Use «strategy='ddp'», or define call_prepared."
            )
        return function(*arguments)

    def reduce_gradients(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.reduce_gradients`."""
        return True

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """See :meth:`hocket.hookspecs.StrategyHooks.all_reduce`."""
        return tensor

    def all_gather_object(self, item: object) -> list[Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.all_gather_object`."""
        return [item]

    def broadcast_object(self, item: object) -> Any:
        """See :meth:`hocket.hookspecs.StrategyHooks.broadcast_object`."""
        return item

    def barrier(self) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.barrier`."""
        return True

    def fingerprint(self) -> int:
        """See :meth:`hocket.hookspecs.StrategyLike.fingerprint`."""
        return 0

    def diverged(self) -> None:
        """See :meth:`hocket.hookspecs.StrategyLike.diverged`."""

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.model_state`."""
        return dict(module.state_dict())

    def model_shards(self, module: nn.Module) -> dict[str, Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.model_shards`. By default the same as ``model_state``."""
        return self.model_state(module)

    def load_model_state(self, module: nn.Module, state_dict: dict[str, Any]) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_model_state`."""
        own = module.state_dict(keep_vars=True)
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
                sized_like(tensor, state_dict.get(name))
        given = OrderedDict(state_dict)
        given._metadata = own._metadata  # type: ignore[attr-defined]  # versions, without which quantized modules fail
        module.load_state_dict(given)
        return True

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.optimizer_state`."""
        return optimizer.state_dict()

    def optimizer_shards(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.optimizer_shards`. By default the same as ``optimizer_state``."""
        return self.optimizer_state(module, optimizer)

    def load_optimizer_state(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_optimizer_state`."""
        optimizer.load_state_dict(state_dict)
        return True

    def shutdown(self) -> None:
        """Leave the process group, if this strategy joined it."""


def _packed(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Let a strategy's collective of objects send and receive bytes; see `hocket.basics.objects`."""

    @functools.wraps(function)
    def call(self: Any, item: Any) -> Any:
        if self.world_size == 1:
            return function(self, item)
        from hocket.basics import objects

        received = function(self, objects.pack(item))
        return list(map(objects.unpack, received)) if isinstance(received, list) else objects.unpack(received)

    return call

"""Data parallelism: every rank holds the whole model, computes on its share of each batch, and gradients are averaged."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket_strategies.group import RankStrategy

_NOTHING = nullcontext()


class DDP(RankStrategy):
    """torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704) over all ranks that were started.

    Start a script with ``torchrun --nproc-per-node 2 script.py``; a process group that is initialised already is used as it
    is. Batches of the user's loaders are the *global* batches: each rank loads a contiguous share of each, so that the
    learning rate and the number of steps do not depend on the number of ranks.

    After every batch the buffers of rank 0 (running statistics of batch norm) become those of all ranks, so that all ranks
    evaluate, average and save the same model.

    Args:
        static_graph: promise torch that every batch uses the same parameters in the same order. The first batch must not be
            cut into microbatches (ValueError); later ones may be.
        find_unused_parameters: look in every batch for parameters that the loss does not depend on; costs a pass over the
            graph. Without it such parameters are an error.
        bucket_cap_mb: reduce gradients in pieces of so many megabytes; None for torch's default.
        split_data: whether loaders yield global batches. False if the data of each rank differs already, as with a data set
            that reads only its rank's files; then batches are each rank's own. So they are wherever a loader has a
            DistributedSampler.
    """

    def __init__(
        self,
        *,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int | None = None,
        split_data: bool = True,
    ) -> None:
        super().__init__(split_data=split_data)
        self._options: dict[str, Any] = {
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._first_batch = True

    # --- the model

    def prepare_model(self, module: nn.Module) -> nn.Module:
        """The module in a DistributedDataParallel, with rank 0's weights and buffers everywhere.

        A module without a parameter to train, or one rank alone, is left unwrapped.
        """
        if self.world_size == 1:
            return module
        self._first_batch = True
        self._watch_buffers(module)
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._broadcast_buffers()
            return DistributedDataParallel(module, **self._options, **_without_buffers())
        self._broadcast([*module.parameters(), *module.buffers()])
        return module

    def accumulate(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Reduces gradients, and hands out rank 0's buffers, only when ``last``."""
        if not isinstance(module, DistributedDataParallel):
            return _NOTHING
        if not last:
            if self._first_batch and module.static_graph:
                raise ValueError(
                    "static_graph=True cannot begin with a batch that is cut into microbatches: torch's reducer would "
                    "fail, or average wrong gradients afterwards. Leave out static_graph or microbatch."
                )
            return module.no_sync()
        self._first_batch = False
        return self._with_buffers_alike() if self._buffers else _NOTHING

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.model_state`."""
        return super().model_state(_unwrapped(module))

    def load_model_state(self, module: nn.Module, state_dict: dict[str, Any]) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_model_state`."""
        return super().load_model_state(_unwrapped(module), state_dict)


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


@cache
def _without_buffers() -> dict[str, Any]:
    """What turns off DistributedDataParallel's own broadcast of buffers: renamed in torch, and the old name warns."""
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    return {next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in options): False}

"""Data parallelism: every rank holds the whole model, computes on batches of its own, and gradients are averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket_strategies.group import OfModels, RankStrategy

_COMPRESSIONS = ("bf16", "fp16", "powersgd")


class DDP(RankStrategy):
    """torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704) over all ranks that were started.

    Pass ``devices=2`` to the Trainer, or start the script with ``hocket launch -n 2 script.py``, torchrun, ``srun`` or
    ``mpirun``; a process group that is initialised already is used as it is. A loader's batches are each rank's own, and
    those of all ranks together are one global batch, on whose mean loss they step; the Trainer's ``global_batch`` says how
    large that is whatever the number of ranks, so that learning rate and number of steps do not depend on it.

    After every batch the buffers of rank 0 (running statistics of batch norm) become those of all ranks, so that all ranks
    evaluate, average and save the same model.

    Args:
        static_graph: promise torch that every batch uses the same parameters in the same order. The first batch must not be
            cut into microbatches (ValueError); later ones may be.
        find_unused_parameters: look in every batch for parameters that the loss does not depend on; costs a pass over the
            graph. Without it such parameters are an error.
        bucket_cap_mb: reduce gradients in pieces of so many megabytes; None for torch's default.
        compression: how gradients travel, from `torch.distributed.algorithms.ddp_comm_hooks`. ``"bf16"`` and ``"fp16"``
            round them to 16 bits, and so their mean; under ``"fp16"`` gradients beyond 65504 become infinite.
            ``"powersgd"`` sends products of two thin matrices (Vogels et al. 2019, arXiv 1905.13727), from step 1000 on
            unless configured: ``{"powersgd": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 500}}``. What it
            keeps for itself (errors to make up for, the last matrices) is not part of any state: a resumed run begins
            without.
        split_data: whether every rank is given the same data, of which it takes its share. False if the data of each rank
            differs already, as with a data set that reads only its rank's files. So it does wherever a loader has a
            DistributedSampler.
        uneven: what happens in training where some rank has no batch left and others do, as with data of their own, or at
            the end of a pass. ``"pad"``: it keeps them company, with a batch that counts nothing. ``"end"``: the pass is
            over for all of them, and what the others have left is not trained on.
        timeout: seconds that a rank waits for the others before it raises `hocket_strategies.explained.CollectiveError`.

    Example:
        >>> import hocket, hocket_strategies, torch
        >>> dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        >>> def train():
        ...     trainer = hocket.Trainer(
        ...         model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...         train_data=torch.utils.data.DataLoader(dataset, 8), strategy=hocket_strategies.DDP(bucket_cap_mb=50),
        ...     )
        ...     return trainer.fit("1ep").timestamp.batch
        >>> hocket.launch(train, 2)  # in a script: Trainer(..., devices=2)
        [4, 4]
    """

    def __init__(
        self,
        *,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int | None = None,
        compression: str | Mapping[str, Any] | None = None,
        split_data: bool = True,
        uneven: str = "pad",
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(split_data=split_data, uneven=uneven, timeout=timeout)
        self._options: dict[str, Any] = {
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._compression = _compression(compression)
        self._first_batch = True
        #: The parameters of each model, and which of them were trained when it was wrapped.
        self._known: OfModels[tuple[list[nn.Parameter], list[bool]]] = OfModels()
        #: What reduces the gradients of the parameters of a step, by their ids; see `call_prepared`.
        self._callers: OfModels[dict[tuple[int, ...], DistributedDataParallel]] = OfModels()
        #: Whether gradients are reduced in the current microbatch.
        self._last = True

    # --- the model

    def prepare_model(self, module: nn.Module) -> nn.Module:
        """The module in a DistributedDataParallel, with rank 0's weights and buffers everywhere.

        A module without a parameter to train, or one rank alone, is left unwrapped.
        """
        if self.world_size == 1:
            return module
        self._watch_buffers(module)
        with self._explained:
            if any(_trained(module.parameters())):
                self._broadcast_buffers(module)
                return self._wrap(DistributedDataParallel.__new__(DistributedDataParallel), module)
            self._broadcast([*module.parameters(), *module.buffers()])
        return module

    def _wrap(self, wrapper: DistributedDataParallel, module: nn.Module) -> DistributedDataParallel:
        """``wrapper``, which learns now which parameters are trained. Every rank has to call it."""
        self._first_batch = True
        self._reducing(module, wrapper)
        parameters = list(module.parameters())
        self._known[module] = parameters, _trained(parameters)
        return wrapper

    def _reducing(
        self, module: nn.Module, wrapper: DistributedDataParallel | None = None, **options: Any
    ) -> DistributedDataParallel:
        wrapper = DistributedDataParallel.__new__(DistributedDataParallel) if wrapper is None else wrapper
        wrapper.__init__(module, **self._options, **_without_buffers(), **options)  # type: ignore[misc]
        if self._compression is not None:
            _compress(wrapper, *self._compression)
        return wrapper

    def accumulate(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Reduces gradients, and hands out rank 0's buffers, only when ``last``."""
        self._last = last
        if not isinstance(module, DistributedDataParallel):
            return nullcontext()
        parameters, trained = self._known[module.module]
        if _trained(parameters) != trained:
            self._wrap(module, module.module)  # or else ranks would not exchange the gradients of what is trained since
        if not last:
            if self._first_batch and module.static_graph:
                raise ValueError(
                    "static_graph=True cannot begin with a batch that is cut into microbatches: torch's reducer would "
                    "fail, or average wrong gradients afterwards. Leave out static_graph or microbatch."
                )
            return module.no_sync()
        self._first_batch = False
        return self._with_buffers_alike(module.module) if self._buffers[module.module] else self._explained

    def call_prepared(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        parameters: Sequence[nn.Parameter],
    ) -> Any:
        """Call it within a DistributedDataParallel of ``parameters``, one for each set of them, which keeps their buckets."""
        if not isinstance(module, DistributedDataParallel):
            return function(*arguments)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        callers = self._callers.setdefault(module.module, {})
        key = tuple(map(id, trained))
        if key not in callers:
            # Nothing is written to the parameters, which may be in a graph already.
            callers[key] = self._reducing(_Caller(trained), init_sync=False)
        caller = callers[key]
        with nullcontext() if self._last else caller.no_sync():
            return caller(function, *arguments)

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.model_state`."""
        return super().model_state(unwrapped(module))

    def load_model_state(self, module: nn.Module, state_dict: dict[str, Any]) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_model_state`."""
        return super().load_model_state(unwrapped(module), state_dict)


class _Caller(nn.Module):
    """Holds parameters, and calls any function."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.parameters_of_the_step = nn.ParameterList(parameters)

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def _trained(parameters: Iterable[nn.Parameter]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a DistributedDataParallel, or the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _compression(given: str | Mapping[str, Any] | None) -> tuple[str, dict[str, Any]] | None:
    """Name and options of a compression of gradients. Raises ValueError for one that is not known."""
    if given is None:
        return None
    named = {given: {}} if isinstance(given, str) else dict(given)
    name, options = next(iter(named.items()), ("", {}))
    if len(named) != 1 or name not in _COMPRESSIONS or (options and name != "powersgd"):
        raise ValueError(
            f"compression={given!r} is not known. Write one of {', '.join(map(repr, _COMPRESSIONS))}, or with options of "
            "torch's PowerSGDState {'powersgd': {'matrix_approximation_rank': 2}}; or leave it out."
        )
    return name, dict(options or {})


def _compress(module: DistributedDataParallel, name: str, options: dict[str, Any]) -> None:
    """Have gradients reduced by one of torch's communication hooks. Raises TypeError for an option it does not have."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group=None, **options)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hook = default_hooks.bf16_compress_hook if name == "bf16" else default_hooks.fp16_compress_hook
        module.register_comm_hook(None, hook)


@cache
def _without_buffers() -> dict[str, Any]:
    """What turns off DistributedDataParallel's own broadcast of buffers: renamed in torch, and the old name warns."""
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    return {next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in options): False}

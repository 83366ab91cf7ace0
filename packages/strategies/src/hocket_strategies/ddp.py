"""Data parallelism: every rank holds the full model and computes on its own batches; gradients are averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hocket.errors import WrongValue
from hocket_strategies.collective_errors import not_averaged
from hocket_strategies.rank_strategy import OfModels, RankStrategy
from hocket_strategies.tensor_coalescing import packed, unpack

_COMPRESSIONS = ("bf16", "fp16", "powersgd")


class DDP(RankStrategy):
    """Train with torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704) over all launched ranks.

    Pass ``devices=2`` to the Trainer, or start the script with ``hocket launch -n 2 script.py``, torchrun, ``srun`` or
    ``mpirun``; an existing process group is used as it is. Each rank's loader yields its own batches. Together they form one
    global batch, and all ranks step on its mean loss. The Trainer's ``global_batch`` fixes the size of the global batch, so
    that learning rate and number of steps do not depend on the world size.

    After every batch the buffers of rank 0 (running statistics of batch norm) are copied to all ranks, so that all ranks
    evaluate, average and save the same model.

    Args:
        static_graph: promise torch that every batch uses the same parameters in the same order. The first batch must not be
            split into microbatches (ValueError); later ones may be.
        find_unused_parameters: search every batch for parameters that the loss does not depend on; costs a traversal of
            the graph. Without it such parameters are an error, in the batch that does not use them.
        bucket_cap_mb: size of a gradient bucket in megabytes; None for torch's default.
        compression: a communication hook of `torch.distributed.algorithms.ddp_comm_hooks`. ``"bf16"`` and ``"fp16"``
            round gradients, and so their mean, to 16 bits; under ``"fp16"`` gradients beyond 65504 become infinite.
            ``"powersgd"`` sends products of two thin matrices (Vogels et al. 2019, arXiv 1905.13727), from step 1000 on
            unless configured: ``{"powersgd": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 500}}``. Its
            internal state (error feedback, the last matrices) is in no checkpoint: a resumed run starts without it.
        split_data: whether every rank is given the same data and takes its slice. Set it to False if each rank already has
            different data, as with a data set that reads only its rank's files. A DistributedSampler implies False.
        uneven: what happens in training when some rank runs out of batches before the others: with per-rank data, or at
            the end of an epoch. ``"pad"``: that rank computes on a padding batch. ``"end"``: the epoch ends on all ranks,
            and the remaining batches of the other ranks are skipped.
        timeout: seconds that a rank waits for the others before it raises
            `hocket_strategies.collective_errors.CollectiveError`.

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
        #: The parameters of each model, and the ``requires_grad`` of each when the model was wrapped.
        self._known: OfModels[tuple[list[nn.Parameter], list[bool]]] = OfModels()
        #: By the ids of a step's parameters: the DistributedDataParallel that reduces their gradients; see `call_prepared`.
        self._callers: OfModels[dict[tuple[int, ...], DistributedDataParallel]] = OfModels()
        #: Whether gradients are reduced in the current microbatch.
        self._last = True

    # --- the model

    def prepare_model(self, module: nn.Module) -> nn.Module:
        """Wrap the module in a DistributedDataParallel, with rank 0's weights and buffers on all ranks.

        A module without trainable parameters stays unwrapped, and so does any module on a single rank.
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
        """Initialise ``wrapper`` with the parameters that are trainable now. Collective."""
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
        """Reduce gradients, and broadcast rank 0's buffers, only when ``last``."""
        self._last = last
        if not isinstance(module, DistributedDataParallel):
            return nullcontext()
        parameters, trained = self._known[module.module]
        if _trained(parameters) != trained:
            self._wrap(module, module.module)  # otherwise gradients of newly trainable parameters would not be reduced
        if not last:
            if self._first_batch and module.static_graph:
                raise WrongValue(
                    "«static_graph=True» cannot begin with a batch that is split into microbatches: torch's reducer would "
                    "fail, or average wrong gradients afterwards. Remove static_graph or microbatch."
                )
            return module.no_sync()
        self._first_batch = False
        return self._reduced(module)

    @contextmanager
    def _reduced(self, module: DistributedDataParallel) -> Iterator[None]:
        """Raise RuntimeError unless all gradients were averaged. torch says so in the next batch only: not in the last one."""
        with self._with_synced_buffers(module.module):
            yield
            for wrapper in (module, *self._callers.get(module.module, {}).values()):
                try:
                    wrapper._check_reducer_finalized()
                except RuntimeError as error:
                    names = {parameter: name for name, parameter in module.module.named_parameters()}
                    reduced = [
                        names.get(parameter, "?") for parameter in wrapper.parameters() if parameter.requires_grad
                    ]
                    raise not_averaged(error, self._name, reduced, wrapper is not module) from error

    def call_prepared(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        parameters: Sequence[nn.Parameter],
        deferred: bool,
    ) -> Any:
        """Call ``function`` in a DistributedDataParallel of ``parameters``; each set of them has a wrapper with its buckets."""
        if deferred or not isinstance(module, DistributedDataParallel):
            return function(*arguments)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        callers = self._callers.setdefault(module.module, {})
        key = tuple(map(id, trained))
        if key not in callers:
            # init_sync would write to the parameters, which may already be in a graph.
            callers[key] = self._reducing(_Caller(trained), init_sync=False)
        caller = callers[key]
        with nullcontext() if self._last else caller.no_sync():
            return caller(function, *arguments)

    def reduce_gradients(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
        """Average them, those that some ranks do not have as zeros there."""
        if not isinstance(module, DistributedDataParallel) or not self._last:
            return True
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        there = self.all_reduce(torch.tensor([parameter.grad is not None for parameter in trained]), "max").tolist()
        gradients = []
        for parameter, exists in zip(trained, there, strict=True):
            if exists:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.append(parameter.grad)
        for flat, group in packed(gradients):
            unpack(self.all_reduce(flat, "mean"), group)
        return True

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """See :meth:`hocket.hookspecs.StrategyHooks.model_state`."""
        return super().model_state(unwrapped(module))

    def load_model_state(self, module: nn.Module, state_dict: dict[str, Any]) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_model_state`."""
        return super().load_model_state(unwrapped(module), state_dict)


class _Caller(nn.Module):
    """Hold parameters, and call any function as a forward pass."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.parameters_of_the_step = nn.ParameterList(parameters)

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def _trained(parameters: Iterable[nn.Parameter]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel, or the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _compression(given: str | Mapping[str, Any] | None) -> tuple[str, dict[str, Any]] | None:
    """Return name and options of a gradient compression. Raises ValueError for an unknown one."""
    if given is None:
        return None
    named = {given: {}} if isinstance(given, str) else dict(given)
    name, options = next(iter(named.items()), ("", {}))
    if len(named) != 1 or name not in _COMPRESSIONS or (options and name != "powersgd"):
        raise WrongValue(
            f"«compression={given!r}» is not known. Write one of {', '.join(map(repr, _COMPRESSIONS))}, or with options of "
            "torch's PowerSGDState {'powersgd': {'matrix_approximation_rank': 2}}; or omit it."
        )
    return name, dict(options or {})


def _compress(module: DistributedDataParallel, name: str, options: dict[str, Any]) -> None:
    """Register one of torch's communication hooks. Raises TypeError for an unknown option."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group=None, **options)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hook = default_hooks.bf16_compress_hook if name == "bf16" else default_hooks.fp16_compress_hook
        module.register_comm_hook(None, hook)


@cache
def _without_buffers() -> dict[str, Any]:
    """Return the option that disables DistributedDataParallel's buffer broadcast. torch renamed it, and the old name warns."""
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    return {next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in options): False}

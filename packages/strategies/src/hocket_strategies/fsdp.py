"""Fully sharded data parallelism: weights, gradients and optimizer state are sharded over ranks and gathered unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from hocket import Device, Need, Task, hookimpl
from hocket.basics.dtensors import full, local, shard_like
from hocket.data.nesting import map_tensors
from hocket.errors import WrongState, WrongValue
from hocket_strategies.mesh import data_mesh, degrees, make_mesh
from hocket_strategies.rank_strategy import OfModels, RankStrategy
from hocket_strategies.unit_order import InStep, not_on_shards
from hocket_strategies.wrapping import Wrap, units, units_of_one_dtype

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}


class FSDP(RankStrategy):
    """Train with torch's FSDP2, ``fully_shard`` (Zhao et al. 2023, arXiv 2304.11277), over all launched ranks.

    Batches, gradients and results are those of ``ddp``; memory is divided. Parameters are replaced by DTensors of the same
    names; each rank holds a shard along dimension 0. ``wrap`` selects the modules that are gathered and freed one after the
    other. If the model is a single unit, its peak memory stays the same.

    All ranks start from rank 0's weights and buffers. The other ranks may pass a model on the meta device, which costs no
    memory: ``with torch.device("meta" if rank else "cpu"): model = Model()``.

    Args:
        replicate: number of copies of the model, each sharded over ``shard`` ranks (hybrid sharding: gathering stays within
            the ranks of a copy, gradients are averaged over copies).
        shard: number of ranks that a copy is sharded over; None for world size ÷ ``replicate``.
        wrap: ``"auto"``, classes or names of classes, the minimum number of parameters of a unit, or None; see
            :func:`hocket_strategies.wrapping.units`.
        param_dtype: dtype in which weights are gathered and computed: ``"bf16"``, ``"fp16"``, ``"fp32"``, None for the
            stored dtype, ``"auto"`` for the half precision that the Trainer's ``precision`` computes in, if weights are in
            float32.
        reduce_dtype: dtype in which gradients are averaged; only where ``param_dtype`` is not None.
        cpu_offload: keep shards, gradients and optimizer state in host memory and step there.
        reshard_after_forward: free a unit's weights after its forward pass and gather them again for backward; False keeps
            them for speed, an int reshards to that many ranks. Weights outside of units stay gathered until backward.
        checkpoint: recompute the forward pass of these modules in backward instead of keeping activations: True for the
            units of ``wrap``, else classes or names as there.
        split_data, uneven, timeout: as for :class:`~hocket_strategies.ddp.DDP`.

    Raises:
        ValueError: ``replicate × shard`` is not the number of ranks, or a dtype is unknown.

    Example:
        >>> import hocket, hocket_strategies, torch
        >>> dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
        >>> def train():
        ...     trainer = hocket.Trainer(
        ...         model=torch.nn.Linear(4, 2), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...         train_data=torch.utils.data.DataLoader(dataset, 8), strategy=hocket_strategies.FSDP(wrap=["Linear"]),
        ...     )
        ...     return trainer.fit("1ep").timestamp.batch
        >>> hocket.launch(train, 2)  # in a script: Trainer(..., devices=2)
        [4, 4]
    """

    offers = Need.SECOND_GRADIENT | Need.SEVERAL_STEPS
    materializes = True
    places = True
    together = True

    def __init__(
        self,
        *,
        replicate: int = 1,
        shard: int | None = None,
        wrap: Wrap = "auto",
        param_dtype: str | None = "auto",
        reduce_dtype: str | None = "fp32",
        cpu_offload: bool = False,
        reshard_after_forward: bool | int = True,
        checkpoint: bool | Wrap = False,
        split_data: bool = True,
        uneven: str = "pad",
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(split_data=split_data, uneven=uneven, timeout=timeout)
        self._given: dict[str, int | None] = {"replicate": replicate, "shard": shard}
        self._wrap, self._checkpoint = wrap, checkpoint
        self._reshard_after_forward = reshard_after_forward
        self._cpu_offload = cpu_offload
        if param_dtype != "auto":
            _dtype("param_dtype", param_dtype)
        self._param_dtype = param_dtype
        self._reduce_dtype = _dtype("reduce_dtype", reduce_dtype)
        self._device = torch.device("cpu")
        self._mesh: Any = None
        #: By old parameter: its replacement. Optimizers keep the old ones alive until `prepare_optimizer`.
        self._moved = _Moved()
        #: Whether backward passes of a model currently reduce gradients; at first they do.
        self._reducing: OfModels[bool] = OfModels()
        #: Models whose forward passes may call other functions.
        self._callable: OfModels[bool] = OfModels()
        self._in_step: InStep | None = None

    def setup_environment(self, device: Device) -> torch.device:
        """Join the ranks and arrange them in a mesh."""
        self._device = super().setup_environment(device)
        self._mesh = make_mesh(self._device.type, degrees(self.world_size, self._given, self._name))
        self._keep_group()
        return self._device

    def _backend(self, on: torch.device) -> str:
        # With cpu_offload, gradient norms are reduced in host memory.
        return "cpu:gloo,cuda:nccl" if self._cpu_offload and on.type == "cuda" else super()._backend(on)

    # --- the model

    def prepare_model(self, module: nn.Module, precision: Any = None) -> nn.Module:
        """Return the module itself, its parameters replaced by shards with rank 0's values.

        Raises:
            ValueError: a parameter of rank 0 is on the meta device, or parameters on the meta device are tied.
        """
        before = {name: tensor.detach() for name, tensor in _tensors(module).items()}
        by_name = dict(module.named_parameters(remove_duplicate=False))
        given = [(parameter, parameter.detach()) for parameter in by_name.values()]
        on_meta = any(tensor.is_meta for tensor in before.values())
        if on_meta:
            self._check_meta(before, by_name)
        self._watch_buffers(module)
        self._parallelize(module)
        self._recompute(module)
        if before.keys() - dict(module.named_buffers()).keys():
            self._shard(module, precision, given)
        else:
            module.to(self._device)
        if on_meta:
            module.to_empty(device="cpu" if self._cpu_offload else self._device)
            for owner, name in self._buffers[module]:
                owner[name] = None if (buffer := owner[name]) is None else buffer.to(self._device)
        self._broadcast_initial(before, module)
        after = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in by_name.items():
            if after[name] is not parameter:
                self._moved[parameter] = after[name]
        return module

    def _parallelize(self, module: nn.Module) -> None:
        """Divide single modules over ranks before the model is sharded. Does nothing here."""

    def _shard(self, module: nn.Module, precision: Any, given: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Shard unit by unit. ``fully_shard`` moves a full unit to the device; afterwards only its shard stays there.

        The old parameters, which optimizers hold until `prepare_optimizer`, get their ``given`` values back.
        """
        options: dict[str, Any] = {
            "mesh": data_mesh(self._mesh),
            "mp_policy": self._policy(module, precision),
            "offload_policy": CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
            if self._cpu_offload
            else OffloadPolicy(),
        }
        chosen = units_of_one_dtype(module, units(module, self._wrap))
        for unit in chosen:
            fully_shard(unit, reshard_after_forward=self._reshard_after_forward, **options)
            _give_back(given)
        fully_shard(module, **options)
        _give_back(given)
        if self.world_size > 1:
            self._in_step = InStep(self._name, self.rank, module, chosen, self.all_gather_object)
        # The root stays gathered after forward, because backward comes next. After an evaluation it does not, and training
        # would use the weights that algorithms had swapped in for it.
        module.register_forward_hook(_reshard)
        if isinstance(module, Task) and type(module).eval_forward is not Task.eval_forward:
            _resharding(module, "eval_forward")
        if isinstance(module, Task) and module.owns_steps:
            self._make_callable(module)

    def _make_callable(self, module: nn.Module) -> None:
        _calling(module, self._name)
        self._callable[module] = True

    def _policy(self, module: nn.Module, precision: Any) -> MixedPrecisionPolicy:
        if self._param_dtype == "auto":
            computed = getattr(precision, "compute_dtype", None)
            # A precision that stores weights in 16 bits has chosen a dtype for each module.
            stored_wide = all(parameter.dtype is torch.float32 for parameter in module.parameters())
            dtype = computed if stored_wide and computed in (torch.bfloat16, torch.float16) else None
        else:
            dtype = _dtype("param_dtype", self._param_dtype)
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=self._reduce_dtype if dtype else None)

    def _recompute(self, module: nn.Module) -> None:
        if self._checkpoint is False or self._checkpoint is None:
            return
        for unit in units(module, self._wrap if self._checkpoint is True else self._checkpoint):
            # A wrapper would change the names of parameters.
            unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)  # type: ignore[method-assign]

    def _check_meta(self, tensors: dict[str, Tensor], by_name: dict[str, nn.Parameter]) -> None:
        if self.rank == 0 and (empty := [name for name, tensor in tensors.items() if tensor.is_meta]):
            raise WrongValue(
                f"{empty[0]} is on the meta device on rank 0, whose values all ranks start from. Build the model on the CPU "
                'there: with torch.device("meta" if rank else "cpu"): model = Model().'
            )
        if len(set(by_name.values())) < len(by_name):
            tied = next(name for name in by_name if name not in tensors)
            raise WrongValue(
                f"{tied} is tied to another parameter; the meta device loses ties. Build the model on the CPU on every rank."
            )

    @torch.no_grad()
    def _broadcast_initial(self, before: dict[str, Tensor], module: nn.Module) -> None:
        """Broadcast rank 0's parameters and buffers one by one; each rank keeps its shards."""
        for name, target in _tensors(module).items():
            full = before[name].detach() if self.rank == 0 else None
            if full is None:
                full = torch.empty(target.shape, dtype=target.dtype, device=self._device)
            full = full.to(self._device).contiguous()
            if self.world_size > 1 and full.numel():
                dist.broadcast(full, 0, group=self._group(full))
            local(target).copy_(local(shard_like(full, target)))

    # --- the optimizer

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer over the shards; existing state is sharded like its parameters."""
        for group in optimizer.param_groups:
            group["params"][:] = [self._moved.get(p, p) for p in group["params"]]  # in place: LBFGS holds the list
        for old in [each for each in optimizer.state if each in self._moved]:
            new, values = self._moved[old], optimizer.state.pop(old)
            if any(isinstance(value, Tensor) and value.is_meta for value in values.values()):
                raise WrongValue(
                    f"{type(optimizer).__name__} has state for parameters on the meta device, which has no values. Build "
                    "the model on the CPU on every rank, or choose another optimizer."
                )
            optimizer.state[new] = {key: _like(value, new) for key, value in values.items()}
        return optimizer

    @hookimpl(wrapper=True)
    def step_optimizer(self, optimizer: torch.optim.Optimizer):  # type: ignore[no-untyped-def]  # a generator of one value
        """Explain the error of an optimizer that cannot step on shards."""
        try:
            return (yield)
        except Exception as error:
            if refusal := not_on_shards(error, self._name, optimizer):
                raise refusal from error
            raise

    def fingerprint(self) -> int:
        """Return a hash of the units that ran, in order, and of the parameters with gradients."""
        return 0 if self._in_step is None else self._in_step.fingerprint()

    def diverged(self) -> None:
        """Raise SymmetryError."""
        assert self._in_step is not None
        self._in_step.diverged()

    def accumulate(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Reduce gradients, and broadcast rank 0's buffers, only when ``last``."""
        if last is not self._reducing.get(module, True) and isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
            self._reducing[module] = last
        return (
            self._with_synced_buffers(module)
            if last and self._buffers.get(module) and self.world_size > 1
            else nullcontext()
        )

    def call_prepared(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        parameters: Sequence[nn.Parameter],
        deferred: bool,
    ) -> Any:
        """Call ``function`` as the module's forward pass, which gathers its units and reduces their gradients."""
        if not isinstance(module, FSDPModule):
            return function(*arguments)
        if module not in self._callable:  # of a custom loop, which may have no such calls
            self._make_callable(module)
        return module(_Call(function), *arguments)

    # --- state

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Return copies on the CPU, gathered one by one: the full model need not fit on a device. Collective."""
        return {name: _full(value) for name, value in module.state_dict().items()}

    def model_shards(self, module: nn.Module) -> dict[str, Any]:
        """Return the run's own shards, without a copy."""
        return dict(module.state_dict())

    def load_model_state(self, module: nn.Module, state_dict: dict[str, Any]) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_model_state`. Without communication: every rank passes the full state,
        or its shards."""
        targets = module.state_dict()
        module.load_state_dict({name: _like(value, targets.get(name)) for name, value in state_dict.items()})
        return True

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return a copy on the CPU of the ``state_dict`` of a single-process run. Collective."""
        state: dict[str, Any] = map_tensors(_full, optimizer.state_dict())
        return state

    def optimizer_shards(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the run's own shards, without a copy."""
        return optimizer.state_dict()

    def load_optimizer_state(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> bool:
        """See :meth:`hocket.hookspecs.StrategyHooks.load_optimizer_state`; the state may come from any strategy."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        of = dict(zip(keys, held, strict=False))  # the optimizer itself checks the number of parameters
        state = {
            key: {name: _like(value, of.get(key)) for name, value in values.items()}
            for key, values in state_dict["state"].items()
        }
        optimizer.load_state_dict({**state_dict, "state": state})
        return True


class _Moved(WeakIdKeyDictionary):
    """Map each original parameter, of all models, to its sharded replacement. Holds originals weakly; pickles as empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class _Call:
    """A function, passed to a module's forward pass to be called instead of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


def _calling(module: nn.Module, name: str) -> None:
    """Let the forward pass call other functions; refuse calls of submodules outside of it, which would not be gathered."""
    inner, inside = module.forward, False

    @wraps(inner)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        nonlocal inside
        before, inside = inside, True
        try:
            if arguments and type(arguments[0]) is _Call:
                return arguments[0].function(*arguments[1:])
            return inner(*arguments, **keywords)
        finally:
            inside = before

    def check(part: nn.Module, inputs: Any) -> None:
        # In a backward pass a block is recomputed, whose weights are gathered.
        if not inside and part.training and torch._C._current_graph_task_id() == -1:
            raise WrongState(
                f"A part of the model was called ({type(part).__name__}) whose weights «strategy='{name}'» has sharded. "
                "Call it in a loss function, where they are gathered, or use «strategy='ddp'»."
            )

    module.forward = forward  # type: ignore[method-assign]
    for part in module.modules():
        if part is not module and any(True for _ in part.parameters()):
            part.register_forward_pre_hook(torch.compiler.disable(check), prepend=True)


def _give_back(given: list[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, values in given:
        if type(values) is Tensor:
            parameter.data = values


def _dtype(argument: str, given: str | None) -> torch.dtype | None:
    if given not in _DTYPES:
        names = ", ".join(repr(name) for name in _DTYPES)
        raise WrongValue(f"{argument}={given!r} is not a dtype that weights are gathered in; use one of {names}.")
    return _DTYPES[given]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, persistent or not, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _like(value: Any, target: Any) -> Any:
    """Return ``value`` sharded like ``target`` if it is a full tensor of the same shape, otherwise unchanged."""
    if isinstance(value, Tensor) and isinstance(target, Tensor) and value.shape == target.shape:
        return shard_like(value, target)
    return value


def _full(value: Any) -> Any:
    """Return a full copy on the CPU, so that a state is one consistent snapshot, sharded or not."""
    return full(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else value


def _reshard(module: Any, inputs: Any, outputs: Any) -> None:
    if not torch.is_grad_enabled():
        module.reshard()


def _resharding(module: Any, method: str) -> None:
    """Gather before a method that is called instead of forward, and reshard after it."""
    register_fsdp_forward_method(module, method)
    inner = getattr(module, method)

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = inner(*args, **kwargs)
        _reshard(module, args, outputs)
        return outputs

    setattr(module, method, forward)

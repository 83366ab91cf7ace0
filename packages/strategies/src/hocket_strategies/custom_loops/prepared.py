"""The model and the data of a custom loop, prepared by `hocket.Runtime`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hocket.data import batches, nesting
from hocket.data.batch_placement import move
from hocket.data.source import set_epoch
from hocket.errors import WrongState, WrongType
from hocket.help import attributes, warn
from hocket.hookspecs import StrategyLike
from hocket.hookspecs.needs import Need
from hocket.plugins.bus import Bus
from hocket_strategies.custom_loops.accumulation import Gradients

if TYPE_CHECKING:
    from hocket_strategies.custom_loops.runtime import Runtime


#: A gradient hook of a tensor.
Hook = Callable[[torch.Tensor], torch.Tensor | None]


class Owner(NamedTuple):
    """What a prepared model needs besides the given module: ``given`` is the whole module, ``root`` what the strategy made."""

    bus: Bus
    gradients: Gradients
    strategy: StrategyLike
    given: nn.Module
    root: nn.Module


class PreparedModel(nn.Module):
    """A model prepared by `Runtime.setup`, or a part of it; ``module`` is the given module.

    Attributes are those of the given module. Its methods, and those of its parts, compute as a call of the model does: under
    the precision's context, with gradients that are averaged over ranks. Under strategies that shard weights, all ranks have
    to call a method.

    Example:
        >>> import hocket, torch
        >>> class Coder(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder, self.decoder = torch.nn.Linear(4, 2), torch.nn.Linear(2, 4)
        ...     def forward(self, inputs):
        ...         return self.decoder(self.encode(inputs))
        ...     def encode(self, inputs):
        ...         return self.encoder(inputs).relu()
        >>> model = hocket.Runtime(device="cpu", precision="bf16").setup(Coder())
        >>> model.encode(torch.ones(3, 4)).dtype, model.decoder(torch.ones(3, 2)).shape
        (torch.float32, torch.Size([3, 4]))
    """

    module: nn.Module
    _hocket: Owner

    def __init__(self, module: nn.Module, owner: Owner) -> None:
        nn.Module.__init__(self)  # super() would need the name __class__, which is a property here
        del vars(self)["training"]  # it is the module's
        self._modules["module"] = module
        vars(self)["_hocket"] = owner  # its modules are not registered, which would duplicate the parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the prepared model under the precision's context, and convert 16-bit outputs to float32."""
        owner = self._hocket
        given = self._modules["module"]
        if given is not owner.given:
            return self._call(self.module, args, kwargs)
        hook: Hook = owner.gradients.gate
        module = owner.root
        if owner.gradients.stepping is module:  # within a step, which prepares its loss function in the same way
            module = given
        elif owner.strategy.world_size > 1 and torch.is_grad_enabled():
            hook = owner.gradients.hook(module, forward=True)
        with owner.bus.forward_context():
            calling, owner.gradients.calling = owner.gradients.calling, True
            try:
                outputs = module(*args, **kwargs)
            finally:
                owner.gradients.calling = calling
        if type(outputs) is torch.Tensor:
            return _converted(hook, outputs)
        return nesting.map_tensors(partial(_converted, hook), outputs)

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method or a part of the module as the prepared model is called."""
        owner = self._hocket
        bus, gradients, root = owner.bus, owner.gradients, owner.root
        hook: Hook = gradients.gate
        with bus.forward_context():
            calling, gradients.calling = gradients.calling, True
            try:
                if gradients.stepping is root:
                    outputs = function(*args, **kwargs)
                else:
                    if owner.strategy.world_size > 1:
                        hook = gradients.hook(root, forward=False)
                    bound = partial(function, **kwargs) if kwargs else function
                    outputs = bus.call_prepared(root, bound, args, list(root.parameters()), True)
            finally:
                gradients.calling = calling
        if outputs is self.module:
            return self
        found = list(tensors(outputs))
        if any(tensor.dtype in _HALF for tensor in found):
            return nesting.map_tensors(partial(_converted, hook), outputs)
        for tensor in found:  # of a container that the module may hold and change
            _converted(hook, tensor)
        return outputs

    # --- the given module shows through

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the given module, for ``isinstance``."""
        return type(self._modules["module"])

    def __getattr__(self, name: str) -> Any:
        module = self._modules["module"]
        if name == "module":
            return module
        try:
            value = getattr(module, name)
        except AttributeError as error:
            if name[0] != "_" and (text := attributes.instead("PreparedModel", name, ())):
                raise AttributeError(f"{error}. {text}", name=name, obj=self) from None
            raise
        if isinstance(value, nn.Module):
            return PreparedModel(value, self._hocket)
        if isinstance(value, MethodType) and value.__self__ is module:
            return _method(self, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_compiled_call_impl":
            object.__setattr__(self, name, value)
        elif isinstance(value, nn.Module | nn.Parameter):
            raise WrongType(
                f"model.{name} = … sets a {type(value).__name__} in a model that setup has prepared for device, precision and "
                f"strategy. Set it before: {type(self.module).__name__.lower()}.{name} = …, then runtime.setup(…)."
            )
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        """Return a part of a given `nn.Sequential`, `nn.ModuleDict` or the like."""
        value = self.module[key]  # type: ignore[index]
        return PreparedModel(value, self._hocket) if isinstance(value, nn.Module) else value

    def __iter__(self) -> Iterator[Any]:
        """Return the parts of a given `nn.Sequential`, `nn.ModuleList` or the like, or the keys of an `nn.ModuleDict`."""
        module = self.module
        if not hasattr(type(module), "__iter__"):
            raise WrongType(
                f"setup returned a model ({type(module).__name__}), which is not several values. It returns as many as it is "
                "given. Write model = runtime.setup(model), or model, optimizer = runtime.setup(model, optimizer)."
            )
        parts = (PreparedModel(each, self._hocket) if isinstance(each, nn.Module) else each for each in iter(module))  # type: ignore[call-overload]
        return parts

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return the given module and its parts, under the names that they have there."""
        return self.module.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of the given module. Raises RuntimeError if the strategy shards it."""
        self._check_full("state_dict()", "runtime.model_state(model), which gathers them; all ranks call it")
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the given module. Raises RuntimeError if the strategy shards it."""
        self._check_full("load_state_dict(state)", "runtime.load_model_state(model, state)")
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedModel:
        """Return a copy to evaluate with, such as the start of a moving average; `Runtime.setup` prepares it for training."""
        self._check_full("deepcopy(model)", "copy.deepcopy(module) before setup, and set up both")
        module = copy.deepcopy(self.module, memo)
        return PreparedModel(module, self._hocket._replace(given=module, root=module))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise WrongType(
            "A prepared model belongs to the Runtime of its process and cannot be pickled. Write runtime.save(path, "
            "model=model) for a checkpoint, torch.save(runtime.model_state(model), path) for the weights, or use model.module, "
            "the module that was given to setup."
        )

    def _check_full(self, call: str, write: str) -> None:
        strategy = self._hocket.strategy
        if Need.FULL_PARAMETERS not in strategy.offers:
            raise WrongState(
                f"{call} of a prepared model needs all weights, and strategy {type(strategy).__name__} shards them over "
                f"ranks. Write {write}."
            )

    def _get_name(self) -> str:
        return "PreparedModel"


def _method(model: PreparedModel, method: MethodType) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call(method, args, kwargs)

    return call


def _converted(hook: Hook, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):  # would accumulate hooks
        return tensor
    if tensor.dtype in _HALF:
        tensor = tensor.float()
    if tensor.grad_fn is not None:
        tensor.register_hook(hook)
    return tensor


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in nested containers."""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = list(vars(value).values())
    elif isinstance(value, torch.Tensor):
        yield value
    if isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


_HALF = (torch.float16, torch.bfloat16)


class PreparedData:
    """Iterate over the batches of this rank, on its device.

    A rank without a slice of a batch repeats a batch as padding, with ``samples`` 0: in training, where `Runtime.backward`
    gives it weight 0, and in evaluation under strategies whose ranks compute together, such as fsdp.

    Other attributes, such as ``dataset``, are those of the given loader.
    """

    def __init__(self, runtime: Runtime, given: Any, data: Iterable[Any], train: bool) -> None:
        self._runtime, self._given, self._data, self._train = runtime, given, data, train
        self._current: tuple[Any, bool] = (None, False)

    @property
    def samples(self) -> int:
        """Number of real samples in the current batch on this rank; 0 for a padding batch."""
        batch, counts = self._current
        return batches.count(batch).samples if counts else 0

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]  # len() raises TypeError if the data has no length

    def __iter__(self) -> Iterator[Any]:
        runtime = self._runtime
        gradients = runtime._gradients
        try:
            for batch in self._data:
                self._current = batch, counts = batches.unpadded(batch)
                if self._train:
                    mine = self.samples
                    gradients.batch = gradients.batches[id(self)] = (mine, runtime._sum(mine))
                elif not counts:
                    warn(_REPEATED)
                yield runtime.bus.convert_batch(move(batch, runtime.device))
                runtime.device_kind.batch_end()
        finally:
            gradients.batches.pop(id(self), None)

    def __getattr__(self, name: str) -> Any:
        if name[0] == "_" or "state_dict" in name:  # of the given loader, while ranks iterate over slices
            raise AttributeError(f"The data that setup_data returned has no {name!r}.", name=name, obj=self)
        return getattr(self._given, name)

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of samplers and data sets that define it."""
        set_epoch(self._data, epoch)


_REPEATED = (
    "This rank has no slice of the batch and repeats a batch as padding, because all ranks have to compute. Weight results by "
    "`data.samples` of the object that setup_data returned: it is 0 for a padding batch."
)


def inner(model: nn.Module) -> nn.Module:
    """Return the module that the strategy prepared, of the model that `Runtime.setup` returned; of a part, the part."""
    if not isinstance(model, PreparedModel):
        return model
    return model._hocket.root if is_whole(model) else model.module


def is_whole(model: PreparedModel) -> bool:
    """Whether it is a model that `Runtime.setup` returned, and not a part of one."""
    return model.module is model._hocket.given

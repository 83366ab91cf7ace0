"""Channel pruning: remove whole channels, and what depends on them, so that the model is smaller and faster.

Sources: Li et al. 2016, "Pruning Filters for Efficient ConvNets", arXiv 1608.08710; Fang et al. 2023, "DepGraph: Towards Any
Structural Pruning", arXiv 2301.12900, for the layers that have to be pruned together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hocket.errors import WrongState, WrongType, WrongValue
from hocket.help import warn
from hocket.hookspecs import Event
from hocket.hookspecs.algorithm import Algorithm, Phase
from hocket.surgery import NoEffectWarning
from hocket_tools.arguments import check_fraction, check_least, check_weights, checked
from hocket_tools.compression.libraries import imported
from hocket_tools.compression.model_inputs import Inputs, as_inputs, leaves, on_device_of
from hocket_tools.compression.pruning import PRUNED, check_keep

if TYPE_CHECKING:
    from hocket.state.state import State


#: Of layers of the outputs, and layers in ``keep``.
_MEANT = "meant"


@dataclass(frozen=True, slots=True)
class PrunedLayer:
    """The weight of a layer before and after channels were removed, here or in a layer before it.

    Example:
        >>> import hocket_tools
        >>> print(hocket_tools.PrunedLayer("conv1", (16, 3, 3, 3), (8, 3, 3, 3)))
        conv1: (16, 3, 3, 3) -> (8, 3, 3, 3)
    """

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


@checked
def prune_channels(
    model: nn.Module, example: Any, amount: float = 0.5, *, keep: Sequence[str] = (), round_to: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[nn.Module, list[PrunedLayer]]:  # fmt: skip
    """Remove the output channels of least norm from each convolution and linear layer, in place.

    Layers that depend on each other, such as two that a residual connection joins, lose the same channels; norms and the
    next layers lose what belongs to them. The norm of a channel is that of all its weights in these layers (Fang et al. 2023).
    The outputs of the model keep their shape. Parameters stay the same objects, so that optimizers hold them still.

    Args:
        model: any module, in any mode; it is called with ``example`` to find dependencies.
        example: inputs of the model: a tensor, a tuple of arguments, a dict of keyword arguments, or the shape of a tensor with
            its batch, such as ``(2, 3, 32, 32)``.
        amount: the fraction of the channels of each layer to remove, in (0, 1); layers of which none would remain are not
            pruned.
        keep: patterns of names of layers that keep all their output channels, such as ``["stem.*"]``.
        round_to: the remaining numbers of channels are rounded down to multiples of this, such as 8 for tensor cores.
        optimizer: what its state holds for removed weights is removed too, such as momentum.

    Returns:
        The model, and a list that records the layers whose weights were made smaller. If no layer was, the list is empty. A
        NoEffectWarning then says so; it also names layers that keep all their channels, but for outputs and ``keep``.

    Raises:
        ValueError: ``amount`` or ``round_to`` is out of range, ``keep`` has a pattern for no layer, or the pruned
            model cannot compute the example.
        RuntimeError: outputs of the model are still referenced, or the optimizer's state has other shapes than its parameters.
        hocket.errors.MissingPackage: torch-pruning is not installed.

    Example:
        >>> import torch, hocket_tools
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 4, 3))
        >>> model, changed = hocket_tools.prune_channels(model, example=(2, 3, 8, 8))
        >>> model[0].out_channels, model[1:](torch.randn(2, 8, 8, 8)).shape
        (8, torch.Size([2, 4, 6, 6]))
    """
    check_fraction(0.5, amount=amount)
    check_least(1, 8, round_to=round_to)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise WrongType("The model is wrapped in DistributedDataParallel. Prune it before it is wrapped.")
    check_weights(model)
    check_keep("channel-pruning", keep, [name for name, _ in model.named_modules() if name] or [""])
    inputs = on_device_of(model, as_inputs(example))
    held = {id(each) for group in (optimizer.param_groups if optimizer else ()) for each in group["params"]}
    if optimizer and held.isdisjoint(map(id, model.parameters())):
        raise WrongValue(
            f"The {type(optimizer).__name__} of «optimizer=» has no parameter of this {type(model).__name__}: it is that of "
            "another model, or of a copy. Pass the optimizer that was made of model.parameters(), or omit it."
        )
    try:
        expected = _output_shapes(model, inputs)
    except Exception as error:
        raise WrongValue(
            f"{type(model).__name__} cannot compute «example=», inputs of shapes "
            f"{[tuple(each.shape) for each in leaves(inputs)]}: {error}. Give a tensor that the model takes, or its shape."
        ) from error
    kept = _kept_elements(model, inputs, amount, keep, round_to)
    trial = copy.deepcopy(model)
    kept.apply(trial)
    _compare_outputs(model, trial, inputs, expected)
    before = {name: _shape(each) for name, each in model.named_modules() if isinstance(each, PRUNED)}
    states = {} if optimizer is None else kept.states(model, optimizer)
    kept.apply(model)
    for parameter, state in states.items():
        assert optimizer is not None
        optimizer.state[parameter].update(state)
    after = {name: _shape(model.get_submodule(name)) for name in before}
    least = max(2, math.ceil(round_to / (1 - amount)))
    changed = [PrunedLayer(name, shape, after[name]) for name, shape in before.items() if shape != after[name]]
    if not changed:
        warn(
            f"channel-pruning found nothing to remove in {type(model).__name__}: no layer but those of the outputs and those "
            f"that «keep={list(keep)}» names has {least} channels or more, of which "
            f"«amount={amount}» and «round_to={round_to}» leave {round_to} or more. Lower these, keep less, or remove it.",
            NoEffectWarning,
        )
    elif whole := [
        f"{name} ({kept.whole.get(name) or (f'fewer than {least} channels' if shape[0] < least else 'fixed by other layers')})"
        for name, shape in before.items()
        if shape[0] == after[name][0] and kept.whole.get(name) != _MEANT
    ]:
        warn(f"channel-pruning removes no output channel of {', '.join(whole)}.", NoEffectWarning)
    return model, changed


@dataclass(frozen=True)
class _Kept:
    """What pruning keeps: by tensor the flat indices of the elements, in their new shape; by module the new sizes."""

    elements: Mapping[str, Tensor]
    sizes: Mapping[str, Mapping[str, Any]]
    #: Why layers keep all their output channels, by name, as far as it is known before.
    whole: Mapping[str, str]

    def apply(self, model: nn.Module) -> None:
        """Remove everything else from a model."""
        before = {name: (tensor, tensor.data) for name, tensor in _tensors(model) if name in self.elements}
        for name, (tensor, data) in before.items():
            tensor.grad = None
            tensor.data = self.of(name, data)
        # A graph that is alive has nodes of the former shapes, into which the next backward pass would run.
        if any(_stale(tensor) for tensor, _ in before.values()):
            for tensor, data in before.values():
                tensor.data = data
            raise WrongState(
                f"A loss or other outputs of {type(model).__name__} are still referenced, whose gradients have the old "
                "shapes. Nothing was changed. Delete them first, such as by del loss."
            )
        for name, sizes in self.sizes.items():
            vars(model.get_submodule(name)).update(sizes)

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Tensor]]:
        """Return what is kept of an optimizer's state by parameter; called before the model's own tensors change."""
        kept: dict[Tensor, dict[str, Tensor]] = {}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items() if name in self.elements else ():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    continue
                if value.shape != parameter.shape:
                    raise WrongState(
                        f"{type(optimizer).__name__} holds '{key}' of shape {tuple(value.shape)} for {name} of shape "
                        f"{tuple(parameter.shape)}, and it is unknown what of it belongs to which channel. Make the optimizer "
                        "after pruning."
                    )
                kept.setdefault(parameter, {})[key] = self.of(name, value)
        return kept

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return the kept elements of a tensor in the shape of the named one."""
        index = self.elements[name].to(tensor.device)
        return tensor.reshape(-1)[index]


def _kept_elements(model: nn.Module, inputs: Inputs, amount: float, keep: Sequence[str], round_to: int) -> _Kept:
    """Prune a copy of the model whose tensors are then their own indices, which tells what is kept of any tensor like them."""
    library = imported("torch_pruning", "pruning")  # Fang et al. 2023, arXiv 2301.12900
    copied = copy.deepcopy(model).eval()
    for parameter in copied.parameters():
        parameter.requires_grad_(True)  # torch-pruning follows the graph of gradients
    ignored = [module for name, module in copied.named_modules() if any(fnmatchcase(name, pattern) for pattern in keep)]
    try:
        pruner = library.pruner.BasePruner(
            copied, inputs.kwargs or inputs.args, importance=library.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=amount, ignored_layers=ignored, round_to=round_to if round_to > 1 else None,
        )  # fmt: skip
        pruner.ignored_layers += _of_outputs(pruner.DG, copied)
        seen = pruner.DG.module2node
        groups = list(pruner.step(interactive=True))
    except Exception as error:
        raise WrongValue(
            f"torch-pruning cannot follow the layers of {type(model).__name__}: {type(error).__name__}: {error}. Name "
            "the layers that it cannot prune in keep=."
        ) from error
    shapes = {name: tensor.shape for name, tensor in _tensors(copied)}
    with torch.no_grad():
        for _, tensor in _tensors(copied):
            tensor.data = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
        for group in groups:
            group.prune()
    elements = {name: tensor.detach().long() for name, tensor in _tensors(copied) if tensor.shape != shapes[name]}
    sizes = {name: _changed(model.get_submodule(name), module) for name, module in copied.named_modules()}
    whole = {
        name: _MEANT if module in pruner.ignored_layers else "not called with the example"
        for name, module in copied.named_modules()
        if isinstance(module, PRUNED) and (module in pruner.ignored_layers or module not in seen)
    }
    return _Kept(elements, sizes, whole)


def _of_outputs(graph: Any, model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers whose channels are those of the model's outputs, with no other layer between."""
    for module in model.modules():
        if not isinstance(module, PRUNED) or module not in graph.module2node:
            continue
        waiting, seen = [graph.module2node[module]], set()
        while waiting:
            node = waiting.pop()
            if not node.outputs:
                yield module
                break
            for follower in node.outputs:
                mixes = isinstance(follower.module, PRUNED) and getattr(follower.module, "groups", 1) == 1
                if follower not in seen and not mixes:
                    seen.add(follower)
                    waiting.append(follower)


def _changed(before: nn.Module, after: nn.Module) -> dict[str, Any]:
    """Return the attributes that say another size after pruning, such as ``out_channels``."""
    old = vars(before)
    return {
        key: value
        for key, value in vars(after).items()
        if isinstance(value, int | tuple) and not isinstance(value, bool) and key in old and old[key] != value
    }


def _shape(layer: Any) -> tuple[int, ...]:
    return tuple(layer.weight.shape)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _stale(tensor: Tensor) -> bool:
    """Whether autograd will add up gradients of another shape in a leaf."""
    edge = torch.autograd.graph.get_gradient_edge(tensor) if tensor.requires_grad else None
    return edge is not None and tuple(edge.node._input_metadata[0].shape) != tuple(tensor.shape)


def _output_shapes(model: nn.Module, inputs: Inputs) -> list[tuple[int, ...]]:
    modes = {each: each.training for each in model.modules()}
    try:
        with torch.no_grad():
            outputs = model.eval()(*inputs.args, **inputs.kwargs)
    finally:
        for each, mode in modes.items():
            each.training = mode
    return [tuple(leaf.shape) for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _compare_outputs(model: nn.Module, pruned: nn.Module, inputs: Inputs, expected: list[tuple[int, ...]]) -> None:
    """Raise ValueError unless the pruned copy computes outputs of the same shapes."""
    try:
        found: Any = _output_shapes(pruned, inputs)
    except Exception as error:
        found = f"an error, {str(error).partition(chr(10))[0]},"
    if found != expected:
        raise WrongValue(
            f"Without these channels {type(model).__name__} would give {found} instead of outputs of {expected}: its forward "
            "relies on sizes that torch-pruning does not see, such as a reshape to a number or heads of attention. Nothing was "
            "changed. Name the layers before it in keep=, such as «keep=['encoder.*']»."
        )


class ChannelPruning(Algorithm):
    """Remove the channels of least norm, once, before training (Li et al. 2016, arXiv 1608.08710), then fine-tune the rest.

    For trained models: give the Trainer the trained model, and this algorithm. The channels are removed when the Trainer is
    made, before optimizers exist and before a strategy wraps the model; so optimizers, averages, checkpoints and ranks know the
    small model only. A resumed run, and the evaluation of a checkpoint, remove as many channels, and then load what was saved.

    Args:
        example: inputs of the model, such as the shape of a batch, ``[2, 3, 32, 32]``; see `hocket_tools.prune_channels`.
        amount: the fraction of the channels of each layer to remove, in (0, 1).
        keep: patterns of names of layers that keep their output channels.
        round_to: the remaining numbers of channels are multiples of this.

    Raises:
        ValueError: an argument is out of range; later, if the model cannot be pruned.
        hocket.errors.MissingPackage: later, if torch-pruning is not installed.

    Example:
        >>> import hocket, hocket_tools, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        >>> pruning = hocket_tools.ChannelPruning(example=(2, 4), amount=0.75)
        >>> trainer = hocket.Trainer(model=model, algorithms=[pruning], device="cpu")
        >>> model[0].out_features, model[2].in_features
        (8, 8)
    """

    events = {Event.INIT}
    phase = Phase.MODEL
    before = ("quantization-aware-training", "blurpool", "weight-standardization", "squeeze-excite")

    @checked
    def __init__(self, example: Any, amount: float = 0.5, keep: Sequence[str] = (), round_to: int = 1) -> None:
        check_fraction(0.5, amount=amount)
        check_least(1, 8, round_to=round_to)
        as_inputs(example)
        self.example, self.amount, self.keep, self.round_to = example, amount, tuple(keep), round_to

    def apply(self, event: Event, state: State) -> None:
        """Remove the channels."""
        state.log({"channel-pruning/layers": len(self._pruned(state.model))})

    def touches(self, model: nn.Module) -> Sequence[str]:
        """Return one line for each layer that would become smaller."""
        import warnings

        with warnings.catch_warnings(action="ignore", category=NoEffectWarning):
            return list(map(str, self._pruned(copy.deepcopy(model))))

    def _pruned(self, model: nn.Module) -> list[PrunedLayer]:
        return prune_channels(model, self.example, self.amount, keep=self.keep, round_to=self.round_to)[1]

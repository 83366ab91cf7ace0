"""Module surgery: replace submodules of a model by class, and update the optimizer afterwards."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hocket.errors import WrongState, WrongType, WrongValue

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: Makes the replacement of a module, given the module and its index; None leaves the module as it is.
Build = Callable[[Any, int], nn.Module | None]


class NoEffectWarning(UserWarning):
    """An algorithm, or one of its arguments, has no effect on this model, these data or this duration."""


def why_no_effect(method: str, model: nn.Module, lacking: str, applied: Mapping[str, nn.Module]) -> str:
    """Return the message of a `NoEffectWarning` for surgery that changed nothing.

    Args:
        lacking: what the model lacks, and what the user can do.
        applied: modules that the method made in this model before, by name; if there are any, they are the reason.

    Example:
        >>> import torch
        >>> from hocket.surgery import why_no_effect
        >>> why_no_effect("Blur", torch.nn.ReLU(), "it has no Conv2d. Remove Blur.", {})
        'Blur found nothing to change in ReLU: it has no Conv2d. Remove Blur.'
    """
    if not applied:
        return f"{method} found nothing to change in {type(model).__name__}: {lacking}"
    name, module = next(iter(applied.items()))
    number = "1 module" if len(applied) == 1 else f"{len(applied)} modules"
    return (
        f"{method} is already applied to this {type(model).__name__}, in {number}, and changed nothing more: {name} is "
        f"{type(module).__name__}({module.extra_repr()}). Remove {method} here, or make the model anew for other settings."
    )


def _always(module: nn.Module) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule that replaces modules of one class.

    ``build(module, index)`` makes the replacement; ``index`` is the number of modules that the policy matched before.
    ``matches`` selects modules of the class, so that :func:`preview` can list them without building anything.

    Example:
        >>> import torch
        >>> from hocket.surgery import Policy, preview
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> wide = Policy(build=lambda old, index: torch.nn.Identity(), matches=lambda old: old.out_features >= 64)
        >>> preview(model, {torch.nn.Linear: wide})
        ['0']
    """

    build: Build
    matches: Callable[[Any], bool] = _always


#: Policies by class, including subclasses; the first match counts. A function stands for ``Policy(function)``.
Policies = Mapping[type[nn.Module], Policy | Build]


@dataclass(frozen=True, slots=True)
class Replacement:
    """``old``, found at ``name``, was replaced by ``new``.

    A module that is used in several places is one replacement, under the first of its names. ``root`` is the module on
    which surgery was done: parameters that it still uses stay in the optimizer.

    Example:
        >>> import torch
        >>> from hocket.surgery import Policy, replace_modules
        >>> model = torch.nn.Sequential(torch.nn.ReLU())
        >>> [replacement] = replace_modules(model, {torch.nn.ReLU: Policy(lambda old, index: torch.nn.GELU())})
        >>> replacement.name, replacement.old, replacement.new
        ('0', ReLU(), GELU(approximate='none'))
    """

    name: str
    old: nn.Module
    new: nn.Module
    root: nn.Module | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.name}: {type(self.old).__name__} -> {type(self.new).__name__}"


def preview(module: nn.Module, policies: Policies) -> list[str]:
    """Return the names of the submodules that :func:`replace_modules` would offer to the policies, in order.

    All of them would be replaced if no ``build`` returned None. Changes nothing.

    Example:
        >>> import torch
        >>> from hocket.surgery import Policy, preview
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1), torch.nn.ReLU())
        >>> preview(model, {torch.nn.ReLU: Policy(lambda old, index: torch.nn.GELU())})
        ['1', '3']
    """
    names = []

    def note(name: str, *_: object) -> bool:
        names.append(name)
        return True

    _search(module, policies, note)
    return names


def replace_modules(module: nn.Module, policies: Policies) -> list[Replacement]:
    """Replace the descendants of ``module`` that a policy matches.

    Breadth first, in the order of registration. ``module`` itself is never replaced, and replacements are not searched
    again; call this function on one to do so. A module that is used in several places is built once and replaced in all.

    New parts of a replacement move to the device and floating-point dtype of the old module (or of its parent, if the old
    module has no tensors) and take over its train or eval mode. Forward and backward hooks move to the replacement, and
    their handles still remove them. If the replacement contains the old module, hooks stay on the old module.

    All replacements are built before the first one is inserted: if this raises, ``module`` is unchanged.

    Args:
        policies: by class; see :class:`Policy`.

    Returns:
        The replacements, in order.

    Raises:
        TypeError: ``module`` is wrapped in DistributedDataParallel, or a policy did not return a module.
        ValueError: both the old module and its replacement have hooks of their own, or the old one's ``forward`` was
            replaced on the instance.

    Example:
        >>> import torch
        >>> from hocket.surgery import Policy, replace_modules
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.ReLU())
        >>> replaced = replace_modules(model, {torch.nn.ReLU: Policy(lambda old, index: torch.nn.GELU())})
        >>> model[1]
        GELU(approximate='none')
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise WrongType(
            "The model is wrapped in DistributedDataParallel, which would still reduce the gradients of parameters that "
            "surgery removes. Do surgery on the model before it is wrapped."
        )
    replacements: list[Replacement] = []

    def build(name: str, old: nn.Module, container: nn.Module, policy: Policy, index: int) -> bool:
        new = policy.build(old, index)
        if new is None or new is old:
            return False
        if not isinstance(new, nn.Module):
            raise WrongType(f"The policy for {name} ({type(old).__name__}) returned {new!r}; return a module or None.")
        replacement = Replacement(name, old, new, module)
        _check_hooks(replacement)
        _move_new_parts(replacement, container)
        replacements.append(replacement)
        return True

    containers = _search(module, policies, build)
    swaps = {replacement.old: replacement.new for replacement in replacements}
    for replacement in replacements:
        _carry_hooks(replacement)
    for container in containers:
        # Not named_children(), which omits the second name of a module.
        for name, child in list(container._modules.items()):
            if child in swaps:
                setattr(container, name, swaps[child])
    return replacements


def _check_policies(policies: object) -> None:
    """Raise TypeError unless policies are functions, or `Policy` objects, by class of module."""
    example = "{torch.nn.ReLU: lambda old, index: torch.nn.GELU()}"
    if not isinstance(policies, Mapping):
        raise WrongType(
            f"The policies are a {type(policies).__name__}, and should be a dict by class. Write {example}."
        )
    for kind, policy in policies.items():
        if not isinstance(kind, type):
            raise WrongType(
                f"The policies have the key {kind!r}, and should be a dict by class of module. Write {example}."
            )
        build = policy.build if isinstance(policy, Policy) else policy
        if not callable(build) or isinstance(build, nn.Module | type):
            name = build.__name__ if isinstance(build, type) else type(build).__name__
            raise WrongType(
                f"The policy for {kind.__name__} is {name}, and should be a function of (module, index) that returns the "
                f"replacement or None. Write {{torch.nn.{kind.__name__}: lambda old, index: {name}(…)}}."
            )


def _search(module: nn.Module, policies: Policies, found: Callable[..., bool]) -> list[nn.Module]:
    """Call ``found(name, child, container, policy, index)`` for matches; search those for which it returns False.

    Returns the modules whose children were searched.
    """
    _check_policies(policies)
    normalised = {kind: policy if isinstance(policy, Policy) else Policy(policy) for kind, policy in policies.items()}
    indices: Counter[type[nn.Module]] = Counter()
    queue = deque([("", module)])
    seen = {module}  # found or queued
    containers = []
    while queue:
        prefix, container = queue.popleft()
        containers.append(container)
        for name, child in container.named_children():
            if child in seen:
                continue
            seen.add(child)
            path = f"{prefix}{name}"
            kind = next((k for k, p in normalised.items() if isinstance(child, k) and p.matches(child)), None)
            if kind is not None:
                indices[kind] += 1
                if found(path, child, container, normalised[kind], indices[kind] - 1):
                    continue
            queue.append((f"{path}.", child))
    return containers


def _move_new_parts(replacement: Replacement, container: nn.Module) -> None:
    """Set device, dtype and mode of parts of ``new`` that are not in ``old``; parts of ``old`` keep theirs."""
    old, new = replacement.old, replacement.new
    sources = [source for source in (old, container, replacement.root) if source is not None]
    first = next(chain.from_iterable(map(_tensors, sources)), None)
    if first is not None:
        own, device = set(_tensors(old)), first.device
        dtype = next((t.dtype for source in sources for t in _tensors(source) if t.is_floating_point()), None)

        def like_old(tensor: Tensor) -> Tensor:
            return tensor if tensor in own else tensor.to(device, dtype if tensor.is_floating_point() else None)

        new._apply(like_old)
    for part in set(new.modules()) - set(old.modules()):
        part.training = old.training


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


#: Attributes of a module in which torch stores its forward and backward hooks.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

#: Hooks that a recast module shares with the module that it was.
_STATE_DICT_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def _hooked(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in _HOOKS)


def _check_hooks(replacement: Replacement) -> None:
    old, new = replacement.old, replacement.new
    if old in set(new.modules()):
        return
    if "forward" in vars(old):
        raise WrongValue(
            f"The forward of {replacement.name} ({type(old).__name__}) was replaced on the instance, and the new module "
            "would silently ignore that. Do surgery before that change, or let the policy wrap the old module."
        )
    if _hooked(old) and _hooked(new):
        raise WrongValue(
            f"Both {replacement.name} ({type(old).__name__}) and its replacement ({type(new).__name__}) have hooks; "
            "their order is undefined. Remove those of the old module and register them again afterwards."
        )


def _carry_hooks(replacement: Replacement) -> None:
    old, new = replacement.old, replacement.new
    if _hooked(old) and old not in set(new.modules()):
        for name in _HOOKS:
            setattr(new, name, getattr(old, name))  # the same dict object, which the handles refer to
        new._is_full_backward_hook = old._is_full_backward_hook


def recast(module: nn.Module, kind: type[ModuleT], **attributes: object) -> ModuleT:
    """Return ``module`` as an instance of ``kind``, a subclass of its class that overrides methods such as ``forward``.

    It has the same attributes, parameters, buffers and submodules (the same objects), and no forward or backward hooks:
    `replace_modules` moves those. Draws no random numbers.

    Args:
        kind: its ``__init__`` is not called.
        attributes: further attributes of the new module.

    Example:
        >>> import torch
        >>> from hocket.surgery import recast
        >>> class Doubled(torch.nn.Linear):
        ...     def forward(self, input):
        ...         return self.factor * super().forward(input)
        >>> plain = torch.nn.Linear(4, 1)
        >>> doubled = recast(plain, Doubled, factor=2)
        >>> doubled.weight is plain.weight
        True
    """
    new = kind.__new__(kind)
    nn.Module.__init__(new)
    own, given = vars(new), vars(module)
    own.update({name: value for name, value in given.items() if name not in own}, **attributes)
    own.pop("_compiled_call_impl", None)  # compiled for the former class
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        own[name].update(given[name])
    for name in (*_STATE_DICT_HOOKS, "training"):
        own[name] = given[name]
    return new


def update_optimizer(optimizer: torch.optim.Optimizer, replacements: Iterable[Replacement]) -> None:
    """Update the parameter groups of ``optimizer`` after surgery, in time linear in the number of parameters.

    Parameters that the model no longer uses are removed from their groups. New parameters are appended to the group of the
    parameters that they replace, or skipped if those are in no group. If the old module had no parameters, the new ones
    join the only group. The order of the other parameters does not change.

    Raises:
        RuntimeError: the optimizer already has state, which may belong to removed parameters.
        ValueError: the group of new parameters is ambiguous.

    Example:
        >>> import torch
        >>> from hocket.surgery import Policy, replace_modules, update_optimizer
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> without_bias = Policy(lambda old, index: torch.nn.Linear(old.in_features, old.out_features, bias=False))
        >>> update_optimizer(optimizer, replace_modules(model, {torch.nn.Linear: without_bias}))
        >>> len(optimizer.param_groups[0]["params"])
        1
    """
    if optimizer.state:
        raise WrongState(
            f"{type(optimizer).__name__} already has state for its parameters, and surgery would leave state of removed "
            "weights. Do surgery before the first step, or make the optimizer afterwards: give the Trainer a function of "
            "the parameters, such as «optimizer=lambda params: torch.optim.AdamW(params)»."
        )
    replacements = list(replacements)
    groups = optimizer.param_groups
    group_of = {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}
    roots = {replacement.root for replacement in replacements if replacement.root is not None}
    in_use = set(chain.from_iterable(root.parameters() for root in roots))
    gone: set[nn.Parameter] = set()
    added: dict[nn.Parameter, tuple[int, str]] = {}

    for replacement in replacements:
        before = list(replacement.old.parameters())
        after = {parameter: name for name, parameter in replacement.new.named_parameters()}
        new = [parameter for parameter in after if parameter not in group_of]
        origins = {group_of[parameter] for parameter in before if parameter in group_of}
        if new and not before:
            origins = set(range(len(groups)))
        if new and len(origins) > 1:
            raise WrongValue(
                f"The group of the {len(new)} new parameters of {replacement} is ambiguous: the old ones are spread over, "
                f"or could be in, groups {sorted(origins)} of {type(optimizer).__name__}. Make the optimizer after surgery, "
                "or keep the parameters of this module in one group."
            )
        for parameter in new if origins else ():
            (index,) = origins
            group_of[parameter] = index
            added[parameter] = (index, f"{replacement.name}.{after[parameter]}")
        gone.difference_update(after)
        gone.update(p for p in before if p in group_of and p not in after and p not in in_use)

    for index, group in enumerate(groups):
        kept = [position for position, parameter in enumerate(group["params"]) if parameter not in gone]
        joined = {p: name for p, (i, name) in added.items() if i == index and p not in gone}
        if "param_names" in group:
            group["param_names"][:] = [group["param_names"][position] for position in kept] + list(joined.values())
        # In place: some optimizers keep a reference to the list.
        group["params"][:] = [group["params"][position] for position in kept] + list(joined)

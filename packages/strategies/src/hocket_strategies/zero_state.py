"""Assemble full weights and optimizer state of a DeepSpeed engine from the partitions of all ranks, and load them back.

Collective: every rank calls these functions with the same arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.errors import WrongState, WrongValue

Groups = Sequence[Sequence[nn.Parameter]]


# --- weights


def full_weights(module: nn.Module) -> dict[str, Any]:
    """Return the module's state_dict with full weights; in float32 where the engine has it, instead of the 16-bit copy."""
    return {name: _whole(value) for name, value in module.state_dict(keep_vars=True).items()}


@torch.no_grad()
def load_full_weights(module: nn.Module, state_dict: dict[str, Any], engine: Any = None) -> None:
    """Load `full_weights`. ``engine`` is None if nothing is partitioned. Raises RuntimeError unless every key fits."""
    held = module.state_dict(keep_vars=True)
    _check(module, held, state_dict)
    for name, target in held.items():
        if _is_partitioned(target):
            with _gathered(target, modifier_rank=0):
                target.copy_(state_dict[name])
        elif isinstance(target, Tensor):
            target.copy_(state_dict[name])
    if engine is None:
        return
    engine.optimizer.refresh_fp32_params()
    for name, target in held.items():
        if _has_wide_copy(target):
            _set(target, state_dict[name])


def _whole(value: Any) -> Any:
    if _has_wide_copy(value):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(value)
    if _is_partitioned(value):
        with _gathered(value):
            return value.detach().clone()
    return value.detach() if isinstance(value, Tensor) else value


def _is_partitioned(value: Any) -> bool:
    return hasattr(value, "ds_id")


def _has_wide_copy(value: Any) -> bool:
    """Whether the engine trains a float32 copy of these 16-bit weights."""
    narrow = isinstance(value, nn.Parameter) and value.requires_grad and value.dtype.itemsize < 4
    return narrow and (_is_partitioned(value) or hasattr(value, "_hp_mapping"))


def _gathered(parameter: nn.Parameter, **options: Any) -> Any:
    from deepspeed import zero

    return zero.GatheredParameters([parameter], **options)


def _check(module: nn.Module, held: dict[str, Any], state_dict: dict[str, Any]) -> None:
    wrong = [f"{name} is missing" for name in held.keys() - state_dict.keys()]
    wrong += [f"{name} is not in the model" for name in state_dict.keys() - held.keys()]
    for name in held.keys() & state_dict.keys():
        shape, given = getattr(held[name], "ds_shape", getattr(held[name], "shape", None)), state_dict[name]
        if getattr(given, "shape", None) != shape:
            wrong.append(f"{name} has shape {getattr(given, 'shape', None)} and should have {shape}")
    if wrong:
        raise WrongState(f"The weights do not fit {type(module).__name__}: {'; '.join(sorted(wrong))}.")


# --- optimizers


def full_optimizer_state(optimizer: torch.optim.Optimizer, groups: Groups) -> dict[str, Any]:
    """Return the state in the format of `torch.optim.Optimizer.state_dict`, with parameters numbered as in ``groups``.

    The engine has replaced the optimizer's parameters by flat partitions, which all have the same kinds of state.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    kinds: dict[str, Any] = next((state for state in optimizer.state.values() if state), {})
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(chain.from_iterable(groups)):
        if kinds and parameter.requires_grad:
            state[index] = {
                key: safe_get_full_optimizer_state(parameter, key) if _is_flat(kind) else copy.deepcopy(kind)
                for key, kind in kinds.items()
            }
    numbers = iter(range(sum(map(len, groups))))
    settings = [
        {**_settings(group), "params": [next(numbers) for _ in parameters]}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    return {"state": state, "param_groups": settings}


def load_full_optimizer_state(
    optimizer: torch.optim.Optimizer, groups: Groups, state_dict: dict[str, Any], engine: Any
) -> None:
    """Load `full_optimizer_state`. Raises ValueError if the state has other parameter groups."""
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != [len(group) for group in groups]:
        raise WrongValue(
            f"The state belongs to an optimizer with groups of {sizes} parameters, this one has {[len(g) for g in groups]}."
        )
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update(copy.deepcopy(_settings(saved)))
    states: dict[int, dict[str, Any]] = state_dict["state"]
    kinds = {key: value for state in states.values() for key, value in state.items()}
    flat_kinds = {key for state in states.values() for key, value in state.items() if _is_flat(value)}
    for flat in _partitions(engine):
        held = optimizer.state[flat]
        for key, kind in kinds.items():
            if key not in flat_kinds:
                held[key] = copy.deepcopy(kind)
            elif key not in held:
                held[key] = torch.zeros_like(flat)
    if kinds and hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # so that safe_set_… finds the new state
    for index, parameter in enumerate(chain.from_iterable(groups)):
        for key, value in states.get(index, {}).items():
            if key in flat_kinds:
                _set(parameter, value, key)


def _set(parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
    """Set the engine's float32 copy of a parameter, or its optimizer state ``key``, from the full tensor."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    value = value.to(parameter.device, torch.float32)
    if _is_partitioned(parameter):
        # DeepSpeed's own functions for full values fail if ranks get different numbers of elements.
        zero, size = parameter._z3_optimizer, parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        start = dist.get_rank(parameter.ds_process_group) * size  # type: ignore[attr-defined]
        mine = torch.zeros(size, device=value.device)
        held = value.flatten()[start : start + size]
        mine[: held.numel()] = held
        zero.set_local_hp_param(mine, parameter, key)
    elif key is None:
        safe_set_full_fp32_param(parameter, value)
    else:
        safe_set_full_optimizer_state(parameter, value, key)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_flat(value: Any) -> bool:
    """Whether a state value has the shape of the parameter, unlike a step count."""
    return isinstance(value, Tensor) and value.dim() > 0


def _partitions(engine: Any) -> list[Tensor]:
    zero = engine.optimizer
    # Stage 3 hides them from the optimizer between steps.
    return list(getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups)


# --- the engine's state between batches


def forget_gradients(engine: Any) -> None:
    """Drop accumulated or reduced gradients that no step has used."""
    zero = engine.optimizer
    zero.zero_grad()
    if hasattr(zero, "single_partition_of_fp32_groups"):  # stages 1 and 2
        zero.averaged_gradients.clear()
        zero.micro_step_id = -1


def step(engine: Any, factor: Tensor | None) -> None:
    """Step with the engine's gradients multiplied by ``factor``, or as they are."""
    zero = engine.optimizer
    if factor is None:
        engine.step()
    elif hasattr(zero, "fp32_groups_gradients_flat"):  # of 16-bit weights, accumulated in 32 bits
        for gradients in zero.fp32_groups_gradients_flat:
            gradients.mul_(factor)
        engine.step()
    else:  # the engine divides its gradients by the loss scale before it clips them
        zero.external_loss_scale, zero.custom_loss_scaler = zero.loss_scale / factor, True
        try:
            engine.step()
        finally:
            zero.custom_loss_scaler = False


def forget_groups() -> None:
    """Make DeepSpeed look up process groups again, after those that it caches were destroyed."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    for name, value in vars(groups).items():
        if name.startswith("_") and name.endswith("_GROUP") and not isinstance(value, dict):
            setattr(groups, name, None)

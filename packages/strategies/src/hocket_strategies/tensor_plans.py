"""Plans of tensor parallelism: the style of each divided layer, and plans for GPT-2 and Llama."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from hocket.errors import WrongValue

#: By style: whether outputs (columns) or inputs are divided, and whether the other end is replicated.
_STYLES = {
    "colwise": (True, False),
    "colwise_gather_output": (True, True),
    "rowwise": (False, False),
    "rowwise_split_input": (False, True),
}

_LLAMA = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
}
#: One layer holds queries, keys and values side by side, so its shards do not match heads: every rank computes attention
#: itself, from gathered outputs.
_GPT2 = {
    "attn.c_attn": "colwise_gather_output",
    "attn.c_proj": "rowwise_split_input",
    "mlp.c_fc": "colwise",
    "mlp.c_proj": "rowwise",
}
_VOCABULARY = {"embed_tokens": "rowwise", "wte": "rowwise", "lm_head": "colwise_gather_output"}


def find_plan(model: nn.Module, given: Mapping[str, Any] | None, degree: int) -> dict[str, Any]:
    """Return styles by full module name: from the user's plan, the model's own, or the built-in one for its layers.

    Raises:
        ValueError: there is no plan, or it names missing modules.
    """
    plan = given if given is not None else getattr(model, "tensor_parallel_plan", None)
    if plan is None:
        return _built_in(model, degree)
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, Any] = {}
    for pattern, style in plan.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise WrongValue(
                f"The plan of tensor-parallel names '{pattern}', but the model has no such module. It has "
                f"{', '.join(names[:8])}{' and more' if len(names) > 8 else ''}."
            )
        if isinstance(style, str) and style not in _STYLES:
            raise WrongValue(
                f"The plan of tensor-parallel gives '{pattern}' the style {style!r}: use one of "
                f"{', '.join(map(repr, _STYLES))}, or a torch ParallelStyle."
            )
        found.update(dict.fromkeys(matching, style))
    return found


def _built_in(model: nn.Module, degree: int) -> dict[str, Any]:
    modules = dict(model.named_modules())
    plan: dict[str, Any] = {}
    for name, module in modules.items():
        leaf, pair = name.rpartition(".")[2], ".".join(name.split(".")[-2:])
        style = _GPT2.get(pair) if _is_conv1d(module) else _LLAMA.get(leaf) if isinstance(module, nn.Linear) else None
        if style:
            plan[name] = style
    if not plan:
        raise WrongValue(
            f"«strategy='tensor-parallel'» has no plan for {type(model).__name__}: its layers are not named like those of "
            "GPT-2 or Llama. Pass one by module names, such as «strategy={'tensor-parallel': {'plan': {'*.fc1': 'colwise', "
            "'*.fc2': 'rowwise'}}}», or set the model's attribute tensor_parallel_plan."
        )
    for name in plan:
        _check_neighbours(name, plan, modules)
    _check_heads(model, plan, degree)
    for name, module in modules.items():
        leaf = name.rpartition(".")[2]
        if (
            leaf in _VOCABULARY
            and isinstance(module, nn.Embedding | nn.Linear)
            and module.weight.shape[0] % degree == 0
        ):
            plan[name] = _VOCABULARY[leaf]
    return plan


def _check_neighbours(name: str, plan: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
    """Refuse parameters between divided layers: each rank would see, and compute gradients for, part of the features."""
    parent = name.rpartition(".")[0]
    for inner, _ in modules[parent].named_parameters():
        owner = f"{parent}.{inner}".rpartition(".")[0]
        if owner not in plan and plan[name] in ("colwise", "rowwise"):
            raise WrongValue(
                f"The built-in plan of tensor-parallel does not know {parent}.{inner}, next to layers that it divides: it "
                "would be trained on part of the features. Pass a custom plan=."
            )


def _check_heads(model: nn.Module, plan: Mapping[str, Any], degree: int) -> None:
    if not any(name.endswith(".k_proj") for name in plan):
        return
    config = getattr(model, "config", None)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if heads is not None and heads % degree:
            raise WrongValue(
                f"{type(model).__name__} has {key}={heads}, which {degree} ranks cannot divide evenly. Choose tensor= among "
                f"the divisors of {heads}."
            )


def parallelize(model: nn.Module, plan: Mapping[str, Any], mesh: Any) -> None:
    """Divide the modules of ``plan`` over ``mesh`` (one axis); each rank keeps its part of its own values.

    Raises:
        ValueError: a module cannot be divided in its style, or evenly; or modules that share a parameter are divided
            differently.
    """
    modules = dict(model.named_modules())
    tied: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(parameter, []).append(name)
    for name, style in plan.items():
        parallelize_module(modules[name], mesh, _style(name, modules[name], style), src_data_rank=None)
        _check_even(name, modules[name], mesh.size())
    for names in tied.values():
        if len(names) > 1:
            _tie(model, names)


def _style(name: str, module: nn.Module, style: Any) -> ParallelStyle:
    if not isinstance(style, str):
        return style  # type: ignore[no-any-return]
    columns, is_whole = _STYLES[style]
    if _is_conv1d(module):
        return _Transposed(columns, is_whole)
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise WrongValue(
            f"The plan of tensor-parallel divides {name}, a {type(module).__name__}, but 'colwise' and 'rowwise' are for "
            "Linear and Embedding layers. Give it a torch ParallelStyle, or remove it."
        )
    if columns:
        return ColwiseParallel(output_layouts=Replicate() if is_whole else None)
    # The inputs of an embedding are indices, which are replicated.
    is_whole = is_whole or isinstance(module, nn.Embedding)
    return RowwiseParallel(input_layouts=Replicate() if is_whole else None)


def _check_even(name: str, module: nn.Module, degree: int) -> None:
    for inner, parameter in module.named_parameters():
        for placement in getattr(parameter, "placements", ()):
            if placement.is_shard() and parameter.shape[placement.dim] % degree:
                raise WrongValue(
                    f"The plan of tensor-parallel divides {name}.{inner} of shape {tuple(parameter.shape)} along dimension "
                    f"{placement.dim}, which {degree} ranks cannot divide evenly. Choose another tensor=, or remove {name} "
                    "of the plan."
                )


def _tie(model: nn.Module, names: list[str]) -> None:
    parameters = [model.get_parameter(name) for name in names]
    layouts = {getattr(parameter, "placements", None) for parameter in parameters}
    if len(layouts) > 1:
        raise WrongValue(
            f"{' and '.join(names)} are one parameter, but the plan of tensor-parallel divides them differently. Give both "
            "modules styles that divide the same dimension, or remove both."
        )
    for name in names[1:]:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameters[0])


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' linear layer with a transposed weight, (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


class _Transposed(ParallelStyle):
    """ColwiseParallel or RowwiseParallel for a weight of shape (inputs, outputs)."""

    def __init__(self, columns: bool, is_whole: bool) -> None:
        super().__init__()
        self._columns, self._whole = columns, is_whole

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return distribute_module(module, device_mesh, self._divide, self._before, self._after)

    def _divide(self, name: str, module: nn.Module, mesh: Any) -> None:
        weight, bias = (Shard(1), Shard(0)) if self._columns else (Shard(0), Replicate())
        for leaf, placement in (("weight", weight), ("bias", bias)):
            parameter = module.get_parameter(leaf)
            divided = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(divided, requires_grad=parameter.requires_grad))

    def _before(self, module: nn.Module, inputs: Any, mesh: Any) -> Any:
        whole = self._columns or self._whole
        given = DTensor.from_local(inputs[0], mesh, [Replicate() if whole else Shard(-1)], run_check=False)
        return given if self._columns else given.redistribute(placements=[Shard(-1)])

    def _after(self, module: nn.Module, outputs: Any, mesh: Any) -> Any:
        if not self._columns or self._whole:
            outputs = outputs.redistribute(placements=[Replicate()])
        return outputs.to_local()

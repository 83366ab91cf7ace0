"""Module surgery and what it does to optimizers."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.surgery import (
    NoEffectWarning,
    Policy,
    Replacement,
    preview,
    recast,
    replace_modules,
    update_optimizer,
    why_no_effect,
)


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.gain * self.inner(x)


class SubLinear(nn.Linear):
    pass


def net():
    return nn.Sequential(
        OrderedDict(
            stem=nn.Linear(4, 4),
            block=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(SubLinear(4, 4, bias=False))),
            head=nn.Linear(4, 2),
        )
    )


def fresh(linear, index):
    return nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)


def ids(parameters):
    return [id(p) for p in parameters]


# --- replace_modules


def test_breadth_first_with_subclasses_and_indices_per_policy():
    model, seen = net(), []

    def policy(kind):
        def build(module, index):
            seen.append((kind, index, module))
            return Wrapped(module)

        return build

    linears = [model.stem, model.head, model.block[0], model.block[2][0]]
    replaced = replace_modules(model, {nn.Linear: policy("linear"), nn.ReLU: policy("relu")})
    assert [(r.name, type(r.old)) for r in replaced] == [
        ("stem", nn.Linear),
        ("head", nn.Linear),
        ("block.0", nn.Linear),
        ("block.1", nn.ReLU),
        ("block.2.0", SubLinear),
    ]
    assert [(kind, index) for kind, index, _ in seen] == [
        ("linear", 0),
        ("linear", 1),
        ("linear", 2),
        ("relu", 0),
        ("linear", 3),
    ]
    assert [module for kind, _, module in seen if kind == "linear"] == linears
    for replacement in replaced:
        assert model.get_submodule(replacement.name) is replacement.new
        assert replacement.new.inner is replacement.old
    assert str(replaced[-1]) == "block.2.0: SubLinear -> Wrapped"


def test_the_function_is_kept_where_the_replacement_keeps_it():
    torch.manual_seed(0)
    model, x = net(), torch.randn(3, 4)
    expected = model(x)
    replace_modules(model, {nn.Linear: lambda module, index: Wrapped(module)})
    torch.testing.assert_close(model(x), expected)


def test_the_root_is_never_replaced_and_containers_are_replaced_whole():
    model = net()
    replaced = replace_modules(model, {nn.Sequential: lambda module, index: nn.Identity()})
    assert [r.name for r in replaced] == ["block"]
    assert isinstance(model, nn.Sequential) and isinstance(model.block, nn.Identity)


def test_replacements_are_not_searched():
    model = net()
    replaced = replace_modules(model, {nn.Linear: lambda module, index: nn.Sequential(module, nn.Linear(2, 2))})
    assert len(replaced) == 4


def test_none_leaves_a_module_and_searches_it():
    model = net()
    policies = {nn.Sequential: lambda module, index: None, nn.Linear: fresh}
    assert [r.name for r in replace_modules(model, policies)] == ["stem", "head", "block.0", "block.2.0"]


def test_the_first_policy_that_fits_counts():
    model = net()
    policies = {
        nn.Linear: Policy(lambda module, index: nn.Identity(), matches=lambda linear: linear.out_features == 2),
        SubLinear: lambda module, index: nn.Tanh(),
        nn.Module: Policy(lambda module, index: nn.Sigmoid(), matches=lambda module: not list(module.children())),
    }
    replace_modules(model, policies)
    kinds = [type(model.get_submodule(name)) for name in ("stem", "block.0", "block.1", "block.2.0", "head")]
    assert kinds == [nn.Sigmoid, nn.Sigmoid, nn.Sigmoid, nn.Tanh, nn.Identity]


def test_a_shared_module_is_built_once_and_replaced_everywhere():
    shared = nn.Linear(4, 4)
    inner = nn.ModuleDict({"one": shared, "two": shared})
    model = nn.ModuleList([inner, shared, inner])
    replaced = replace_modules(model, {nn.Linear: fresh})
    assert [r.name for r in replaced] == ["1"]
    assert model[1] is model[0]["one"] is model[0]["two"] is replaced[0].new
    assert model[2] is model[0]


def test_preview_names_what_would_be_replaced_and_changes_nothing():
    model = net()
    before = list(model.named_modules())
    policies = {nn.Linear: Policy(fresh, matches=lambda linear: linear.bias is not None), nn.ReLU: fresh}
    names = preview(model, policies)
    assert list(model.named_modules()) == before
    assert names == ["stem", "head", "block.0", "block.1"]
    policies[nn.ReLU] = lambda module, index: nn.GELU()
    assert [r.name for r in replace_modules(model, policies)] == names
    assert preview(nn.Linear(1, 1), policies) == []


def test_nothing_is_changed_when_a_policy_fails():
    model = net()
    before = list(model.named_modules())

    def build(module, index):
        if index == 2:
            raise ArithmeticError("no")
        return Wrapped(module)

    with pytest.raises(ArithmeticError):
        replace_modules(model, {nn.Linear: build})
    with pytest.raises(TypeError, match=r"stem \(Linear\) returned 3"):
        replace_modules(model, {nn.Linear: lambda module, index: 3})
    assert list(model.named_modules()) == before


def test_new_parts_take_device_dtype_and_mode_of_the_old_module_and_old_parts_keep_theirs():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2, dtype=torch.float64)
            self.norm = nn.LayerNorm(2).eval()  # float32 and frozen on purpose

    class Around(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block, self.extra = block, nn.BatchNorm1d(2).eval()

    model = nn.Sequential(Block())
    norm = model[0].norm.weight
    replace_modules(model, {Block: lambda block, index: Around(block)})
    new = model[0]
    assert new.extra.weight.dtype == new.extra.running_mean.dtype == torch.float64
    assert new.extra.num_batches_tracked.dtype == torch.int64
    assert new.block.norm.weight is norm and norm.dtype == torch.float32
    assert new.training and new.extra.training and new.block.training and not new.block.norm.training

    model = nn.Sequential(nn.Linear(2, 2, device="meta")).eval()
    replace_modules(model, {nn.Linear: fresh})
    assert model[0].weight.is_meta and not model[0].training


def test_for_a_module_without_tensors_the_one_around_it_says_device_and_dtype():
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, device="meta", dtype=torch.bfloat16), nn.ReLU()), nn.ReLU()
    )
    replace_modules(model, {nn.ReLU: lambda module, index: nn.PReLU()})
    assert model[1][1].weight.is_meta and model[1][1].weight.dtype == torch.bfloat16
    assert model[2].weight.device.type == "cpu" and model[2].weight.dtype == torch.float32


def test_parameters_handed_over_stay_the_same_objects():
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64))
    weight = model[0].weight

    def build(linear, index):
        new = nn.Linear(2, 2)
        new.weight = linear.weight
        return new

    replace_modules(model, {nn.Linear: build})
    assert model[0].weight is weight and model[0].bias.dtype == torch.float64


# --- hooks


def test_hooks_move_and_their_handles_still_remove_them():
    model, calls = nn.Sequential(nn.Linear(2, 2)), []
    old = model[0]
    handles = [
        old.register_forward_hook(lambda m, args, kwargs, out: calls.append(("forward", type(m))), with_kwargs=True),
        old.register_forward_pre_hook(lambda m, args: calls.append(("pre", type(m)))),
        old.register_full_backward_hook(lambda m, gi, go: calls.append(("backward", type(m)))),
        old.register_full_backward_pre_hook(lambda m, go: calls.append(("backward pre", type(m)))),
    ]
    replace_modules(model, {nn.Linear: lambda linear, index: nn.Bilinear(2, 2, 2) if index else SubLinear(2, 2)})
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls == [(kind, SubLinear) for kind in ("pre", "forward", "backward pre", "backward")]
    for handle in handles:
        handle.remove()
    calls.clear()
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls == []


def test_hooks_stay_on_an_old_module_that_lives_on():
    model, calls = nn.Sequential(nn.Linear(2, 2)), []
    model[0].register_forward_hook(lambda m, args, out: calls.append(type(m)))
    replace_modules(model, {nn.Linear: lambda linear, index: Wrapped(linear)})
    model(torch.ones(1, 2))
    assert calls == [nn.Linear]


def test_hooks_that_cannot_move_are_refused():
    def hooked(linear, index):
        new = fresh(linear, index)
        new.register_forward_hook(lambda m, args, out: None)
        return new

    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda m, args, out: None)
    old = model[0]
    with pytest.raises(ValueError, match="have hooks"):
        replace_modules(model, {nn.Linear: hooked})
    assert model[0] is old

    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match="replaced on the instance"):
        replace_modules(model, {nn.Linear: fresh})
    replace_modules(model, {nn.Linear: lambda linear, index: Wrapped(linear)})
    assert torch.equal(model(torch.ones(1, 2)), torch.ones(1, 2))


def test_a_ddp_model_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match="before it is wrapped"):
            replace_modules(nn.parallel.DistributedDataParallel(net()), {nn.Linear: fresh})
    finally:
        torch.distributed.destroy_process_group()


# --- update_optimizer


def test_one_group():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept = ids(model.block.parameters())
    replaced = replace_modules(model, {nn.Linear: Policy(fresh, matches=lambda m: m in (model.stem, model.head))})
    update_optimizer(optimizer, replaced)
    new = ids([*model.stem.parameters(), *model.head.parameters()])
    assert ids(optimizer.param_groups[0]["params"]) == kept + new
    assert set(ids(model.parameters())) == set(kept + new)


def test_several_groups_keep_their_settings_and_order():
    model = net()
    optimizer = torch.optim.SGD(
        [
            {"params": [*model.stem.parameters(), *model.block.parameters()], "lr": 0.1},
            {"params": model.head.parameters(), "lr": 0.2},
        ],
        lr=1.0,
    )
    lists = [group["params"] for group in optimizer.param_groups]
    relu_free = ids(model.block.parameters())
    replaced = replace_modules(model, {nn.Linear: Policy(fresh, matches=lambda m: m in (model.stem, model.head))})
    update_optimizer(optimizer, replaced)
    assert ids(lists[0]) == relu_free + ids(model.stem.parameters())
    assert ids(lists[1]) == ids(model.head.parameters())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert all(group["params"] is params for group, params in zip(optimizer.param_groups, lists, strict=True))


def test_the_repaired_optimizer_trains_what_a_new_one_would():
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update_optimizer(optimizer, replace_modules(model, {nn.Linear: lambda m, index: Wrapped(fresh(m, index))}))
    model(torch.randn(3, 4)).square().sum().backward()
    expected = [p.detach() - 0.1 * p.grad for p in model.parameters()]
    optimizer.step()
    for parameter, target in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), target)


def test_names_of_parameters_follow():
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    update_optimizer(optimizer, replace_modules(model, {SubLinear: lambda m, index: Wrapped(m)}))
    (group,) = optimizer.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    # The weight that lives on was named when the optimizer was made.
    names[id(model.block[2][0].inner.weight)] = "block.2.0.weight"
    assert group["param_names"] == [names[id(p)] for p in group["params"]]
    assert group["param_names"][-1] == "block.2.0.gain"


def test_a_parameter_that_the_model_still_uses_stays():
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 4), "head": nn.Linear(4, 3, bias=False)})
    model["head"].weight = model["embedding"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update_optimizer(optimizer, replace_modules(model, {nn.Linear: fresh}))
    assert ids(optimizer.param_groups[0]["params"]) == ids([model["embedding"].weight, model["head"].weight])


def test_a_chain_of_replacements():
    model = net()
    optimizer = torch.optim.SGD(
        [{"params": model.stem.parameters()}, {"params": [*model.block.parameters(), *model.head.parameters()]}], lr=0.1
    )
    once = replace_modules(model, {nn.Linear: fresh})
    twice = replace_modules(model, {nn.Linear: lambda m, index: Wrapped(m) if index == 0 else fresh(m, index)})
    update_optimizer(optimizer, once + twice)
    first, second = (set(ids(group["params"])) for group in optimizer.param_groups)
    assert first == set(ids(model.stem.parameters()))
    assert second == set(ids([*model.block.parameters(), *model.head.parameters()]))


def test_spread_over_groups_is_refused_and_nothing_changes():
    model = net()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])
    replaced = replace_modules(model, {nn.Linear: fresh})
    with pytest.raises(ValueError, match=r"stem: Linear -> Linear.*groups \[0, 1\] of AdamW"):
        update_optimizer(optimizer, replaced)
    assert [ids(group["params"]) for group in optimizer.param_groups] == [ids(decay), ids(rest)]


def test_new_parameters_where_there_were_none():
    model = net()
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD([{"params": model.stem.parameters()}, {"params": model.head.parameters()}], lr=0.1)
    replaced = replace_modules(model, {nn.ReLU: lambda m, index: nn.PReLU()})
    update_optimizer(one, replaced)
    assert one.param_groups[0]["params"][-1] is model.block[1].weight
    with pytest.raises(ValueError, match="could be in"):
        update_optimizer(two, replaced)


def test_what_another_optimizer_trains_is_left_to_it():
    model = net()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    before = ids(model.head.parameters())
    update_optimizer(optimizer, replace_modules(model, {nn.Linear: Policy(fresh, matches=lambda m: m is model.stem)}))
    assert ids(optimizer.param_groups[0]["params"]) == before


def test_an_optimizer_with_state_is_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    replaced = replace_modules(model, {nn.Linear: fresh})
    with pytest.raises(RuntimeError, match="AdamW already has state"):
        update_optimizer(optimizer, replaced)


def test_lbfgs_sees_the_new_parameters():
    """It keeps the list of its only group, so the list must be changed in place."""
    torch.manual_seed(0)
    model, x = net(), torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    update_optimizer(optimizer, replace_modules(model, {nn.Linear: fresh}))
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure).detach()
    assert closure().detach() < first
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_records_can_be_made_by_hand():
    old, new = nn.Linear(1, 1), nn.Identity()
    assert str(Replacement("layer1.0.conv1", old, new)) == "layer1.0.conv1: Linear -> Identity"
    assert issubclass(NoEffectWarning, UserWarning)
    optimizer = torch.optim.SGD([*old.parameters(), extra := nn.Parameter(torch.zeros(1))], lr=0.1)
    update_optimizer(optimizer, [Replacement("layer", old, new)])
    assert ids(optimizer.param_groups[0]["params"]) == [id(extra)]


class Swap(hocket.Algorithm):
    """Replaces the whole model."""

    events = {hocket.Event.INIT}

    def __init__(self, new: nn.Module) -> None:
        self.new = new

    def touches(self, model: nn.Module) -> list[str]:
        return ["everything"]

    def apply(self, event: hocket.Event, state: hocket.State) -> None:
        state.model = self.new


def trained(model: nn.Module, algorithm: hocket.Algorithm, **options: Any) -> hocket.Trainer:
    data = [(torch.ones(2, 3), torch.zeros(2, 1))]
    return hocket.Trainer(
        model=model,
        train_data=data,
        duration="1ep",
        device="cpu",
        optimizer="sgd(lr=0.1)",
        algorithms=[algorithm],
        **options,
    )


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_that_is_replaced_as_a_whole_is_the_one_that_is_trained(wrapped: bool, tmp_path: Path) -> None:
    class Own(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, 1)

        def forward(self, batch: Any) -> Any:
            return self.model(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return nn.functional.mse_loss(outputs, batch[1])

    new = nn.Linear(3, 1)
    before = new.weight.detach().clone()
    options = {} if wrapped else {"loss": nn.functional.mse_loss}
    trainer = trained(Own() if wrapped else nn.Linear(3, 1), Swap(new), folder=tmp_path, **options)
    trainer.fit()
    assert trainer.state.model is new
    assert not torch.equal(new.weight, before)
    assert [name for name, _ in trainer.state.task.named_parameters()] == [
        f"{'model' if wrapped else 'network'}.{name}" for name in ("weight", "bias")
    ]


def test_a_task_without_a_model_of_its_own_is_not_replaced(tmp_path: Path) -> None:
    class Own(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

    with pytest.raises(TypeError, match="Own is a Task and cannot be replaced as a whole"):
        trained(Own(), Swap(nn.Linear(3, 1)), folder=tmp_path)


def test_a_recast_module_is_not_compiled_for_its_former_class() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    plain = nn.Linear(3, 2)
    plain.compile(backend="eager")
    inputs = torch.randn(4, 3)
    expected = 2 * plain(inputs)
    assert torch.equal(recast(plain, Doubled)(inputs), expected)
    torch._dynamo.reset()


def test_surgery_without_effect_says_whether_it_is_applied_already():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    lacking = "it has no Conv2d. Remove Blur."
    assert why_no_effect("Blur", model, lacking, {}) == f"Blur found nothing to change in Sequential: {lacking}"
    message = why_no_effect("Blur", model, lacking, {"0": model[0], "2": model[2]})
    assert "already applied to this Sequential, in 2 modules" in message and lacking not in message
    assert "0 is Linear(in_features=2, out_features=3, bias=True)" in message and "make the model anew" in message

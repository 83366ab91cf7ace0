"""Adapters of linear and convolutional modules: what trains, what merging computes, and a resumed run."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_trainer
from torch import nn

import hocket
from hocket.errors import MissingPackage, Unsupported
from hocket.plugins import PluginConfigError
from hocket_testkit import AlgorithmConformance
from hocket_tools import Adapters, Finetuning, merge_adapters

peft = pytest.importorskip("peft")
pytest.importorskip("hocket_nlp")
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

LORA = {"r": 2, "target_modules": ["conv", "second", "hidden"], "modules_to_save": ["fc"]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.hidden = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.second(self.norm(self.conv(inputs)).relu()).mean((2, 3))
        output: torch.Tensor = self.fc(self.hidden(features).relu())
        return output


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def images() -> Any:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 3, 8, 8, generator=generator), torch.randint(10, (6,), generator=generator)) for _ in range(4)
    ]


def adapted(**changes: Any) -> hocket.Trainer:
    arguments = {
        "model": net(), "train_data": images(), "optimizer": "adamw(lr=1e-2)", "algorithms": [Adapters(dict(LORA))],
        "seed": 3, "device": "cpu", **changes,
    }  # fmt: skip
    return make_trainer(**arguments)


class TestAdapters(AlgorithmConformance):
    def make(self) -> Adapters:
        return Adapters({"r": 2, "target_modules": ["conv", "hidden"]})

    def model(self) -> nn.Module:
        model = net()
        model.norm = nn.Identity()  # type: ignore[assignment]  # so that microbatches are full batches
        return model


def test_the_adapters_and_the_head_alone_train_and_merging_computes_the_same() -> None:
    trainer = adapted()
    before = net().state_dict()
    trainer.fit()
    model = trainer.state.model
    frozen = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    for name in ("conv.weight", "second.weight", "hidden.bias", "norm.running_mean", "norm.weight"):
        assert torch.equal(frozen[name], before[name]), name
    assert all(
        ("lora_" in name or "fc.modules_to_save" in name) == each.requires_grad
        for name, each in model.named_parameters()
    )
    inputs = images()[0][0]
    expected = model.eval()(inputs)
    merged = merge_adapters(copy.deepcopy(model))
    assert merged.state_dict().keys() == before.keys()
    torch.testing.assert_close(merged(inputs), expected, rtol=1e-5, atol=1e-6)
    # LoRA by its formula (section 4.1): W + B A * alpha / r, and a head that was trained.
    lora = model.hidden
    by_hand = before["hidden.weight"] + lora.lora_B["default"].weight @ lora.lora_A["default"].weight * (8 / 2)
    torch.testing.assert_close(merged.hidden.weight, by_hand)
    assert not torch.equal(merged.fc.weight, before["fc.weight"])


def test_a_resumed_run_is_bitwise_and_its_checkpoints_hold_the_adapters_alone(tmp_path: Path) -> None:
    whole = adapted()
    whole.fit()
    first = adapted(checkpoints=hocket.Checkpoints(tmp_path, only="trainable"))
    first.fit("1ep")
    resumed = adapted(checkpoints=hocket.Checkpoints(tmp_path, only="trainable"), resume="auto")
    saved = hocket.checkpoints.read_weights(tmp_path / "latest")
    assert "conv.lora_A.default.weight" in saved and "conv.base_layer.weight" not in saved
    resumed.fit()
    expected = whole.model_state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model_state_dict().items())


def test_an_optimizer_of_the_model_gets_the_adapters() -> None:
    model = net()
    trainer = adapted(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    start = trainer.state.model.conv.lora_B["default"].weight.clone()
    trainer.fit()
    assert not torch.equal(trainer.state.model.conv.lora_B["default"].weight, start)


def test_adapters_train_in_stages() -> None:
    """The head first, the adapters later, and what is frozen beneath them never."""
    stages = [{"at": "0ep", "train": "fc.*"}, {"at": "1ep", "train": "*lora_*", "lr": 1e-3}]
    trainer = adapted(algorithms=[Adapters(dict(LORA)), Finetuning(stages)])
    trainer.fit("1ep")
    adapter = trainer.state.model.conv.lora_B["default"].weight
    assert not adapter.any()
    trainer.fit()
    assert adapter.any()
    assert torch.equal(trainer.state.model.conv.base_layer.weight, net().conv.weight)


def test_norms_update_their_statistics_if_asked() -> None:
    trainer = adapted(algorithms=[Adapters(dict(LORA), batch_norm="train")])
    trainer.fit()
    assert trainer.state.model.norm.running_mean.any()


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"r": 2}, ValueError, r"target_modules.*conv, second, hidden, fc"),
        ({"r": 2, "target_modules": ["convv"]}, ValueError, "'convv' matches nothing.*'conv'"),
        ({"target_modules": ["conv", "nope"]}, ValueError, "target_modules=.*'nope' matches nothing"),
        (
            {"target_modules": ["conv"], "modules_to_save": ["head"]},
            ValueError,
            "modules_to_save=.*'head' matches nothing",
        ),
        (
            {"target_modules": 0},
            TypeError,
            r"^target_modules=0 of peft= is int. Give a list of names: target_modules=\['0'\]",
        ),
        (
            {"target_modules": ["conv"], "rank_pattern": {"hidden": 4}},
            ValueError,
            "rank_pattern=.*'hidden' matches nothing. Give names .* such as 'conv'",
        ),
        ({"target_modules": ["conv", "hidden"], "alpha_pattern": {"hiden": 4}}, ValueError, "alpha_pattern=.*'hidden'"),
        (
            {"target_modules": ["conv"], "layers_to_transform": [3]},
            ValueError,
            "layers_to_transform=.*3 matches nothing",
        ),
        ({"target_modules": ["conv"], "r": "4"}, TypeError, "r='4' of peft= is str"),
        ({"target_modules": ["conv"], "r": 0.5}, TypeError, "r=0.5 of peft= is float"),
        ({"target_modules": ["conv"], "lora_alpha": 0}, ValueError, "lora_alpha=0 of peft= is not positive"),
        ({"rank": 2, "target_modules": ["conv"]}, TypeError, "no arguments of peft.LoraConfig"),
        (3, TypeError, "is int"),
    ],
)
def test_what_is_no_configuration(config: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        adapted(algorithms=[Adapters(config)])


def test_numbers_are_names_and_a_single_module_is_saved() -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    model = layers()
    hocket.Trainer(model=model, device="cpu", algorithms=[Adapters({"target_modules": [0], "modules_to_save": "2"})])
    trained = {name.partition(".")[0] for name, each in model.named_parameters() if each.requires_grad}
    assert hasattr(model[0], "lora_A") and trained == {"0", "2"} and merge_adapters(model)[2].weight.requires_grad
    with pytest.warns(UserWarning, match="r=9 is more than both sides of 0, 8 and 8.* Give r=4 or less"):
        hocket.Trainer(model=layers(), device="cpu", algorithms=[Adapters({"target_modules": ["0"], "r": 9})])


def test_a_model_of_peft_inside_of_another_is_merged() -> None:
    model = nn.Sequential(peft.get_peft_model(nn.Sequential(nn.Linear(4, 2)), peft.LoraConfig(target_modules=["0"])))
    nn.init.normal_(model.get_parameter("0.base_model.model.0.lora_B.default.weight"))
    inputs = torch.ones(3, 4)
    expected = model(inputs)
    merged = merge_adapters(model)
    assert merged.state_dict().keys() == {"0.0.weight", "0.0.bias"}
    torch.testing.assert_close(merged(inputs), expected)


@pytest.mark.filterwarnings("ignore:.*Merging is not supported:UserWarning")
def test_convolutions_with_groups_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3))
    with pytest.raises(ValueError, match=r"rank is divisible by groups.* These have groups: 0 \(4 groups\)\. "):
        adapted(model=copy.deepcopy(model), algorithms=[Adapters({"r": 2, "target_modules": ["0", "1"]})])
    injected = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["0", "1"]), model)
    with pytest.raises(Unsupported, match=r"does not merge .*: 0 \(4 groups\)\. Keep"):
        merge_adapters(injected)
    assert hasattr(model[1], "lora_A"), "nothing was merged"


def test_a_model_without_adapters_is_not_merged() -> None:
    with pytest.raises(ValueError, match="has no adapters"):
        merge_adapters(net())
    with pytest.raises(ValueError, match="batch_norm='no'"):
        Adapters(dict(LORA), "no")


def test_a_fit_after_a_merge_is_refused() -> None:
    trainer = adapted(duration="2ep")
    trainer.fit("1ep")
    merge_adapters(trainer.state.model)
    with pytest.raises(ValueError, match=r"were merged into the weights .* merge_adapters\(copy\.deepcopy\("):
        trainer.fit()


def test_two_configurations_of_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'adapters' twice\. A model has one .* target_modules of one"):
        adapted(algorithms=[Adapters(dict(LORA)), Adapters({"r": 2, "target_modules": ["fc"]})])


def test_a_merge_without_peft_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingPackage, match=r"peft is needed here.*Type: pip install .*peft"):
        merge_adapters(net())


def test_a_trainer_is_not_a_model_to_merge() -> None:
    with pytest.raises(TypeError, match=r"Trainer as model; .*Write model=trainer\.state\.model"):
        merge_adapters(hocket.Trainer(torch.nn.Linear(2, 2), device="cpu"))  # type: ignore[arg-type]


def test_finetuning_that_never_trains_adapters_is_refused() -> None:
    head = Finetuning([{"at": "0ep", "train": "fc.*"}])
    with pytest.raises(PluginConfigError, match=r"freezes all adapters, such as those of conv, .*'\*\.lora_\*'"):
        adapted(algorithms=[Adapters({"r": 2, "target_modules": ["conv"]}), head])


def test_finetuning_that_trains_the_weights_below_adapters_is_said() -> None:
    with pytest.warns(UserWarning, match=r"trains the weights of conv, second, hidden too.*\['\*\.lora_\*'\]"):
        adapted(algorithms=[Adapters(dict(LORA)), Finetuning([{"at": "0ep", "train": "*"}])])

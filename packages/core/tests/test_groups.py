"""Parameter groups by pattern, and optimizers of torch by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket.basics.plugin_errors import PluginConfigError
from hocket.optim.groups import make_groups
from hocket_testkit import OptimizerConformance


class TestAdamW(OptimizerConformance):
    optimizer = {"adamw": {"lr": 1e-2, "groups": [{"match": "1d", "weight_decay": 0}]}}


class TestAdafactor(OptimizerConformance):
    optimizer = "adafactor(lr=1e-2)"


class TestNAdam(OptimizerConformance):
    optimizer = "nadam(lr=1e-2)"


class TestRAdam(OptimizerConformance):
    optimizer = "radam(lr=1e-2)"


class TestAdadelta(OptimizerConformance):
    optimizer = "adadelta(lr=1.0)"


class TestRprop(OptimizerConformance):
    optimizer = "rprop(lr=1e-3, step_sizes=(1e-6, 0.01))"
    exempt = {"test_takes_groups": "Rprop has step sizes of its own: its learning rate is only the first one"}


class Transformer(nn.Module):
    """Names as in timm's: parameters of its own, an embedding, numbered blocks, a last norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4))
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(12))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs) + self.position
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def trainer(optimizer: object, model: nn.Module | None = None, **more: object) -> hocket.Trainer:
    data = [(torch.ones(2, 4), torch.ones(2, 2))] * 4
    return hocket.Trainer(
        model=model or Transformer(),
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        train_data=data,
        device="cpu",
        **more,
    )


def options_of(made: hocket.Trainer, option: str) -> dict[str, float]:
    names = {id(each): name for name, each in made.state.model.named_parameters()}
    groups = [group for each in made.state.optimizers for group in each.param_groups]
    return {names[id(each)]: group[option] for group in groups for each in group["params"]}


def test_the_first_group_that_matches_wins() -> None:
    groups = [
        {"match": ["*.bias", "*norm*"], "weight_decay": 0},
        {"match": "head.*", "lr": 0.5, "weight_decay": 0.3},
    ]
    made = trainer({"adamw": {"lr": 0.1, "weight_decay": 0.2, "groups": groups}})
    decays, rates = options_of(made, "weight_decay"), options_of(made, "lr")
    assert decays["head.bias"] == decays["norm.weight"] == 0 and decays["head.weight"] == 0.3
    assert decays["blocks.0.0.weight"] == decays["position"] == 0.2
    assert {name for name, rate in rates.items() if rate == 0.5} == {"head.weight"}
    assert set(rates) == {name for name, _ in made.state.model.named_parameters()}


def test_1d_is_biases_and_norms() -> None:
    decays = options_of(trainer("adamw(lr=0.1, groups=[{'match': '1d', 'weight_decay': 0}])"), "weight_decay")
    flat = {name for name, each in Transformer().named_parameters() if each.ndim <= 1}
    assert {name for name, decay in decays.items() if decay == 0} == flat


def test_a_bias_of_the_model_itself_matches() -> None:
    assert [len(group["params"]) for group in make_groups(nn.Linear(2, 2), [{"match": "*.bias", "lr": 1.0}])] == [1, 1]


def test_several_optimizers_have_groups_of_their_submodules() -> None:
    given = {"blocks": {"adamw": {"lr": 0.1, "groups": [{"match": "0.*", "lr": 0.7}]}}, "head": "sgd(lr=0.2)"}
    made = trainer(given)
    rates = options_of(made, "lr")
    assert rates["blocks.0.1.weight"] == 0.7 and rates["blocks.1.1.weight"] == 0.1 and rates["head.bias"] == 0.2
    assert "lr=0.7: blocks.0.0.weight, blocks.0.0.bias, blocks.0.1.weight and 1 more (28 parameters)" in str(
        made.plan()
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("adamw(lr=1e-3)", "AdamW, lr=0.001, weight_decay=0.01 (10 parameters)"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), "SGD, lr=0.1, weight_decay=0 (10 parameters)"),
        ("lbfgs", "LBFGS, lr=1 (10 parameters)"),
    ],
)
def test_the_plan_has_a_line_for_an_optimizer_of_one_group(given: object, line: str) -> None:
    assert trainer(given, nn.Linear(4, 2)).plan().run["optimizer"] == line


def test_the_plan_names_several_optimizers() -> None:
    made = trainer({"blocks": "adamw(lr=0.1)", "head": "sgd(lr=0.2)"})
    assert made.plan().run["optimizer"].split("\n")[1].strip() == "head: SGD, lr=0.2, weight_decay=0 (10 parameters)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"groups": [{"match": "*.bais", "lr": 1.0}]},
            r"'\*\.bais' matches none of the 55 parameters\. Write '\*bias\*'",
        ),
        ({"groups": [{"match": "blocks", "lr": 1.0}]}, r"Write 'blocks\.\*'"),
        ({"groups": [{"match": "*", "lr": 1.0}, {"match": "*.bias", "lr": 2.0}]}, "the first match wins"),
        ({"groups": [{"match": "*.bias", "weigth_decay": 0}]}, "Write 'weight_decay'"),
        ({"groups": [{"match": "*.bias", "lr": "1e-3"}]}, "which is text"),
        ({"groups": {"match": "*.bias", "lr": 1.0}}, "not a list of groups"),
        ({"groups": [{"lr": 1.0}]}, "does not say which parameters"),
        ({"groups": [{"match": "*.bias"}]}, "needs options besides 'match'"),
        ({"layer_decay": 1.5}, r"give a number in \(0, 1\]"),
        ({"layer_decay": "0.5"}, "not a factor per layer"),
    ],
)
def test_mistakes_are_explained(options: dict[str, object], message: str) -> None:
    with pytest.raises(PluginConfigError, match=message):
        trainer({"adamw": {"lr": 0.1, **options}})


def test_a_parameter_of_the_task_beside_the_model_is_trained() -> None:
    class Scaled(hocket.Task):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.ModuleDict({"bias": nn.Linear(4, 2)})
            self.model = self.network
            self.weight = nn.Parameter(torch.ones(1))

    made = make_groups(Scaled(), [{"match": "1d", "lr": 0.1}])
    assert sorted(len(group["params"]) for group in made) == [1, 2]


def test_plateau_is_torchs_class() -> None:
    """The rates after each evaluation are those of ReduceLROnPlateau, given the same values."""
    rates: list[float] = []
    losses: list[float] = []

    class Recorder(hocket.Callback):
        def epoch_start(self, state: hocket.State) -> None:
            rates.append(state.optimizers[0].param_groups[0]["lr"])

        def eval_after_all(self, state: hocket.State) -> None:
            losses.append(state.metrics["test/loss"])

    torch.manual_seed(0)
    data = [(torch.randn(4, 4), torch.randn(4, 2))]
    made = trainer(
        "sgd(lr=0.5)", nn.Linear(4, 2), eval_data={"test": data}, callbacks=[Recorder()],
        schedule="plateau(on='test/loss', factor=0.5, patience=1, cooldown=1)",
    )  # fmt: skip
    made.fit("20ep")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, cooldown=1)
    expected = []
    for loss in losses:
        expected.append(optimizer.param_groups[0]["lr"])
        theirs.step(loss)
    assert rates == expected and len(set(rates)) > 2


def test_a_configuration_file_gives_groups(tmp_path, monkeypatch, capsys) -> None:
    from hocket_cli import main

    (tmp_path / "layers_of_two.py").write_text(
        "import torch\nnet = lambda: torch.nn.Sequential(*[torch.nn.Linear(4, 4)] * 2)\n"
    )
    (tmp_path / "run.yaml").write_text(
        "model: layers_of_two:net\nloss: mse_loss\nduration: 1ep\ndevice: cpu\noptimizer:\n  adamw:\n    lr: 0.1\n"
        '    groups:\n      - {match: "*.bias", weight_decay: 0}\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plan", "run.yaml"]) == 0
    assert "weight_decay=0: 0.bias (4 parameters)" in capsys.readouterr().out

"""Fine-tuning in stages: bitwise a plain loop that does the same, and a resumed run bitwise an uninterrupted one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support import make_data, make_trainer
from torch import nn

import hocket
from hocket.basics.plugin_errors import PlanError, PluginConfigError
from hocket.surgery import NoEffectWarning
from hocket_cli import main
from hocket_testkit import AlgorithmConformance, run_ranks
from hocket_tools import Finetuning

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

#: Three epochs of eight batches: a stage begins with an epoch, and one within an epoch.
STAGES = [
    {"at": "0ep", "train": "fc.*", "lr": 0.03},
    {"at": "1ep", "train": ["layer2.*"], "lr": 0.01},
    {"at": "14ba", "train": "*", "freeze": "layer2.1.*", "lr_factor": 0.5},
    {"at": "2ep", "train": "layer2.*", "freeze": "layer1.*"},
]
#: The parts that train, with their base learning rates, as written by hand for the plain loop; 0.1 is the optimizer's.
BY_HAND = [
    (0, {"fc": 0.03}),
    (8, {"fc": 0.03, "layer2": 0.01}),
    (14, {"fc": 0.05, "layer2.0": 0.05, "layer1": 0.05}),
    (16, {"fc": 0.05, "layer2.0": 0.05, "layer2.1": 0.01}),
]


class TestFinetuning(AlgorithmConformance):
    def make(self) -> Finetuning:
        return Finetuning([{"at": "0ep", "train": "*10.*", "lr_factor": 0.5}, {"at": "3ba", "train": "*"}])

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, *[nn.Identity()] * 6, nn.Linear(8, 10))


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(8, 8), norm(8), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Linear(8, 8), norm(8), nn.ReLU())
        self.fc = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc(self.layer2(self.layer1(inputs)))
        return output


def net(norm: type[nn.Module] = nn.BatchNorm1d) -> Net:
    torch.manual_seed(0)
    return Net(norm)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


def constant(batch: int) -> float:
    return 1.0


def cosine(batch: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * batch / 24))


def finetuned(batch_norm: str = "eval", **changes: Any) -> hocket.Trainer:
    arguments = {
        "model": net(), "train_data": make_data(64, 8, shuffle=False), "duration": "3ep", "optimizer": momentum,
        "algorithms": [Finetuning(STAGES, batch_norm)], "device": "cpu", **changes,
    }  # fmt: skip
    return make_trainer(**arguments)


def plain(optimizer: Callable[..., Any], factor: Callable[[int], float], batch_norm: str) -> Net:
    """The same as `finetuned`: an optimizer with a group for each parameter, and every flag, mode and rate set by hand."""
    model = net()
    named = dict(model.named_parameters())
    groups = optimizer([{"params": [each]} for each in named.values()])
    for number, (inputs, targets) in enumerate([*make_data(64, 8, shuffle=False)] * 3):
        parts = [parts for begin, parts in BY_HAND if begin <= number][-1]
        model.train()
        for (name, parameter), group in zip(named.items(), groups.param_groups, strict=True):
            rates = [rate for part, rate in parts.items() if name.startswith(f"{part}.")]
            parameter.requires_grad_(bool(rates))
            group["lr"] = rates[0] * factor(number) if rates else math.nan  # which no update may use
        for part in ("layer1", "layer2.1"):
            module = model.get_submodule(f"{part}.1" if part == "layer1" else part)
            trains = any(part.startswith(each) for each in parts)
            module.train(trains or batch_norm == "train")
        groups.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        groups.step()
    return model


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize("optimizer", [momentum, adamw])
@pytest.mark.parametrize("factor", [constant, cosine])
def test_it_is_bitwise_a_plain_loop(optimizer: Any, factor: Any, batch_norm: str) -> None:
    schedule = {} if factor is constant else {"schedule": lambda clock: factor(clock.timestamp.batch)}
    trainer = finetuned(batch_norm, optimizer=optimizer, **schedule)
    trainer.fit()
    assert equal(trainer.model_state_dict(), plain(optimizer, factor, batch_norm).state_dict())
    assert all(each.requires_grad for each in trainer.state.model.parameters())  # the fit is over
    assert all(each.training for each in trainer.state.model.modules())


def checkpointed(strategy: str, batch_size: int, at: int, norm: Any = nn.BatchNorm1d, **changes: Any) -> dict[str, Any]:
    """Resume a run from its batch ``at``, and return the weights, which are those of the uninterrupted run."""
    taken: list[Any] = []

    class Take(hocket.Callback):
        def batch_checkpoint(self, state: Any) -> None:
            if state.timestamp.batch == at:
                taken.append(copy.deepcopy(whole.state_dict()))

    arguments = {"strategy": strategy, "train_data": make_data(64, batch_size, shuffle=False), **changes}
    whole = finetuned(callbacks=[Take()], **{**arguments, "model": net(norm)})
    resumed = finetuned(**{**arguments, "model": net(norm)})
    whole.fit()
    resumed.load_state_dict(taken[0])
    resumed.fit()
    expected = whole.model_state_dict()
    assert equal(resumed.model_state_dict(), expected)
    assert equal(resumed.state.model.state_dict(), whole.state.model.state_dict())
    rates = [[group["lr"] for group in each.state.optimizers[0].param_groups] for each in (whole, resumed)]
    assert rates[0] == rates[1]
    return {name: value.numpy() for name, value in expected.items()}


@pytest.mark.parametrize("at", [3, 8, 11, 14, 15, 16, 20, 24])
def test_a_resume_in_every_stage_and_at_their_borders_is_bitwise(at: int) -> None:
    checkpointed("single", 8, at, optimizer=adamw, schedule="cosine(warmup=4ba)")
    if at in (11, 15):
        checkpointed("single", 8, at, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.5))


def of_rank(rank: int, strategy: str, at: tuple[int, ...]) -> dict[str, Any]:
    for batch in at:
        checkpointed(strategy, 4, batch, optimizer=adamw)
    return checkpointed(strategy, 4, at[0], nn.LayerNorm)


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "at"), [("ddp", (5, 11, 15, 20)), ("fsdp", (11, 15))])
def test_two_ranks_end_as_one_process_and_resume_bitwise_in_every_stage(strategy: str, at: tuple[int, ...]) -> None:
    expected = finetuned(model=net(nn.LayerNorm))
    expected.fit()
    for found in run_ranks(of_rank, 2, strategy, at):
        for name, value in expected.model_state_dict().items():
            torch.testing.assert_close(torch.tensor(found[name]), value, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_was_given_some_parameters_gets_those_that_train_later() -> None:
    stages = [{"at": "0ep", "train": "fc.*", "lr": 0.1}, {"at": "1ep", "train": "layer2.*", "lr": 0.01}]
    trainers = []
    for some in (False, True):
        model = net()
        given = model.fc if some else model
        trainers.append(finetuned(model=model, optimizer=momentum(given.parameters()), algorithms=[Finetuning(stages)]))
        trainers[-1].fit()
    assert equal(*(each.model_state_dict() for each in trainers))
    held = [each for group in trainers[1].state.optimizers[0].param_groups for each in group["params"]]
    assert len(held) == 6  # without layer1, which never trains


def test_what_the_user_froze_and_put_in_eval_mode_stays_so() -> None:
    model = net()
    model.layer1[0].requires_grad_(False)
    model.layer1[1].eval()
    stages = [{"at": "0ep", "train": "fc.*"}, {"at": "1ep", "train": ["layer2.*", "layer1.1.*"]}]
    trainer = finetuned(model=model, algorithms=[Finetuning(stages)])
    trainer.fit()
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == [
        "layer1.0.weight",
        "layer1.0.bias",
    ]
    assert [name for name, each in model.named_modules() if not each.training] == ["layer1.1"]
    assert torch.equal(model.layer1[0].weight, net().layer1[0].weight)


def test_shared_weights_and_norms_without_weights_go_by_their_names() -> None:
    class Shared(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layer2[0].weight = self.layer1[0].weight
            self.layer1[1] = nn.BatchNorm1d(8, affine=False)

    torch.manual_seed(0)
    model = Shared()
    seen: list[Any] = []

    class Watch(hocket.Callback):
        def before_forward(self, state: Any) -> None:
            seen.append((model.layer1[0].weight.requires_grad, model.layer1[1].training))

    stages = [{"at": "0ep", "train": "fc.*"}, {"at": "1ep", "train": "layer2.*"}, {"at": "2ep", "train": "layer1.*"}]
    finetuned(model=model, algorithms=[Finetuning(stages)], callbacks=[Watch()]).fit()
    assert seen == [(False, False)] * 8 + [(True, False)] * 8 + [(True, True)] * 8


def test_two_fits_and_a_fit_after_an_exception_continue_the_stages() -> None:
    whole, parts, raising = finetuned(), finetuned(), finetuned(callbacks=[Raises()])
    whole.fit()
    for until in ("10ba", "5ba", None):
        parts.fit(until)
    with pytest.raises(RuntimeError, match="planted"):
        raising.fit()
    with pytest.warns(UserWarning, match="Training continues with that batch"):
        raising.fit()
    assert equal(parts.model_state_dict(), whole.model_state_dict())
    assert equal(raising.model_state_dict(), whole.model_state_dict())


class Raises(hocket.Callback):
    def __init__(self) -> None:
        self.raised = False

    def after_dataloader(self, state: Any) -> None:
        if state.timestamp.batch == 12 and not self.raised:
            self.raised = True
            raise RuntimeError("planted")


@pytest.mark.parametrize("at", ["3ep", "500ba"])
def test_a_stage_after_the_end_is_said(at: str) -> None:
    stages = [{"at": "0ep", "train": "fc.*"}, {"at": at, "train": "*"}]
    with pytest.warns(NoEffectWarning, match=f"the stage at {at} never begins, because training ends after 3ep"):
        finetuned(algorithms=[Finetuning(stages)]).fit()


def test_a_stage_without_an_effect_is_said() -> None:
    stages = [{"at": "0ep", "train": "*"}, {"at": "1ep", "train": "fc.*"}]
    with pytest.warns(NoEffectWarning, match="the stage at 1ep changes nothing"):
        finetuned(algorithms=[Finetuning(stages)])


def test_epochs_and_batches_are_in_order() -> None:
    trainer = finetuned(
        algorithms=[Finetuning([ONE, {"at": "2ep", "train": "*"}, {"at": "3ba", "train": "layer1.*", "lr": 0.1}])]
    )
    with pytest.raises(
        PluginConfigError, match=r"at 3ba would begin before the one at 2ep.* an epoch has [0-9]+ batches"
    ):
        trainer.fit()


def test_the_lines_say_what_trains(capsys: pytest.CaptureFixture[str]) -> None:
    finetuned().fit()
    lines = [line for line in capsys.readouterr().err.splitlines() if "finetuning" in line]
    assert lines == [
        "hocket: finetuning, stage 1 of 4 (from 0ep): 27 of 203 parameters train; 2 norms of frozen parts keep their running "
        "statistics.",
        "hocket: finetuning, stage 2 of 4 (from 1ep): 115 of 203 parameters train; 1 norm of a frozen part keeps its running "
        "statistics.",
        "hocket: finetuning, stage 3 of 4 (from 14ba): 187 of 203 parameters train; 1 norm of a frozen part keeps its running "
        "statistics.",
        "hocket: finetuning, stage 4 of 4 (from 2ep): 115 of 203 parameters train; 1 norm of a frozen part keeps its running "
        "statistics.",
    ]


ONE = {"at": "0ep", "train": "fc.*"}


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "is not a list of stages"),
        ("fc.*", r"a list \(each a mapping\)"),
        (["fc.*"], r"given stages\[0\]='fc\.\*'.* should be a mapping\. Write stages\[0\]={'at': '0ep', 'train'"),
        ([{"train": "fc.*"}], "has no 'at'"),
        ([{"at": "1ep", "train": "fc.*"}], "The first stage begins at 1ep.*Begin with a stage at '0ep'"),
        ([ONE, {"at": "2ep", "train": "*"}, {"at": "1ep", "train": "*"}], "at 1ep comes after the one at 2ep"),
        ([ONE, {"at": "0ep", "train": "*"}], "at 0ep comes after the one at 0ep"),
        ([{**ONE, "learning_rate": 1}], "'learning_rate', which is not one of at, train"),
        ([{**ONE, "trian": 1}], "Write 'train'"),
        ([{"at": "1", "train": "*"}], "has no unit"),
        ([ONE, {"at": "10min", "train": "*"}], "the same in every run"),
        ([ONE, {"at": "1dur", "train": "*"}], "below 1"),
        ([{"at": "0ep"}], "neither trains nor freezes"),
        ([{"at": "0ep", "train": 3}], "is no glob"),
        ([{**ONE, "lr": "1e-3"}], "give a finite number"),
        ([{**ONE, "lr": -1.0}], "give a finite number"),
        ([{**ONE, "lr_factor": 0}], "lr_factor=0: give a finite number above 0.*named by 'freeze'"),
        ([{**ONE, "lr": 1.0, "lr_factor": 2}], "Give one of lr and lr_factor"),
        ([{"at": "0ep", "freeze": "fc.*", "lr": 1.0}], "together with 'train'"),
    ],
)
def test_what_is_no_stage(stages: Any, words: str) -> None:
    with pytest.raises((PluginConfigError, TypeError), match=words):
        Finetuning(stages)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"stages": [{"at": "0ep", "train": "layer3.*"}]}, PluginConfigError, r"train='layer3\.\*'.*Write .*'layer1\.\*'"),
        ({"stages": [ONE, {"at": "1ep", "freeze": "fc.*"}]}, PluginConfigError, "From 1ep on finetuning trains nothing"),
        ({"optimizer": torch.optim.LBFGS}, ValueError, "LBFGS does not"),
        ({"optimizer": {"layer1": "sgd(lr=0.1)", "fc": "sgd(lr=0.1)"}, "stages": [{"at": "0ep", "train": "*"}]}, PlanError,
         r"trains layer2\.0\.weight and 3 more, which none of the 2 optimizers holds"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_run(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    stages = changes.pop("stages", [ONE])
    with pytest.raises(error, match=words):
        finetuned(algorithms=[Finetuning(stages)], **changes)


def test_stages_in_a_configuration_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("staged.py").write_text(
        "import torch\n\nbatches = [(torch.ones(2, 3), torch.zeros(2, 3))] * 2\n\n\ndef model():\n"
        "    torch.manual_seed(0)\n    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))\n"
    )
    Path("staged.yaml").write_text(
        "model: staged:model\nloss: mse_loss\ntrain_data: staged:batches\noptimizer: sgd(lr=0.1)\nduration: 2ep\ndevice: cpu\n"
        "algorithms: [{finetuning: {stages: [{at: 0ep, train: 1.*}, {at: 1ep, train: [1.*, 0.bias], lr: 0.01}]}}]\n"
    )
    assert main(["train", "staged.yaml", "run_name=a"]) == 0
    torch.manual_seed(0)
    before = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict()
    after = load_file("runs/a/weights.safetensors")
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"0.bias", "1.weight", "1.bias"}
    capsys.readouterr()
    example = "stages=[{at: 0ep, train: 2.*, lr: 0.1}, {at: 1ep, train: '*', lr_factor: 0.1}]"
    for arguments, words in (
        ("stages: head", f'Write "algorithms.0.finetuning.{example}"'),
        ("stages: [head.*]", f'Write "algorithms.0.finetuning.{example}"'),
        ("stages: {at: 0ep, train: 1.*}", "Write 'algorithms.0.finetuning.stages=[{at: 0ep, train: 1.*}]'"),
        ("stages: [{at: 0ep, train: 5}]", "The stage {at: 0ep, train: 5} has `train=5`"),
        ("batch_norm: keep", "it should be 'eval' or 'train'. Write algorithms.0.finetuning.batch_norm=eval."),
    ):
        assert main(["plan", "staged.yaml", f"algorithms=[{{finetuning: {{{arguments}}}}}]"]) == 2
        assert words in capsys.readouterr().err


def test_an_example_of_stages_is_given() -> None:
    with pytest.raises(
        PluginConfigError, match=r"needs stages\..*write \{'finetuning': \{'stages': \[\{'at': '0ep', 'train'"
    ):
        finetuned(algorithms=["finetuning"])


def test_two_are_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithms has 'finetuning' twice.*Put the stages of both into one list"):
        finetuned(algorithms=[Finetuning([ONE]), {"finetuning": {"stages": [ONE]}}])

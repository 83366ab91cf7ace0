"""Small capabilities of the Trainer, each against the same thing in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import make_data, make_model, make_trainer, same, sgd, weights
from torch import Tensor, nn

import hocket
from hocket.schedules import Plateau
from hocket_testkit.ranks import run_ranks

# --- where things are in a model's output


class Wrapped(nn.Module):
    """A model whose output holds more than the loss needs."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.wrap = make_model(), wrap

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        return self.wrap(self.net(inputs)) if targets is None else self.wrap(self.net(inputs), targets)


class Accuracy:
    """The fraction of correct predictions, from logits."""

    def reset(self) -> None:
        self.right, self.seen = 0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.seen += len(targets)

    def compute(self) -> float:
        return self.right / self.seen


def plain(epochs: int = 2) -> nn.Module:
    model = make_model()
    optimizer, data = sgd(model.parameters()), make_data()
    for _ in range(epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize(
    ("wrap", "outputs"),
    [
        (lambda logits: {"features": logits + 1, "logits": logits}, "logits"),
        (lambda logits: (logits + 1, logits), 1),
        (lambda logits: SimpleNamespace(logits=logits), "logits"),
        (lambda logits: [logits / 2], lambda output: output[0] * 2),
    ],
    ids=["name", "index", "attribute", "function"],
)
def test_outputs_says_what_loss_metrics_and_predictions_get(wrap: Any, outputs: Any) -> None:
    trainer = make_trainer(
        model=Wrapped(wrap), outputs=outputs, eval_data=make_data(shuffle=False), metrics={"accuracy": Accuracy()}
    )
    result = trainer.fit()
    expected = plain()
    assert same(weights(trainer), weights(expected))
    inputs, targets = make_data().dataset.tensors
    with torch.no_grad():
        logits = expected(inputs)
    assert result.metrics["eval/accuracy"] == pytest.approx((logits.argmax(1) == targets).float().mean().item())
    assert result.metrics["eval/loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), abs=1e-6)
    assert torch.allclose(torch.cat(trainer.predict(make_data(shuffle=False))), logits, atol=1e-6)


def test_outputs_of_a_model_with_its_own_loss_are_those_of_metrics() -> None:
    class Own(Wrapped):
        def forward(self, inputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:  # type: ignore[override]
            logits = self.net(inputs)
            return {"loss": F.cross_entropy(logits, labels), "scores": logits}

    data = [{"inputs": inputs, "labels": targets} for inputs, targets in make_data(shuffle=False)]
    trainer = make_trainer(
        model=Own(lambda logits: logits),
        loss=None,
        train_data=data,
        outputs="scores",
        train_metrics={"accuracy": Accuracy()},
    )
    assert 0 < trainer.fit().metrics["train/accuracy"] <= 1


def test_outputs_that_are_not_there_are_an_error_that_lists_what_is() -> None:
    with pytest.raises(KeyError, match=r"The model's output, a dict, has nothing at 'logit'; it has \['logits'\]"):
        make_trainer(model=Wrapped(lambda logits: {"logits": logits}), outputs="logit").fit()
    with pytest.raises(TypeError, match=r"Omit inputs=, targets= and outputs="):
        make_trainer(model=hocket.Task(), loss=None, outputs="logits")


# --- fractions and seeds


def test_a_limit_may_be_a_fraction_of_all_batches() -> None:
    """84 samples in batches of 4: 21 batches, of which a third is 7; 0.01 of them is one."""
    data = make_data(batch_size=4, shuffle=False)
    trainer = make_trainer(train_data=data, eval_data=data, limit_train=0.34, limit_eval=0.01, limit_predict=1.0)
    assert trainer.state.epoch_length == 7
    result = trainer.fit()
    assert result.timestamp.batch == 14
    inputs, targets = next(iter(data))
    loss = F.cross_entropy(trainer.state.model(inputs), targets).item()
    assert result.metrics["eval/loss"] == pytest.approx(loss)
    assert len(trainer.predict(data)) == 21
    seven = make_trainer(train_data=data, limit_train=7)
    seven.fit()
    assert same(weights(seven), weights(trainer))


def test_a_fraction_of_data_without_a_length_is_refused() -> None:
    with pytest.raises(hocket.data.DataError, match=r"limit_train=0.5 is a fraction.*limit_train=100"):
        make_trainer(train_data=(batch for batch in make_data()), limit_train=0.5)


def test_an_integer_of_numpy_is_a_seed() -> None:
    numpy = pytest.importorskip("numpy")
    one, other = (
        make_trainer(model=make_model(dropout=0.5), seed=seed, duration="1ep") for seed in (numpy.int64(3), 3)
    )
    one.fit()
    other.fit()
    assert same(weights(one), weights(other))
    with pytest.raises(ValueError, match="seed=-1 is not a seed"):
        hocket.Runtime(device="cpu", seed=-1)


# --- durations


def seen_batches(**options: Any) -> tuple[int, str]:
    """Train on three batches an epoch."""
    result = make_trainer(**options).fit()
    return result.timestamp.batch, result.stop_reason


def test_of_several_durations_the_first_to_be_over_ends_training() -> None:
    assert seen_batches(duration=["2ep", "4ba"]) == (4, "4ba are over")
    assert seen_batches(duration=["2ep", "7ba", "1000sp"]) == (6, "")
    assert seen_batches(duration=["50ba", "84sp", "2h"]) == (3, "84sp are over")
    batches, reason = seen_batches(duration=["100000ep", "0.2s"])
    assert 0 < batches < 300_000
    assert reason == "0.2sec are over"


def test_schedules_refer_to_the_first_duration() -> None:
    trainer = make_trainer(duration=["4ep", "6ba"], schedule="linear")
    trainer.fit()
    assert trainer.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)
    assert "4ep or 6ba, whichever is over first" in str(trainer.plan())


def test_a_fit_after_the_limit_is_told_so_and_one_with_its_own_duration_trains() -> None:
    trainer = make_trainer(duration=["10ep", "4ba"])
    trainer.fit()
    with pytest.warns(UserWarning, match=r"Training is over: 4ba are done"):
        assert trainer.fit().timestamp.batch == 4
    assert trainer.fit("3ba").timestamp.batch == 7


def test_a_limit_in_tokens_needs_tokens() -> None:
    with pytest.raises(hocket.data.DataError, match="No tokens were counted in 3 batches"):
        make_trainer(duration=["2ep", "1e9tok"]).fit()


class StopsAt(hocket.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state: hocket.State) -> None:
        if state.timestamp.batch == self.batch:
            state.request(hocket.Decision.STOP, reason="enough")


@pytest.mark.parametrize(("least", "end"), [(None, 2), ("1ba", 2), ("5ba", 5), ("2ep", 6), ("0.5dur", 6), ("100sp", 4)])
def test_requests_to_stop_take_effect_after_the_minimum(least: str | None, end: int) -> None:
    """84 samples and three batches an epoch, of four epochs; the fourth batch ends with sample 116."""
    assert seen_batches(duration="4ep", min_duration=least, callbacks=[StopsAt(2)]) == (end, "enough")


def test_early_stopping_counts_on_until_the_minimum() -> None:
    """The loss stays the same: a patience of one evaluation is over after the second epoch."""
    frozen: dict[str, Any] = {
        "optimizer": "sgd(lr=0.0)", "eval_data": make_data(shuffle=False), "duration": "10ep",
        "callbacks": [{"early-stopping": {"monitor": "eval/loss", "patience": 1}}],
    }  # fmt: skip
    assert seen_batches(**frozen)[0] == 2 * 3
    assert seen_batches(**frozen, min_duration="5ep")[0] == 5 * 3


# --- values that plug-ins log


class Logs(hocket.Callback):
    """Log one number of a script after each epoch, or in each evaluation."""

    def __init__(self, *script: float, hook: str = "epoch_end") -> None:
        self.script = iter(script)
        setattr(self, hook, self.log)

    def log(self, state: hocket.State) -> None:
        # As a tensor, and on rank 0 only, as callbacks do.
        if state.strategy.rank == 0:
            state.log({"my/score": torch.tensor(next(self.script))})


def stopped(monitor: str = "my/score", hook: str = "epoch_end", **options: Any) -> int:
    stop = {"early-stopping": {"monitor": monitor, "mode": "max", "patience": 2, "restore_best": False}}
    callbacks = [Logs(1.0, 3.0, 2.0, 2.5, 9.0, 9.0, hook=hook), stop]
    return make_trainer(duration="6ep", callbacks=callbacks, **options).fit().timestamp.epoch


@pytest.mark.parametrize("log_every", ["1ba", "1000ba"])
def test_early_stopping_reads_logged_values(log_every: str) -> None:
    """Best after the second epoch; two more pass. Whether the loggers have got the value meanwhile or not."""
    assert stopped(log_every=log_every) == 4
    evaluated: dict[str, Any] = {"eval_data": make_data(), "log_every": log_every}
    assert stopped(hook="eval_end", **evaluated) == 4
    assert stopped(**evaluated) == 4


def test_ranks_agree_on_a_value_that_rank_0_logs(tmp_path: Any) -> None:
    def rank_main(rank: int) -> int:
        return stopped(strategy="ddp", device="cpu", folder=tmp_path)

    assert run_ranks(rank_main, 2) == [4, 4]


def test_a_name_that_nobody_logs_is_said() -> None:
    with pytest.warns(UserWarning, match=r"monitors 'other', and no plug-in has logged a value of that name"):
        assert stopped("other") == 6
    with pytest.raises(ValueError, match=r"monitors 'evl/loss', but there is no evaluation set of that name"):
        stopped("evl/loss", eval_data=make_data())


@pytest.mark.filterwarnings("ignore:callback .* changed in training")
def test_checkpoints_keep_the_best_by_a_logged_value(tmp_path: Any) -> None:
    keep = hocket.Checkpoints(tmp_path / "a", every=None, keep=1, best=("my/score", "max", 2))
    trainer = make_trainer(duration="5ep", callbacks=[Logs(1.0, 3.0, 2.0, 2.5, 0.0)], checkpoints=keep)
    assert trainer.fit().checkpoints == ["ep2-ba6", "ep4-ba12", "ep5-ba15"]  # the last one is kept, too
    assert keep.store.about("ep2-ba6")["metrics"]["my/score"] == 3.0


def test_a_resumed_run_stops_where_the_uninterrupted_run_does(tmp_path: Any) -> None:
    """A value is logged in the middle of an epoch, and a checkpoint is taken before the end, where it is looked at."""

    class Middle(Logs):
        def batch_end(self, state: hocket.State) -> None:
            if state.timestamp.batch % 3 == 1:
                self.log(state)

    class Takes(hocket.Callback):
        trainer: hocket.Trainer
        state: Any = None

        def batch_checkpoint(self, state: hocket.State) -> None:
            if state.timestamp.batch == 5:  # 3.0 was logged after batch 4
                self.state = self.trainer.state_dict()

    def make(script: list[float], *more: Any) -> hocket.Trainer:
        stop = {"early-stopping": {"monitor": "my/score", "mode": "max", "patience": 2, "restore_best": False}}
        callbacks = [Middle(*script, hook="unused"), stop, *more]
        return make_trainer(duration="6ep", callbacks=callbacks, log_every="1ba")

    takes = Takes()
    whole = make([1.0, 3.0, 2.0, 2.5, 9.0, 9.0], takes)
    takes.trainer = whole
    assert whole.fit().timestamp.epoch == 4
    resumed = make([2.0, 2.5, 9.0, 9.0])
    resumed.load_state_dict(takes.state)
    assert resumed.fit().timestamp.epoch == 4


# --- learning rates that are no function of time


def rates_of(trainer: hocket.Trainer) -> list[float]:
    return [float(group["lr"]) for optimizer in trainer.state.optimizers for group in optimizer.param_groups]


class Rates(hocket.Callback):
    """The learning rate with which each batch was trained."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_train_batch(self, state: hocket.State) -> None:
        self.seen.append(float(state.optimizers[0].param_groups[0]["lr"]))


#: Losses that fall, stay, and fall again.
LOSSES = [3.0, 2.0, 2.5, 2.1, 2.2, 1.0, 1.5, 1.5, 1.5, 1.5]


class Script:
    """A metric with scripted values."""

    def __init__(self) -> None:
        self.values = iter(LOSSES)

    def reset(self) -> None:
        pass

    def update(self, outputs: Any, targets: Any) -> None:
        pass

    def compute(self) -> float:
        return next(self.values, 0.0)  # train metrics are computed at the end of the fit, too


def by_plateau(epochs: int) -> list[float]:
    """The rates of each of three batches an epoch in a plain loop."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    rates = []
    for loss in LOSSES[:epochs]:
        rates += [optimizer.param_groups[0]["lr"]] * 3
        scheduler.step(loss)
    return rates


class LogsScript(hocket.Callback):
    def __init__(self) -> None:
        self.values = iter(LOSSES)

    def epoch_end(self, state: hocket.State) -> None:
        state.log({"my/loss": next(self.values)})


@pytest.mark.parametrize("on", ["eval/score", "train/score", "my/loss"])
def test_plateau_is_torchs(on: str) -> None:
    rates = Rates()
    plateau = Plateau(on, mode="min", factor=0.5, patience=1)
    options: dict[str, Any] = {
        "eval/score": {"eval_data": make_data(), "metrics": {"score": Script()}},
        "train/score": {"train_metrics": {"score": Script()}},
        "my/loss": {"callbacks": [rates, LogsScript()]},
    }[on]
    make_trainer(**{"duration": "10ep", "schedule": plateau, "callbacks": [rates], **options}).fit()
    assert rates.seen == by_plateau(10)
    assert len(set(rates.seen)) > 2


def test_plateau_by_name_and_resumed_in_the_middle() -> None:
    class Takes(hocket.Callback):
        trainer: hocket.Trainer
        state: Any = None

        def batch_checkpoint(self, state: hocket.State) -> None:
            if state.timestamp.batch == 13:
                self.state = self.trainer.state_dict()

    def make(*callbacks: Any, script: Any) -> hocket.Trainer:
        return make_trainer(
            schedule="plateau(on='eval/score', mode='min', factor=0.5, patience=1)", eval_data=make_data(), duration="10ep",
            metrics={"score": script}, callbacks=[*callbacks],
        )  # fmt: skip

    takes, rates, rest = Takes(), Rates(), Script()
    takes.trainer = make(takes, script=Script())
    takes.trainer.fit()
    for _ in range(4):
        rest.compute()
    resumed = make(rates, script=rest)
    resumed.load_state_dict(takes.state)
    resumed.fit()
    assert rates.seen == by_plateau(10)[13:]


def test_plateau_says_what_it_misses() -> None:
    with pytest.raises(ValueError, match="pass mode='max' or mode='min'"):
        Plateau("eval/score")
    with pytest.raises(ValueError, match="a factor below"):
        Plateau("eval/loss", factor=2.0)
    with pytest.raises(ValueError, match=r"monitors 'test/loss', but there is no evaluation set"):
        make_trainer(schedule="plateau(on='test/loss')", eval_data=make_data()).fit()
    with pytest.raises(ValueError, match=r"monitors 'eval/accuracy', and evaluation measures only 'eval/loss'"):
        make_trainer(schedule="plateau(on='eval/accuracy')", eval_data=make_data()).fit()
    with pytest.raises(ValueError, match=r"monitors 'eval/acuracy', which .*does not measure. Write 'eval/accuracy'"):
        make_trainer(schedule="plateau(on='eval/acuracy', mode='max')", metrics="accuracy", eval_data=make_data()).fit()
    with pytest.warns(UserWarning, match=r"schedule='plateau' monitors 'my/loss', and no plug-in has logged"):
        make_trainer(schedule="plateau(on='my/loss')").fit()


class Timm:
    """The interface of timm's schedulers: ``step`` after each epoch, ``step_update`` after each update, both with a metric."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.calls = optimizer, list[Any]()

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.calls.append(f"epoch {epoch}")
        self._set(0.1 / (1 + epoch))

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.calls.append(num_updates)

    def _set(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)


def test_a_scheduler_of_timm_is_told_of_updates_and_epochs() -> None:
    made: list[Timm] = []
    trainer = make_trainer(schedule=lambda optimizer: made.append(Timm(optimizer)) or made[-1])
    trainer.fit()
    assert made[0].calls == [1, 2, 3, "epoch 1", 4, 5, 6, "epoch 2"]
    assert rates_of(trainer) == [pytest.approx(0.1 / 3)]
    again = make_trainer(schedule=lambda optimizer: made.append(Timm(optimizer)) or made[-1], duration="3ep")
    again.load_state_dict(trainer.state_dict())
    again.fit()
    assert made[1].calls == [1, 2, 3, "epoch 1", 4, 5, 6, "epoch 2", 7, 8, 9, "epoch 3"]


def test_timms_own_scheduler_gives_the_rates_of_a_plain_loop() -> None:
    scheduler = pytest.importorskip("timm.scheduler", reason="timm is not installed, which this is about")

    def make(optimizer: Any) -> Any:
        return scheduler.CosineLRScheduler(optimizer, t_initial=9, warmup_t=3, warmup_lr_init=1e-4, t_in_epochs=False)

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    by_hand, expected = make(optimizer), []
    for update in range(9):
        expected.append(optimizer.param_groups[0]["lr"])
        by_hand.step_update(num_updates=update + 1)
        if update % 3 == 2:
            by_hand.step(update // 3 + 1)
    rates = Rates()
    make_trainer(schedule=make, duration="3ep", callbacks=[rates]).fit()
    assert rates.seen == pytest.approx(expected)


def test_any_object_with_a_step_is_a_scheduler() -> None:
    class Halves:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5

    with pytest.warns(UserWarning, match="Halves has no state_dict and load_state_dict"):
        trainer = make_trainer(schedule=Halves, schedule_every="2ba")
    trainer.fit()
    assert rates_of(trainer) == [0.1 * 0.5**3]


# --- parameter groups that are added during a fit


class Unfreeze(hocket.Callback):
    """Train the first layer too, at another rate, from the second epoch on."""

    def epoch_start(self, state: hocket.State) -> None:
        if state.timestamp.epoch == 1:
            first = state.model[0].requires_grad_(True)
            state.optimizers[0].add_param_group({"params": list(first.parameters()), "lr": 0.01})


def frozen_model() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)
    return model


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for parameter in parameters if parameter.requires_grad], lr=0.05)


SCHEDULES: dict[str, Any] = {
    "none": None,
    "hocket": "linear",
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "plateau": Plateau("eval/loss", factor=0.5, patience=0, threshold=0.5),
}


def unfreezing(schedule: Any, *callbacks: Any, **options: Any) -> hocket.Trainer:
    return make_trainer(
        model=frozen_model(), optimizer=adam, schedule=SCHEDULES[schedule], callbacks=[Unfreeze(), *callbacks],
        duration="4ep", eval_data=make_data(shuffle=False), **options,
        **({"schedule_every": "1ba"} if schedule == "StepLR" else {}),
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["none", "LambdaLR"])
def test_an_added_group_trains_as_in_a_plain_loop(schedule: str) -> None:
    trainer = unfreezing(schedule)
    trainer.fit()
    model = frozen_model()
    optimizer, data = adam(model.parameters()), make_data()
    for epoch in range(4):
        if epoch == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        for number, (inputs, targets) in enumerate(data):
            if schedule == "LambdaLR":
                for base, group in zip((0.05, 0.01), optimizer.param_groups, strict=False):
                    # The added group keeps its rate until the scheduler's next step.
                    added_now = base == 0.01 and (epoch, number) == (1, 0)
                    group["lr"] = base if added_now else base * 0.9 ** (3 * epoch + number)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(trainer), weights(model), strict=True))
    assert not torch.equal(model[0].weight, make_model()[0].weight)


class TakesAt(hocket.Callback):
    trainer: hocket.Trainer
    state: Any = None

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_checkpoint(self, state: hocket.State) -> None:
        if state.timestamp.batch == self.batch:
            self.state = copy.deepcopy(self.trainer.state_dict())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_run_with_an_added_group_resumes_bitwise(schedule: str, batch: int) -> None:
    """From before the group was added, and from after."""
    takes = TakesAt(batch)
    whole = unfreezing(schedule, takes)
    takes.trainer = whole
    whole.fit()
    resumed = unfreezing(schedule)
    resumed.load_state_dict(takes.state)
    resumed.fit()
    assert same(weights(resumed), weights(whole))
    assert rates_of(resumed) == rates_of(whole)


def test_an_added_group_is_loaded_from_files_on_two_ranks(tmp_path: Any) -> None:
    def rank_main(rank: int) -> Any:
        options: dict[str, Any] = {"strategy": "ddp", "device": "cpu", "seed": 1}
        whole = unfreezing("hocket", folder=tmp_path / "whole", **options)
        whole.fit()
        checkpoints = [hocket.Checkpoints(tmp_path / "a", every="1ba", keep=None) for _ in range(2)]
        first = unfreezing("hocket", StopsAt(4), folder=tmp_path / "a", checkpoints=checkpoints[0], **options)
        first.fit()
        resumed = unfreezing("hocket", folder=tmp_path / "a", checkpoints=checkpoints[1], resume="auto", **options)
        resumed.fit()
        assert same(weights(resumed), weights(whole))
        return resumed.state.timestamp.batch

    assert run_ranks(rank_main, 2) == [8, 8]  # two global batches an epoch


def test_a_group_of_another_model_is_refused() -> None:
    takes = TakesAt(5)
    takes.trainer = unfreezing("none", takes)
    takes.trainer.fit()
    other = make_trainer(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    with pytest.raises(
        hocket.checkpoints.ContentError, match=r"has groups of \[2, 2\] parameters, and the Trainer's has \[4\]"
    ):
        other.load_state_dict(takes.state)


# --- checkpoints of adapters


class Adapted(nn.Module):
    """A frozen network with a buffer, and an adapter beside its first layer."""

    def __init__(self, base: int = 0) -> None:
        super().__init__()
        self.base = make_model().requires_grad_(False)
        self.norm = nn.BatchNorm1d(8, affine=False)
        if base:
            nn.init.normal_(self.base[0].weight, generator=torch.Generator().manual_seed(base))
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)
        for layer in (self.down, self.up):
            nn.init.normal_(layer.weight, std=0.1, generator=torch.Generator().manual_seed(3))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.norm(inputs)
        return self.base(inputs) + self.up(self.down(inputs))


def adapted(folder: Any, *callbacks: Any, base: int = 0, **options: Any) -> hocket.Trainer:
    where = hocket.Checkpoints(folder, every="1ba", keep=None, only="trainable", **options.pop("policy", {}))
    return make_trainer(
        model=Adapted(base), optimizer=adam, checkpoints=where, resume="auto", callbacks=[*callbacks], seed=2,
        folder=folder.parent / "runs", **options,
    )  # fmt: skip


class Crashes(hocket.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: hocket.State) -> None:
        if state.timestamp.batch == self.batch:
            raise ZeroDivisionError


def crash(trainer: hocket.Trainer) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer.fit()


def test_checkpoints_hold_the_trainable_weights_and_resume_over_the_model_as_constructed(
    tmp_path: Any, capsys: Any
) -> None:
    whole = adapted(tmp_path / "whole")
    whole.fit()
    crash(adapted(tmp_path / "a", Crashes(4)))
    said = capsys.readouterr().err
    assert "omit 4 frozen weights of 195 parameters, and hold the other 5 tensors of the model" in said
    held = hocket.checkpoints.read_weights(tmp_path / "a" / "ep1-ba4")
    assert set(held) == {
        "down.weight",
        "up.weight",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    about = hocket.checkpoints.Store(tmp_path / "a").about("ep1-ba4")
    assert len(about["omitted"]) == 4
    resumed = adapted(tmp_path / "a")
    assert resumed.state.timestamp.batch == 4
    resumed.fit()
    assert same(weights(resumed), weights(whole))
    plain = make_trainer(model=Adapted(), optimizer=adam, seed=2)
    plain.fit()
    assert same(weights(plain), weights(whole))


def test_other_frozen_weights_than_those_trained_with_are_refused(tmp_path: Any) -> None:
    adapted(tmp_path / "a").fit()
    with pytest.raises(hocket.checkpoints.ContentError, match=r"other values of the frozen weights .*base.0.weight"):
        adapted(tmp_path / "a", base=5)


def test_trainable_weights_are_evaluated_over_the_model_as_constructed(tmp_path: Any) -> None:
    trained = adapted(tmp_path / "a")
    name = trained.fit().checkpoints[-1]
    expected = trained.evaluate({"all": make_data()})
    fresh = make_trainer(model=Adapted(), optimizer=adam)
    before, values = weights(fresh), fresh.evaluate({"all": make_data()})
    assert values != expected
    assert fresh.evaluate({"all": make_data()}, checkpoint=tmp_path / "a" / name) == expected
    assert same(weights(fresh), before)
    other = make_trainer(model=Adapted(base=5), optimizer=adam)
    with pytest.raises(
        hocket.checkpoints.CheckpointError, match=r"evaluated\. .*other values of the frozen weights .*base"
    ):
        other.evaluate({"all": make_data()}, checkpoint=tmp_path / "a" / name)


def test_what_was_trained_and_then_frozen_is_saved(tmp_path: Any) -> None:
    class Freeze(hocket.Callback):
        def epoch_end(self, state: hocket.State) -> None:
            state.model.down.requires_grad_(False)

    whole = adapted(tmp_path / "whole", Freeze(), duration="4ep")
    whole.fit()
    crash(adapted(tmp_path / "a", Freeze(), Crashes(7), duration="4ep"))
    crash(adapted(tmp_path / "a", Freeze(), Crashes(10), duration="4ep"))  # and saved again by a resumed run
    assert "down.weight" in hocket.checkpoints.read_weights(tmp_path / "a" / "ep3-ba10")
    last = adapted(tmp_path / "a", Freeze(), duration="4ep")
    last.fit()
    assert same(weights(last), weights(whole))


def test_weights_only_of_an_adapter(tmp_path: Any) -> None:
    trainer = make_trainer(
        model=Adapted(), optimizer=adam, checkpoints=hocket.Checkpoints(tmp_path, weights_only=True, only="trainable")
    )
    name = trainer.fit().checkpoints[-1]
    held = hocket.checkpoints.read_weights(tmp_path / name)
    assert "down.weight" in held and "base.0.weight" not in held
    other = make_trainer(model=Adapted(), optimizer=adam)
    assert set(other.load_weights(tmp_path / name, strict=False).missing) == {f"base.{at}" for at in BASE}
    assert same(weights(other), weights(trainer))


BASE = ("0.weight", "0.bias", "3.weight", "3.bias")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_trainable_weights_of_two_ranks(strategy: str, tmp_path: Any) -> None:
    def rank_main(rank: int) -> Any:
        options: dict[str, Any] = {"strategy": strategy, "device": "cpu"}
        whole = adapted(tmp_path / "whole", **options)
        whole.fit()
        crash(adapted(tmp_path / "a", Crashes(3), **options))
        resumed = adapted(tmp_path / "a", **options)
        batch = resumed.state.timestamp.batch
        resumed.fit()
        assert same(weights(resumed), weights(whole))
        return batch

    assert run_ranks(rank_main, 2) == [3, 3]
    assert not any("base" in name for name in hocket.checkpoints.read_weights(tmp_path / "a" / "ep1-ba3"))

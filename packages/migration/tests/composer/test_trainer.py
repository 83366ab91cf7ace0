"""The Trainer's arguments and methods by Composer's names. None of these tests needs mosaicml."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchmetrics")
pytest.importorskip("hocket_general")
pytest.importorskip("hocket_vision")

import hocket
import hocket.plugins
from hocket_migration.composer import (
    Algorithm,
    Callback,
    ComposerModel,
    ComposerTask,
    DataSpec,
    Evaluator,
    Event,
    Time,
    Timestamp,
    Trainer,
    algorithms,
    callbacks,
    functional,
    loggers,
    optim,
)
from hocket_migration.composer.models import ComposerClassifier


def data(samples: int = 24, batch: int = 8) -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(samples, 6, generator=generator), torch.randint(0, 4, (samples,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=batch)


def model() -> ComposerClassifier:
    torch.manual_seed(1)
    return ComposerClassifier(
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)), num_classes=4
    )


def trainer(net: Any = None, **given: Any) -> Trainer:
    net = model() if net is None else net
    defaults: dict[str, Any] = {
        "train_dataloader": data(), "max_duration": "2ep", "progress_bar": False, "device": "cpu", "seed": 1,
        "optimizers": optim.DecoupledSGDW(net.parameters(), lr=0.1, momentum=0.9),
    }  # fmt: skip
    return Trainer(model=net, **{**defaults, **given})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in made.state.model.state_dict().items()}


def equal(first: Any, second: Any) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first) and first.keys() == second.keys()


# --- events, callbacks, algorithms and loggers with Composer's interface


def test_events_come_in_composers_order() -> None:
    class Record(Callback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def run_event(self, event: Event, state: Any, logger: Any) -> None:
            self.seen.append(f"{event.value}@{state.timestamp.batch.value}")

    record = Record()
    trainer(
        callbacks=record, max_duration="1ep", train_dataloader=data(8, 4), eval_dataloader=data(4, 4),
        device_train_microbatch_size=2,
    ).fit()  # fmt: skip
    micro = ["before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"]

    def batch(number: int) -> list[str]:
        before = [
            "before_dataloader",
            "after_dataloader",
            "batch_start",
            "before_train_batch",
            *micro,
            *micro,
            "after_train_batch",
        ]
        return [f"{each}@{number}" for each in before] + [
            f"{each}@{number + 1}" for each in ("batch_end", "batch_checkpoint")
        ]

    # As mosaicml 0.32.1 has them, up to the end of the fit, except that evaluations come before fit_end, not after it.
    assert record.seen[:3] == ["init@0", "before_load@0", "after_load@0"]
    assert record.seen[3:] == [
        "fit_start@0", "iteration_start@0", "epoch_start@0", *batch(0), *batch(1), "before_dataloader@2", "epoch_end@2",
        "eval_before_all@2", "eval_start@2", "eval_batch_start@2", "eval_before_forward@2", "eval_after_forward@2",
        "eval_batch_end@2", "eval_end@2", "eval_after_all@2", "epoch_checkpoint@2", "fit_end@2",
    ]  # fmt: skip


def test_callback_with_state_continues(folder: Path) -> None:
    class Count(Callback):
        def __init__(self) -> None:
            self.batches = 0

        def batch_end(self, state: Any, logger: Any) -> None:
            self.batches += 1
            logger.log_metrics({"count": self.batches})
            if self.batches == 4:
                state.stop_training()

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batches = state["batches"]

    first = trainer(callbacks=[Count()], save_folder="saved", save_filename="{batch}.pt")
    first.fit()
    assert first.state.timestamp.batch == 4
    count = Count()
    second = trainer(callbacks=[count], load_path="saved/4.pt")
    second.fit()
    assert count.batches == 6 and second.state.timestamp == "6ba"


def test_algorithm_replaces_modules_and_the_optimizer_follows() -> None:
    from hocket_migration.composer.utils import module_surgery

    class Widen(Algorithm):
        def match(self, event: Event, state: Any) -> bool:
            return event == Event.INIT

        def apply(self, event: Event, state: Any, logger: Any) -> None:
            def double(old: torch.nn.Linear, index: int) -> torch.nn.Module | None:
                return torch.nn.Linear(old.in_features, old.out_features) if index else None

            replaced = module_surgery.replace_module_classes(state.model, {torch.nn.Linear: double}, state.optimizers)
            logger.log_hyperparameters({"replaced": len(replaced)})

    memory = loggers.InMemoryLogger()
    made = trainer(algorithms=[Widen()], loggers=[memory])
    before = weights(made)
    made.fit()
    assert memory.hyperparameters["replaced"] == 1
    assert not equal(before, weights(made))
    held = {id(parameter) for group in made.state.optimizers[0].param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in made.state.model.parameters()}


def test_loggers_get_composers_names() -> None:
    class Names(loggers.LoggerDestination):
        def __init__(self) -> None:
            self.seen: dict[str, list[int]] = {}

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            for name in metrics:
                self.seen.setdefault(name, []).append(step or 0)

    names = Names()
    trainer(loggers=[names], eval_dataloader=Evaluator(label="held-out", dataloader=data())).fit()
    assert names.seen["loss/train/total"] == [0, 1, 2, 3, 4, 5]
    assert names.seen["metrics/held-out/MulticlassAccuracy"] == [3, 6]
    assert names.seen["metrics/train/MulticlassAccuracy"] == [3, 6]


def test_values_are_at_the_positions_of_composer() -> None:
    events = (Event.AFTER_DATALOADER, Event.AFTER_LOSS, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END)

    class Log(Algorithm):
        def match(self, event: Event, state: Any) -> bool:
            return event in events

        def apply(self, event: Event, state: Any, logger: Any) -> None:
            logger.log_metrics({f"own/{event.value}": state.timestamp.batch.value})

    first, second = loggers.InMemoryLogger(), loggers.InMemoryLogger()
    trainer(algorithms=[Log()], loggers=[first, second]).fit()
    for each in first, second:
        for event in events:
            series = each.get_timeseries(f"own/{event.value}")
            assert series["batch"].tolist() == series[f"own/{event.value}"].tolist() != []
        assert each.get_timeseries("loss/train/total")["batch"].tolist() == [0, 1, 2, 3, 4, 5]
        assert each.get_timeseries("loss/train/total")["epoch"].tolist() == [0, 0, 0, 1, 1, 1]


def test_user_functions_decide_when_to_evaluate_and_save() -> None:
    made = trainer(
        eval_dataloader=data(), eval_interval=lambda state, event: event == Event.BATCH_END and state.timestamp.batch == 2,
        save_folder="saved", save_interval=lambda state, event: state.timestamp.batch == 5, save_filename="{batch}.pt",
        max_duration="5ba", loggers=[memory := loggers.InMemoryLogger()],
    )  # fmt: skip
    made.fit()
    evaluated = memory.get_timeseries("metrics/eval/MulticlassAccuracy")["batch"].tolist()
    assert evaluated[0] == 2 and Path("saved/5.pt").exists() and not Path("saved/2.pt").exists()


# --- data


def test_data_spec_transforms_counts_and_splits() -> None:
    sizes: list[int] = []

    class Sizes(Callback):
        def before_forward(self, state: Any, logger: Any) -> None:
            sizes.append(len(state.batch[1]))
            assert state.batch[0].max() <= 3.0

    spec = DataSpec(
        data(),
        batch_transforms=lambda batch: (batch[0].clamp(-1, 1), batch[1]),
        microbatch_transforms=lambda batch: (batch[0] * 3, batch[1]),
        split_batch=lambda batch, size: [tuple(part[i::2] for part in batch) for i in range(2)],
        get_num_samples_in_batch=lambda batch: len(batch[1]),
        get_num_tokens_in_batch=lambda batch: {"total": 10},
    )
    made = trainer(train_dataloader=spec, device_train_microbatch_size=4, callbacks=[Sizes()], max_duration="1ep")
    made.fit()
    assert sizes == [4] * 6 and made.state.timestamp.token == 30 and made.state.timestamp.sample == 24


def test_predict_returns_the_outputs_of_each_batch() -> None:
    made = trainer()
    outputs = made.predict(data(), subset_num_batches=2)
    assert [tuple(each.shape) for each in outputs] == [(8, 4), (8, 4)]
    assert torch.equal(outputs[0], made.state.model.eval()(next(iter(data()))).detach())


def test_eval_of_given_sets_leaves_the_trainers() -> None:
    made = trainer(eval_dataloader=data())
    made.fit()
    before = made.state.eval_metric_values["MulticlassAccuracy"]
    made.eval(Evaluator(label="other", dataloader=data(8), metric_names=["accuracy"]))
    assert set(made.state.eval_metrics["other"]) == {"MulticlassAccuracy"}
    assert [each.label for each in made.state.evaluators] == ["eval"]
    made.eval()
    assert made.state.eval_metrics["eval"]["MulticlassAccuracy"].compute() == pytest.approx(before)


# --- runs


def test_a_fit_may_be_continued_for_a_duration() -> None:
    once = trainer(max_duration="4ep")
    once.fit()
    made = trainer(max_duration=None)
    made.fit(duration="3ep")
    made.fit(duration=1)
    assert made.state.timestamp.epoch == 4 and equal(weights(once), weights(made))
    with pytest.raises(ValueError, match=r"Training is over: 4ep are done\. Write fit"):
        once.fit()


def test_autoresume_continues_the_latest_checkpoint() -> None:
    def run(duration: str) -> Trainer:
        made = trainer(
            max_duration=duration, save_folder="{run_name}/checkpoints", run_name="a", autoresume=True,
            schedulers=optim.LinearScheduler(t_max="6ba"),
        )  # fmt: skip
        made.fit()
        return made

    run("4ba")
    continued = run("6ba")
    alone = trainer(max_duration="6ba", schedulers=optim.LinearScheduler(t_max="6ba"))
    alone.fit()
    assert equal(weights(continued), weights(alone))
    assert Path("a/checkpoints/latest-rank0.pt").resolve().name == "ep2-ba6"
    assert continued.saved_checkpoints == ["a/checkpoints/ep2-ba6-rank0.pt"]


def test_saved_file_continues_and_gives_weights() -> None:
    first = trainer(max_duration="4ba")
    first.fit()
    path = first.save_checkpoint("kept/{batch}.pt")
    assert equal(torch.load(path, weights_only=True)["state"]["model"], weights(first))
    whole = trainer(max_duration="6ba")
    whole.fit()
    second = trainer(max_duration="6ba", load_path=path)
    assert second.state.timestamp.batch == 4
    second.fit()
    assert equal(weights(second), weights(whole))
    other = trainer(load_path=path, load_weights_only=True)
    assert other.state.timestamp.batch == 0 and equal(weights(other), weights(first))


def test_weights_of_a_folder_alone() -> None:
    first = trainer(max_duration="3ba", save_folder="saved", save_num_checkpoints_to_keep=1, save_interval="1ba")
    first.fit()
    assert first.saved_checkpoints == ["saved/ep0-ba3-rank0.pt"] and not Path("saved/ep0-ba2-rank0.pt").is_symlink()
    other = trainer(load_path="saved/latest-rank{rank}.pt", load_weights_only=True)
    assert other.state.timestamp.batch == 0 and equal(weights(other), weights(first))


def test_hockets_arguments_on_top() -> None:
    made = trainer(hocket={"clip_gradients": 0.1, "algorithms": ["ema"], "log_every": "2ba"})
    made.fit()
    assert made.hocket.settings.clip_gradients == ("norm", 0.1)
    assert "ema" in str(made.hocket.plan())


def test_task_in_hockets_own_trainer() -> None:
    net = model()
    result = hocket.Trainer(
        ComposerTask(net), data(), eval_data=data(), optimizer="sgd(lr=0.1)", duration="1ep", device="cpu"
    ).fit()
    assert set(result.metrics) >= {"eval/CrossEntropy", "eval/MulticlassAccuracy"}


def test_model_gets_the_logger_and_stays_picklable() -> None:
    import copy

    made = trainer()
    assert made.state.model.logger is made.logger
    assert equal(copy.deepcopy(made.state.model).state_dict(), weights(made))


# --- by names


@pytest.mark.parametrize("name", [each for each in vars(algorithms) if each[0].isupper()])
def test_every_algorithm_is_there(name: str) -> None:
    if name in ("Any", "Callable", "Event", "Time", "WrongValue"):
        return
    make = getattr(algorithms, name)
    needed = {
        "Alibi": {"max_sequence_length": 8},
        "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
    }
    if isinstance(make, type):
        with pytest.raises(NotImplementedError, match=rf"hocket has no counterpart of Composer's {name}\."):
            make()
        return
    if name in ("Alibi", "GatedLinearUnits", "SeqLengthWarmup"):
        pytest.importorskip("hocket_nlp")
    assert isinstance(make(**needed.get(name, {})), hocket.Algorithm)


def test_callbacks_and_loggers_run() -> None:
    made = trainer(
        eval_dataloader=data(), max_duration="6ep",
        callbacks=[
            callbacks.LRMonitor(), callbacks.SpeedMonitor(window_size=5), callbacks.MemoryMonitor(), callbacks.NaNMonitor(),
            callbacks.RuntimeEstimator(), callbacks.OptimizerMonitor(batch_log_interval=3), callbacks.ActivationMonitor("2ba"),
            callbacks.EarlyStopper("MulticlassAccuracy", "eval", patience=1, min_delta=1.0),
        ],
        loggers=[loggers.FileLogger()], progress_bar=True, log_to_console=True, console_stream="stdout",
    )  # fmt: skip
    made.fit()
    assert (
        made.state.timestamp.epoch == 3
    )  # as mosaicml 0.32.1: the best epoch is the first, and more than one has passed
    assert {"lr", "gradient"} & {name.partition("/")[0] for name in made.hocket.result().history}


def test_functional_forms_change_the_model_in_place() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, stride=2), torch.nn.BatchNorm2d(16))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    functional.apply_blurpool(net, optimizers=optimizer)
    functional.apply_ghost_batchnorm(net, ghost_batch_size=2, optimizers=[optimizer])
    assert type(net[0]).__name__ == "BlurConv2d" and "Ghost" in type(net[1]).__name__
    assert len(optimizer.param_groups[0]["params"]) == 4
    with pytest.raises(NotImplementedError, match=r"Write hocket_vision.functional.cutmix"):
        functional.cutmix_batch(torch.ones(2), torch.ones(2))
    with pytest.raises(
        AttributeError, match=r"no attribute 'apply_sam'; it has apply_alibi, .*cutmix_batch, .*smooth_labels"
    ):
        _ = functional.apply_sam


def test_times() -> None:
    ten = Time(10, "ba")
    assert (
        ten + 5 == "15ba"
        and ten * 0.55 == 5
        and (ten / "40ba").value == 0.25
        and str(Time.from_timestring("3e2sp")) == "300sp"
    )
    assert Time.from_timestring("0.5dur") * ten == "5ba" and ten % 3 == 1 and 12 - ten == 2 and int(ten) == 10
    assert Time.from_timestring("1h30m") == Time(5400, "sec") and Time.from_input(3, "ep") == Time(3, "ep")
    with pytest.raises(RuntimeError, match="10ba and 1ep have different units"):
        _ = ten < "1ep"
    with pytest.raises(TypeError, match="whole number"):
        Time.from_timestring("1.5ep")
    with pytest.raises(ValueError, match="has no unit"):
        Time.from_timestring("5")


def test_timestamps_advance() -> None:
    now = Timestamp(epoch=1, batch=Time(3, "ba"), batch_in_epoch=1, epoch_wct=datetime.timedelta(seconds=2))
    after = now.to_next_batch(samples=8, tokens=Time(4, "tok"), duration=datetime.timedelta(seconds=1))
    assert after == Timestamp(
        epoch=1, batch=4, batch_in_epoch=2, sample=8, sample_in_epoch=8, token=4, token_in_epoch=4,
        total_wct=datetime.timedelta(seconds=1), epoch_wct=datetime.timedelta(seconds=3),
        batch_wct=datetime.timedelta(seconds=1),
    )  # fmt: skip
    over = after.to_next_epoch()
    assert over.epoch == 2 and over.batch == 4 and over.batch_in_epoch == 0 and now.batch == 3
    assert over.copy(batch=9).batch == 9 and over.batch == 4
    with pytest.raises(TypeError, match=r"has no iterations=\. It has epoch, batch"):
        Timestamp(iterations=1)


# --- mistakes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"grad_clip_norm": 1.0}, r"no argument grad_clip_norm=. Write algorithms=\[GradientClipping"),
        ({"max_epochs": 3}, r"no argument max_epochs="),
        ({"clip_gradients": 1.0}, r"Write hocket=\{'clip_gradients'"),
        ({"hocket": {"epochs": 3}}, r"hocket=\{'epochs': …\}: hocket.Trainer has no such argument"),
        ({"max_duration": "10iter"}, "is not a duration"),
        ({"max_duration": "ten"}, "is not a time"),
        ({"precision": "fp8"}, "not one of Composer's: fp32, amp_fp16"),
        ({"device": "quantum"}, "is not one of 'gpu'"),
        ({"device_train_microbatch_size": 0.5}, "no fractions of a sample"),
        ({"scale_schedule_ratio": 0.5}, "scales schedulers, and there are none"),
        ({"save_num_checkpoints_to_keep": 0, "save_folder": "a"}, "keeps none"),
        ({"autoresume": True}, "needs save_folder= and run_name="),
        ({"load_path": "missing.pt"}, "does not exist"),
        ({"eval_dataloader": [Evaluator(label="a", dataloader=[1]), [2]]}, "mixes Evaluators"),
        ({"optimizers": "adam"}, "is not an optimizer"),
        ({"spin_dataloaders": False}, "spin_dataloaders=False, which hocket has no counterpart of"),
        ({"accumulate_train_batch_on_tokens": True}, "weights means by it"),
        ({"parallelism_config": {"tp": {}}}, "tensor-parallel"),
        ({"device_train_microbatch_size": "big"}, "device_train_microbatch_size='big' is not a number of samples"),
        ({"device_train_microbatch_size": 0}, "device_train_microbatch_size=0 is not a number of samples"),
        ({"schedulers": "cosine"}, r"schedulers='cosine' is not a scheduler\. Write one of composer\.optim"),
        ({"train_subset_num_batches": 0}, "train_subset_num_batches=0 is not a number of batches"),
        ({"train_dataloader": 5}, r"write train_dataloader=torch\.utils"),
        ({"deterministic_mode": "yes"}, "Write deterministic_mode=True"),
        ({"max_duration": "0ep"}, "has to be more than 0"),
        ({"python_log_level": "loud"}, "Unknown level"),
        ({"parallelism_config": {"fsdp": {"sharding": "x"}}}, "'sharding': 'x'}} has no counterpart"),
        ({"parallelism_config": {"fsdp": {"mixed_precision": "PURE"}}}, "'mixed_precision': 'PURE'"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=said):
        trainer(**given)


def test_errors_of_a_fit_have_composers_names() -> None:
    with pytest.raises(ValueError, match=r"Pass max_duration='10ep' to the Trainer, or fit\(duration='10ep'\)\."):
        trainer(max_duration=None).fit()
    with pytest.raises(ValueError, match=r"Pass train_dataloader= to the Trainer or to fit\.$"):
        trainer(train_dataloader=None).fit()
    with pytest.raises(ValueError, match=r"Pass eval_dataloader= to eval\(\) or to the Trainer\.$"):
        trainer().eval()
    with pytest.raises(ValueError, match=r"device_train_microbatch_size='big'"):
        trainer().fit(device_train_microbatch_size="big")
    trainer(save_folder="saved").fit()
    with pytest.raises(RuntimeError, match=r"pass autoresume=True; .* to replace them, save_overwrite=True\."):
        trainer(save_folder="saved").fit()
    nan = [(torch.full((8, 6), float("nan")), torch.zeros(8, dtype=torch.long))]
    with pytest.raises(FloatingPointError, match=r"or hocket=\{'nonfinite': 'warn'\}\."):
        trainer(train_dataloader=nan).fit()


def test_errors_of_the_project_stay_as_they_are() -> None:
    class Failing(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            raise ValueError("duration=5 and resume='auto'")

    with pytest.raises(ValueError, match=r"^duration=5 and resume='auto'"):
        trainer(callbacks=[Failing()], python_log_level="debug").fit()


def test_models_that_are_none() -> None:
    with pytest.raises(TypeError, match=r"Linear has no loss\(…\), which a ComposerModel has. Wrap a module"):
        trainer(torch.nn.Linear(6, 4))

    class Unfinished(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(6, 4)

    with pytest.raises(NotImplementedError, match=r"Unfinished needs a forward\(batch\)"):
        trainer(Unfinished()).fit()


def test_checkpoint_of_another_optimizer_is_refused() -> None:
    net = model()
    adam = torch.optim.Adam(net.parameters())
    state = {"timestamp": {"Timestamp": {}}, "model": net.state_dict(), "optimizers": {"DecoupledSGDW": {}}}
    torch.save({"state": state}, "other.pt")
    with pytest.raises(ValueError, match="has the state of DecoupledSGDW, and the optimizer is Adam"):
        trainer(net, optimizers=adam, load_path="other.pt")


def test_without_torchmetrics_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"(ComposerClassifier|composer\.metrics) needs the package torchmetrics\. Type: pip install torchmetrics",
    ):
        model()


def test_without_hockets_algorithms_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "hocket_vision"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "hocket_vision", None)
    for call in (algorithms.BlurPool, lambda: functional.apply_blurpool(model())):
        with pytest.raises(hocket.plugins.PluginError, match=r"pip install (-e )?\S+/algorithms-vision"):
            call()


def test_importing_imports_no_plugins() -> None:
    heavy = ("torch", "hocket_general", "hocket_vision", "torchmetrics", "composer")
    program = f"import sys, hocket_migration.composer; print([each for each in {heavy} if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr

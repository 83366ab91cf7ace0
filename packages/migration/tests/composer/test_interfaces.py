"""What projects of Composer's read and call besides the Trainer: the state, times, devices and utilities."""

from __future__ import annotations

import datetime
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchmetrics")
pytest.importorskip("hocket_general")

import hocket
from hocket_migration.composer import (
    Callback,
    Evaluator,
    Event,
    Time,
    Timestamp,
    Trainer,
    algorithms,
    callbacks,
    functional,
)
from hocket_migration.composer.core import MemoryFormat, get_precision_context
from hocket_migration.composer.devices import DeviceCPU
from hocket_migration.composer.loggers import ConsoleLogger, InMemoryLogger
from hocket_migration.composer.message_terms import translated
from hocket_migration.composer.models import ComposerClassifier
from hocket_migration.composer.optim import LinearScheduler, compile_composer_scheduler
from hocket_migration.composer.utils import (
    FSDPConfig,
    ParallelismConfig,
    create_interval_scheduler,
    format_name_with_dist,
    get_device,
    get_file,
    map_collection,
    module_surgery,
    reproducibility,
)

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data() -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(24, 6, generator=generator), torch.randint(0, 4, (24,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=8)


def trainer(**given: Any) -> Trainer:
    torch.manual_seed(1)
    net = ComposerClassifier(torch.nn.Linear(6, 4), num_classes=4)
    defaults: dict[str, Any] = {
        "train_dataloader": data(), "max_duration": "2ep", "progress_bar": False, "device": "cpu", "seed": 1,
        "optimizers": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), "schedulers": LinearScheduler(),
    }  # fmt: skip
    return Trainer(model=net, **{**defaults, **given})


def test_a_saved_state_continues() -> None:
    first = trainer(max_duration="6ba")
    first.fit()

    class Save(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            if state.timestamp.batch == "4ba":
                torch.save({"state": state.state_dict()}, "state.pt")

    trainer(max_duration="6ba", callbacks=[Save()]).fit()
    second = trainer(max_duration="6ba", load_path="state.pt")
    assert second.state.timestamp.batch == 4
    assert second.state.schedulers[0].get_last_lr() == [second.state.optimizers[0].param_groups[0]["lr"]]
    second.fit()
    for name, value in first.state.model.state_dict().items():
        assert torch.equal(second.state.model.state_dict()[name], value)
    with pytest.raises(NotImplementedError, match=r"Pass load_path= to the Trainer"):
        second.state.load_state_dict({})


def test_a_compiled_scheduler_gives_the_rates_of_the_function() -> None:
    made = trainer()
    made.fit()
    before = made.state.optimizers[0].param_groups[0]["lr"]
    compiled = compile_composer_scheduler(lambda state: 0.25, made.state)
    assert isinstance(compiled, torch.optim.lr_scheduler.LambdaLR)
    assert compiled.get_last_lr() == [0.025]
    assert before != 0.025


def test_times_of_the_clock_and_states_of_timestamps() -> None:
    assert Time.from_timedelta("1h30m") == Time.from_timedelta(datetime.timedelta(minutes=90)) == Time(5400, "sec")
    with pytest.raises(ValueError, match=r"'3ep' is not a time of the clock"):
        Time.from_timedelta("3ep")
    now = Timestamp(epoch="1ep", batch=Time(5, "ba"), batch_in_epoch=2, total_wct=datetime.timedelta(seconds=3))
    other = Timestamp()
    other.load_state_dict(now.state_dict())
    assert other == now
    assert now.state_dict()["total_wct"] == datetime.timedelta(seconds=3)
    assert (now.state_dict()["iteration"], now.state_dict()["epoch_in_iteration"]) == (0, 1)


def test_devices_move_what_they_are_given() -> None:
    device = get_device("cpu")
    assert isinstance(device, DeviceCPU)
    assert get_device(device) is device
    moved = device.batch_to_device({"x": (torch.ones(1), "text"), "y": [torch.ones(2)]})
    assert moved["x"][1] == "text"
    assert isinstance(moved["x"], tuple)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(device.module_to_device(net).parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert device.optimizer_to_device(optimizer) is optimizer
    assert {each.device.type for state in optimizer.state.values() for each in state.values()} == {"cpu"}
    with pytest.raises(ValueError, match=r"device='quantum' is not one of 'cpu', 'gpu', 'mps', 'tpu'"):
        get_device("quantum")


def test_random_numbers_are_restored() -> None:
    before = reproducibility.get_rng_state()
    drawn = random.random(), np.random.rand(), torch.rand(())
    reproducibility.load_rng_state(before)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()))


def test_utilities() -> None:
    assert map_collection((1, 2), str) == ("1", "2")
    assert map_collection({"a": 1}, str) == {"a": "1"}
    assert map_collection(None, str) is None
    assert format_name_with_dist("{run_name}/{rank}-{other}", "a") == "a/0-{other}"
    assert MemoryFormat("channels_last").value == "channels_last"
    with get_precision_context("amp_bf16"):
        pass
    with pytest.raises(NotImplementedError, match=r"no counterpart of Composer's get_file\. .*fsspec"):
        get_file("s3://bucket/file", "here")
    with pytest.raises(ImportError, match=r"has no attribute 'nothing'"):
        from hocket_migration.composer.utils import nothing  # type: ignore[attr-defined]  # noqa: F401


def test_parameters_of_an_optimizer_are_replaced() -> None:
    old, new = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1, bias=False)
    kept = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": [*kept.parameters(), *old.parameters()]}], lr=0.1)
    module_surgery.update_params_in_optimizer(old.parameters(), new.parameters(), optimizer)
    assert optimizer.param_groups[0]["params"] == [*kept.parameters(), *new.parameters()]


def test_intervals_of_a_function() -> None:
    class Count(Callback):
        def __init__(self) -> None:
            self.at: list[int] = []

        def eval_end(self, state: Any, logger: Any) -> None:
            self.at.append(int(state.timestamp.batch))

    for interval, checkpoint, expected in (("2ba", False, [2, 4]), ("1ep", False, [3]), ("2ba", True, [])):
        counted = Count()
        function = create_interval_scheduler(interval, checkpoint_events=checkpoint)
        trainer(max_duration="5ba", callbacks=[counted], eval_dataloader=data(), eval_interval=function).fit()
        assert counted.at == expected  # mosaicml's


def test_parallelism_is_an_object_or_a_dict() -> None:
    from hocket_migration.composer.arguments import strategy_of

    options = FSDPConfig(sharding_strategy="SHARD_GRAD_OP")
    for given in (ParallelismConfig(fsdp=options), ParallelismConfig(fsdp2=options), {"fsdp": vars(options)}):
        assert strategy_of(given, None) == "fsdp"
    with pytest.raises(ValueError, match=r"'load_planner'.*has no counterpart"):
        strategy_of(ParallelismConfig(fsdp=FSDPConfig(load_planner=1)), None)


def test_ranks_wait_as_long_as_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket_migration.composer.arguments import strategy_of

    assert strategy_of(None, None, 60.0) == "auto"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert strategy_of(None, None, 60.0) == {"ddp": {"timeout": 60.0}}
    assert strategy_of({"fsdp": {}}, None, 60.0) == {"fsdp": {"timeout": 60.0}}


def test_functional_forms_of_plain_tensors() -> None:
    inputs, targets = torch.rand(4, 3), torch.arange(4)
    mixed, partners, mixing = functional.mixup_batch(inputs, targets, alpha=1.0)
    assert 0 <= mixing <= 0.5
    torch.testing.assert_close(mixed, (1 - mixing) * inputs + mixing * inputs[partners])
    model, average = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    torch.nn.init.constant_(model.weight, 3.0)
    functional.compute_ema(model, average, smoothing=0.75)
    assert average.weight.tolist() == [1.5, 1.5]


def test_saver_writes_what_the_arguments_of_the_trainer_write() -> None:
    saver = callbacks.CheckpointSaver("saved", "{batch}.pt", save_interval="2ba", num_checkpoints_to_keep=1)
    made = trainer(callbacks=[saver])
    made.fit()
    assert made.saved_checkpoints == ["saved/6.pt"]
    assert trainer(load_path="saved/6.pt").state.timestamp.batch == 6
    with pytest.raises(ValueError, match=r"into one folder\. Pass save_folder=, or one CheckpointSaver"):
        trainer(callbacks=[callbacks.CheckpointSaver("other")], save_folder="saved")


def test_console_prints_in_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(loggers=[ConsoleLogger("2ba", "stdout")], eval_dataloader=data()).fit()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if "train/loss" in line] == ["ep 0 ba 2", "ep 1 ba 4", "ep 1 ba 6"]
    assert sum("eval/CrossEntropy" in line for line in lines) == 2
    assert lines[-1] == "hocket: to resume runs in another process, pass save_folder='runs/…'"


def test_series_of_the_logger_in_memory_have_all_counts() -> None:
    logger = InMemoryLogger()
    trainer(loggers=[logger]).fit()
    series = logger.get_timeseries("loss/train/total")
    assert series["sample"].tolist() == [0, 8, 16, 24, 32, 40]
    assert set(Timestamp().state_dict()) < set(series)


def test_warnings_have_composers_names() -> None:
    norm = ComposerClassifier(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)), num_classes=4)
    made = Trainer(
        model=norm, train_dataloader=data(), max_duration="1ep", device="cpu", device_train_microbatch_size=4,
        progress_bar=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"depends on device_train_microbatch_size=4"):
        made.fit()
    with warnings.catch_warnings(record=True) as caught, translated():
        warnings.simplefilter("always")
        warnings.warn("microbatch=3 is the project's own", stacklevel=1)
    assert [str(each.message) for each in caught] == ["microbatch=3 is the project's own"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"algorithms": algorithms.BlurPool}, r"algorithms= was given BlurPool itself\. Write BlurPool\(…\)"),
        ({"callbacks": Callback}, r"callbacks= was given Callback itself"),
        ({"eval_dataloader": [data(), data()]}, r"given 2 loaders\. Write \[Evaluator\(label='first'"),
        ({"train_dataloader_label": "other"}, r"train_dataloader_label='other'.*no counterpart"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        trainer(**given)


def test_stoppers_name_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"monitors 'Accuracy'.*Its metrics are: CrossEntropy, MulticlassAccuracy"):
        trainer(callbacks=[callbacks.EarlyStopper("Accuracy", "eval")], eval_dataloader=data()).fit()
    with pytest.raises(ValueError, match=r"dataloader_label='test', and there are 'train', 'eval'"):
        trainer(callbacks=[callbacks.ThresholdStopper("CrossEntropy", "test", 1.0)], eval_dataloader=data()).fit()
    with pytest.raises(ValueError, match=r"Write comp='greater' or comp='less'"):
        callbacks.EarlyStopper("CrossEntropy", "eval", comp="smaller")
    with pytest.raises(ValueError, match=r"Write '3ep' or '100ba'"):
        callbacks.EarlyStopper("CrossEntropy", "eval", patience="3tok")


def test_an_evaluation_alone_has_no_event_around_all_sets() -> None:
    class Seen(Callback):
        def __init__(self) -> None:
            self.events: list[str] = []

        def run_event(self, event: Event, state: Any, logger: Any) -> None:
            if event.is_eval:
                self.events.append(event.value)

    seen = Seen()
    made = trainer(callbacks=[seen], eval_dataloader=Evaluator(label="test", dataloader=data(), subset_num_batches=1))
    made.eval()
    assert [each for each in seen.events if "all" in each] == []
    made.fit()
    assert seen.events.count("eval_before_all") == 2
    assert hocket.Event.EVAL_BEFORE_ALL.value in seen.events

"""What TensorBoard's own reader finds in the event files."""

from __future__ import annotations

import importlib
import io
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

import hocket
import hocket_loggers
from hocket.basics.timestamp import Timestamp
from hocket_loggers import TensorBoardLogger


def state_in(folder: Path, batch: int = 0, name: str = "run"):
    return SimpleNamespace(run_folder=folder, run_name=name, timestamp=Timestamp(batch=batch))


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


def scalars(events: EventAccumulator, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(name)]


def served(folder: Path, name: str) -> list[int]:
    """The steps that TensorBoard shows where it reads in Python, with ``--load_fast=false``."""
    events = plugin_event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return [event.step for event in events.Tensors(name)]


def text(events: EventAccumulator, name: str) -> tuple[int, str]:
    (event,) = events.Tensors(f"{name}/text_summary")
    return event.step, event.tensor_proto.string_val[0].decode()


@pytest.fixture
def logger():
    made = TensorBoardLogger()
    yield made
    made.close(state_in(Path()))


def test_metrics_stand_at_the_batch(logger, tmp_path):
    logger.log_metrics(state_in(tmp_path, 3), {"train/loss": 0.5, "test/accuracy": 1})
    logger.log_metrics(state_in(tmp_path, 7), {"train/loss": math.nan})
    logger.flush(state_in(tmp_path))
    events = read(tmp_path / "tensorboard")
    assert scalars(events, "test/accuracy") == [(3, 1.0)]
    (first, (step, value)) = scalars(events, "train/loss")
    assert first == (3, 0.5) and step == 7 and math.isnan(value)


def test_hyperparameters_are_a_text_and_a_row_of_the_hparams_page(logger, tmp_path):
    parameters = {
        "duration": "10ep",
        "seed": 17,
        "rate": 0.5,
        "compile": False,
        "schedule": None,
        "clip": ["norm", 1.0],
        "algorithms": {"ema": {"half_life": "50ba"}, "sam": {}},
    }
    logger.log_hyperparameters(state_in(tmp_path), parameters)
    logger.flush(state_in(tmp_path))
    events = read(tmp_path / "tensorboard")
    step, written = text(events, "hyperparameters")
    assert step == 0 and '"half_life": "50ba"' in written
    content = events.PluginTagToContent("hparams")
    assert list(content) == ["_hparams_/session_start_info"]
    data = HParamsPluginData.FromString(content["_hparams_/session_start_info"])
    row = {key: getattr(value, value.WhichOneof("kind")) for key, value in data.session_start_info.hparams.items()}
    assert row == {
        "duration": "10ep",
        "seed": 17,
        "rate": 0.5,
        "compile": False,
        "clip": '["norm", 1.0]',
        "algorithms/ema/half_life": "50ba",
    }
    assert not list((tmp_path / "tensorboard").glob("*/")), "hyperparameters are not a run of their own"


def test_images_of_different_sizes_and_dtypes(logger, tmp_path):
    colours = torch.randint(256, (3, 4, 5), dtype=torch.uint8)
    grey = torch.rand(1, 2, 2)
    logger.log_images(state_in(tmp_path, 2), "samples", [colours, grey, grey.bfloat16()])
    logger.flush(state_in(tmp_path))
    events = read(tmp_path / "tensorboard")

    def pixels(number):
        (event,) = events.Images(f"samples/{number}")
        assert event.step == 2
        image = Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB")
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)

    assert torch.equal(pixels(0), colours)
    assert (pixels(1).float() - grey.expand(3, 2, 2) * 255).abs().max() <= 1
    assert (pixels(2).float() - grey.expand(3, 2, 2) * 255).abs().max() <= 2


def test_tables_and_artifacts_are_texts(logger, tmp_path):
    rows = [["a|b", 1], ["two\nlines", None]]
    logger.log_table(state_in(tmp_path, 4), "generations", ["prompt", "score"], rows)
    logger.log_artifact(state_in(tmp_path, 5), "weights", Path("runs/run/weights.safetensors"))
    logger.flush(state_in(tmp_path))
    events = read(tmp_path / "tensorboard")
    table = "| prompt | score |\n| --- | --- |\n| a\\|b | 1 |\n| two<br>lines | None |"
    assert text(events, "generations") == (4, table)
    assert text(events, "weights") == (5, "`runs/run/weights.safetensors`")


def test_a_folder_of_ones_own(tmp_path):
    logger = TensorBoardLogger(tmp_path / "board")
    logger.log_metrics(state_in(tmp_path / "elsewhere", 1, "a"), {"x": 1.0})
    logger.close(state_in(tmp_path))
    assert scalars(read(tmp_path / "board" / "a"), "x") == [(1, 1.0)]
    assert not (tmp_path / "elsewhere").exists()


def test_nothing_is_written_before_something_is_logged(tmp_path):
    logger = TensorBoardLogger()
    logger.flush(state_in(tmp_path))
    logger.close(state_in(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_waiting")
def test_closing_twice_and_going_on(logger, tmp_path):
    for batch in (1, 2):
        logger.log_metrics(state_in(tmp_path, batch), {"x": batch})
        logger.close(state_in(tmp_path, batch))
        logger.close(state_in(tmp_path, batch))
    logger.log_metrics(state_in(tmp_path, 2), {"y": 5.0})  # at the batch at which it was closed
    logger.close(state_in(tmp_path, 2))
    events = read(tmp_path / "tensorboard")
    assert scalars(events, "x") == [(1, 1.0), (2, 2.0)] and scalars(events, "y") == [(2, 5.0)]


@pytest.mark.parametrize("opened_at", ["the first row", "fit_start"])
@pytest.mark.parametrize("made", [0, 9])
@pytest.mark.usefixtures("no_waiting")
def test_a_resumed_run_replaces_what_it_does_again(tmp_path, monkeypatch, made, opened_at):
    """Stopped after batch 6 with a checkpoint of batch 4, resumed within the same second.

    Names of files end with how many this process has made, and 10 comes before 9 where names are sorted.
    """
    writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writers, "_global_uid", writers.AtomicCounter(made))
    stopped, resumed = TensorBoardLogger(), TensorBoardLogger()
    for batch in (2, 4, 6):
        stopped.log_metrics(state_in(tmp_path, batch), {"x": batch})
    stopped.close(state_in(tmp_path, 6))
    resumed.fit_start(state_in(tmp_path, 4))
    if opened_at == "fit_start":
        resumed._writer(state_in(tmp_path, 4))
    for batch in (6, 8):
        resumed.log_metrics(state_in(tmp_path, batch), {"x": 10 * batch})
    resumed.close(state_in(tmp_path, 8))
    resumed.log_metrics(state_in(tmp_path, 8), {"y": 5.0})  # as an evaluation after close, which is no fit
    resumed.close(state_in(tmp_path, 8))
    events = read(tmp_path / "tensorboard")
    assert scalars(events, "x") == [(2, 2.0), (4, 4.0), (6, 60.0), (8, 80.0)] and scalars(events, "y") == [(8, 5.0)]
    assert served(tmp_path / "tensorboard", "x") == [2, 4, 6, 8]


def test_a_run_that_resumes_from_a_checkpoint_shows_each_value_once(tmp_path):
    def fit(duration, *callbacks):
        with hocket.Trainer(
            model=nn.Linear(1, 1), loss=nn.functional.mse_loss, train_data=[(torch.ones(2, 1), torch.zeros(2, 1))] * 8,
            optimizer="sgd(lr=0.1)", duration=duration, log_every="2ba", loggers=["tensorboard"], device="cpu",
            run_name="a", folder=tmp_path, resume="auto", callbacks=callbacks,
            checkpoints=hocket.Checkpoints(tmp_path / "checkpoints", every="4ba"),
        ) as trainer:  # fmt: skip
            trainer.fit()

    class Break(hocket.Callback):
        def batch_end(self, state):
            if state.timestamp.batch == 7:
                raise ConnectionError("the machine is taken away")

    with pytest.raises(ConnectionError):
        fit("8ba", Break())
    fit("8ba")
    events = read(tmp_path / "a" / "tensorboard")
    assert [step for step, _ in scalars(events, "train/loss")] == [2, 4, 6, 8]
    assert served(tmp_path / "a" / "tensorboard", "train/loss") == [2, 4, 6, 8]


def test_without_tensorboard_it_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tensorboard>="):
        TensorBoardLogger()


def test_importing_the_package_imports_neither_torch_nor_tensorboard():
    code = (
        "import sys, hocket_loggers; hocket_loggers.TensorBoardLogger; "
        "assert not {'torch', 'tensorboard'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="Did you mean 'TensorBoardLogger'"):
        hocket_loggers.TensorboardLogger  # noqa: B018


def test_a_run(tmp_path):
    data = [(torch.ones(2, 1), torch.zeros(2, 1))] * 4
    with hocket.Trainer(
        model=nn.Linear(1, 1),
        loss=nn.functional.mse_loss,
        train_data=data,
        eval_data={"test": data},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        duration="2ep",
        log_every="2ba",
        loggers=["tensorboard"],
        device="cpu",
        run_name="a",
        folder=tmp_path,
    ) as trainer:
        result = trainer.fit()
    events = read(tmp_path / "a" / "tensorboard")
    assert {step for step, _ in scalars(events, "train/loss")} == {2, 4, 6, 8}
    assert [step for step, _ in scalars(events, "test/loss")] == [4, 8]
    assert scalars(events, "test/loss")[-1][1] == pytest.approx(result.metrics["test/loss"], rel=1e-6)
    assert "2ep" in text(events, "hyperparameters")[1]

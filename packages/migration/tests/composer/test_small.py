"""Small things of Composer's API: the numbers are those of mosaicml 0.32.1 with the same code."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchmetrics")
pytest.importorskip("hocket_general")

from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hocket_migration.composer import Callback, DataSpec, Event, Time, Timestamp, Trainer, functional
from hocket_migration.composer.models import ComposerClassifier
from hocket_migration.composer.utils import create_interval_scheduler

IMAGES = torch.arange(2 * 3 * 31 * 33).float().reshape(2, 3, 31, 33)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(16, 4, generator=generator), torch.randint(0, 2, (16,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=5)


def trainer(**given: Any) -> Trainer:
    model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
    settings = {"train_dataloader": loader(), "max_duration": "1ep", **given}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Trainer(model=model, device="cpu", progress_bar=False, optimizers=optimizer, **settings)


# --- functional


@pytest.mark.parametrize(
    ("target", "mode", "resizes", "expected"),
    [
        (torch.arange(2 * 31 * 33).reshape(2, 31, 33), "resize", True, [(18, 19), 6214860, (18, 19), 672156]),
        (torch.arange(2 * 31 * 33).reshape(2, 31, 33), "crop", True, [(18, 19), 6051348, (18, 19), 617652]),
        (IMAGES[:, :, ::2, ::2], "resize", True, [(18, 19), 6214860, (9, 10), 1614546]),
        (IMAGES[:, :, ::2, ::2], "crop", True, [(18, 19), 6051348, (9, 10), 1565190]),
        (IMAGES, "crop", False, [(18, 19), 6051348, (31, 33), 6137 * 6138 // 2]),
    ],
)
def test_images_are_resized_to_composers_sizes(target: Any, mode: str, resizes: bool, expected: list[Any]) -> None:
    torch.manual_seed(0)
    images, targets = functional.resize_batch(IMAGES, target, 0.6, mode, resizes)
    sums = [round(each.double().sum().item()) for each in (images, targets)]
    assert [images.shape[-2:], sums[0], targets.shape[-2:], sums[1]] == expected
    assert targets.dtype is target.dtype


@pytest.mark.parametrize(("size", "scale", "expected"), [(31, 0.5, 15), (31, 0.75, 23), (30, 0.55, 16), (33, 0.75, 24)])
@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_sizes_are_rounded_down(size: int, scale: float, expected: int, mode: str) -> None:
    images = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    assert functional.resize_batch(images, images, scale, mode)[0].shape == (2, 3, expected, expected)
    assert functional.resize_batch(images, images, 1.0, mode)[0] is images


def test_other_modes_and_shapes_of_resizing_are_refused() -> None:
    with pytest.raises(ValueError, match="write 'resize' or 'crop'"):
        functional.resize_batch(IMAGES, IMAGES, 0.5, "shrink")
    with pytest.raises(ValueError, match=r"target has shape \(2,\)"):
        functional.resize_batch(IMAGES, torch.zeros(2), 0.5, resize_targets=True)


@pytest.mark.parametrize(
    ("images", "how", "expected"),
    [(IMAGES, (2, 0.3), 17488368), (IMAGES[0], (3, 0.5, True), 4638030), (IMAGES[0], (1, 0.5), 4294629)],
)
def test_all_images_and_channels_lose_the_same_squares(images: Any, how: Any, expected: int) -> None:
    np.random.seed(0)
    assert functional.cutout_batch(images, *how).double().sum().item() == expected


def test_pil_images_stay_pil_images() -> None:
    image = pytest.importorskip("PIL.Image").fromarray(np.full((32, 32, 3), 255, dtype="uint8"))
    np.random.seed(1)
    found = functional.cutout_batch(image, 1, 0.5)
    assert type(found) is type(image) and found.size == image.size
    values = np.asarray(found)
    assert (values == values[..., :1]).all() and 0 < (values == 0).mean() <= 0.25


# --- times


def test_iterations_are_counted_as_by_composer() -> None:
    seconds = lambda number: datetime.timedelta(seconds=number)  # noqa: E731
    now = Timestamp(
        iteration=2, epoch=3, batch=7, sample=70, epoch_in_iteration=1, token_in_iteration=4, iteration_wct=seconds(5),
        total_wct=seconds(9),
    )  # fmt: skip

    def of_iteration(at: Timestamp) -> tuple[Any, ...]:
        counts = at.iteration, at.epoch, at.epoch_in_iteration, at.token_in_iteration
        walls = at.iteration_wct, at.total_wct, at.epoch_wct
        return (*(each.value for each in counts), *(each.total_seconds() for each in walls))

    assert of_iteration(now) == (2, 3, 1, 4, 5, 9, 0)
    assert of_iteration(now.to_next_batch(5, 6, seconds(2))) == (2, 3, 1, 10, 7, 11, 2)
    assert of_iteration(now.to_next_epoch(seconds(2))) == (2, 4, 2, 4, 7, 11, 0)
    assert of_iteration(now.to_next_iteration(seconds(3))) == (3, 3, 0, 0, 0, 12, 0)
    assert of_iteration(now.copy(iteration=4)) == (4, 3, 1, 4, 5, 9, 0)
    loaded = Timestamp()
    loaded.load_state_dict(now.state_dict())
    assert loaded == now != Timestamp(now._position) and loaded.get("iter") == "2iter"
    assert Timestamp(epoch=2, token=5).epoch_in_iteration == "2ep"


def test_times_are_generic() -> None:
    assert Time[int].__origin__ is Time  # type: ignore[misc]
    annotated: Time[int] = Time(1, "ba")
    assert annotated == "1ba"


@pytest.mark.parametrize(
    ("interval", "how", "expected"),
    [
        ("1ep", {}, ["EPOCH_CHECKPOINT 4", "BATCH_CHECKPOINT 8", "EPOCH_CHECKPOINT 8"]),
        ("3ba", {}, ["BATCH_CHECKPOINT 3", "BATCH_CHECKPOINT 6", "BATCH_CHECKPOINT 8", "EPOCH_CHECKPOINT 8"]),
        ("3ba", {"include_end_of_training": False}, ["BATCH_CHECKPOINT 3", "BATCH_CHECKPOINT 6"]),
        (
            "3ba",
            {"final_events": {Event.BATCH_CHECKPOINT}},
            ["BATCH_CHECKPOINT 3", "BATCH_CHECKPOINT 6", "BATCH_CHECKPOINT 8"],
        ),
        ("3ba", {"final_events": set()}, ["BATCH_CHECKPOINT 3", "BATCH_CHECKPOINT 6"]),
        ("1ep", {"checkpoint_events": False}, ["EPOCH_END 4", "BATCH_CHECKPOINT 8", "EPOCH_END 8"]),
    ],
)
def test_functions_of_intervals_agree_on_composers_events(
    interval: str, how: dict[str, Any], expected: list[str]
) -> None:
    class Asks(Callback):
        def __init__(self) -> None:
            self.function = create_interval_scheduler(interval, **how)
            self.agreed: list[str] = []

        def run_event(self, event: Event, state: Any, logger: Any) -> None:
            if event.name.endswith(("_CHECKPOINT", "H_END")) and self.function(state, event):
                self.agreed.append(f"{event.name} {int(state.timestamp.batch)}")

    asks = Asks()
    trainer(max_duration="8ba", callbacks=asks).fit()
    assert asks.agreed == expected


# --- data


def test_a_data_spec_counts_and_splits() -> None:
    spec, batch = DataSpec(loader()), next(iter(loader()))
    assert (spec.num_samples, DataSpec([1, 2]).num_samples) == (16, None)
    assert (spec.get_num_samples_in_batch(batch), spec.get_num_tokens_in_batch(batch)) == (5, 0)
    assert [len(each[0]) for each in spec.split_batch(batch, 2)] == [2, 2, 1]
    typed = DataSpec(loader(), get_num_tokens_in_batch=lambda batch: {"total": 8, "loss": 3})
    assert [typed.get_num_tokens_in_batch(batch, kind) for kind in ("total", "loss")] == [8, 3]
    with pytest.raises(ValueError, match="counts 'total', 'loss', and not 'padding'"):
        typed.get_num_tokens_in_batch(batch, "padding")
    assert spec.get_num_tokens_in_batch({"input_ids": torch.ones(3, 7, dtype=torch.int64)}) == 21


def test_evaluation_and_prediction_have_positions() -> None:
    noted: list[Any] = []

    class Notes(Callback):
        def eval_batch_start(self, state: Any, logger: Any) -> None:
            noted.append(("start", state.eval_timestamp))

        def eval_batch_end(self, state: Any, logger: Any) -> None:
            noted.append(("end", state.eval_timestamp))

        def predict_batch_end(self, state: Any, logger: Any) -> None:
            noted.append(("predicted", state.predict_timestamp))

    run = trainer(eval_dataloader=loader(), callbacks=Notes())
    run.fit()
    run.predict(loader(), 2)
    run.eval(loader(), 1)
    found = [(name, int(at.batch), int(at.sample)) for name, at in noted]
    evaluated = [("start", 0, 0), ("end", 1, 5), ("start", 1, 5), ("end", 2, 10), ("start", 2, 10), ("end", 3, 15)]
    assert found == [
        *evaluated, ("start", 3, 15), ("end", 4, 16), ("predicted", 1, 5), ("predicted", 2, 10), ("start", 0, 0), ("end", 1, 5),
    ]  # fmt: skip
    assert noted[7][1].total_wct > noted[1][1].total_wct > datetime.timedelta()


def test_the_microbatch_is_a_batch_of_the_loader_unless_it_was_given() -> None:
    assert trainer().state.device_train_microbatch_size == 5
    assert trainer(device_train_microbatch_size=2).state.device_train_microbatch_size == 2


class Longer:
    """A loader with a length that never ends."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        while True:
            yield torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)


class Endless(IterableDataset[Any]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        while True:
            yield torch.ones(4), torch.tensor(1)


@pytest.mark.parametrize("data", [Longer, lambda: DataSpec(Longer()), lambda: DataLoader(Endless(), 4)])
@pytest.mark.parametrize(("subset", "batches"), [(-1, 6), (2, 4)])
def test_an_epoch_ends_at_the_length_of_the_loader(data: Any, subset: int, batches: int) -> None:
    run = trainer(train_dataloader=data(), eval_dataloader=data(), max_duration="2ep", train_subset_num_batches=subset)
    run.fit()
    assert run.state.timestamp.batch == batches
    assert len(run.predict(data())) == 3


def test_a_fit_may_bring_the_first_schedulers() -> None:
    run = trainer(max_duration="3ep")
    run.fit(duration="1ep")
    run.fit(duration="1ep", schedulers=lambda state, ssr: 0.5)
    assert run.state.optimizers[0].param_groups[0]["lr"] == 0.05
    run.fit(duration="1ep", schedulers=[lambda state: float(state.timestamp.batch)])
    assert run.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(1.1)
    assert len(run.state.schedulers) == 1


def test_predictions_are_not_kept_unless_they_are_returned() -> None:
    kept: list[Any] = []

    class Counts(Callback):
        def predict_batch_end(self, state: Any, logger: Any) -> None:
            kept.append(state.outputs.shape)

    assert trainer(callbacks=Counts()).predict(loader(), return_outputs=False) == []
    assert kept == [(5, 2)] * 3 + [(1, 2)]


# --- remote files


def test_checkpoints_are_written_and_loaded_by_url(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.chdir(tmp_path)
    run = trainer()
    run.fit()
    url = run.save_checkpoint("memory://composer/ep{epoch}.pt")
    assert url == "memory://composer/ep1.pt" and memory.find("/composer") == ["/composer/ep1.pt"]
    continued = trainer(max_duration="2ep", load_path=url)
    assert continued.state.timestamp == "1ep"
    torch.testing.assert_close(continued.state.model.state_dict(), run.state.model.state_dict())
    assert not [each for each in tmp_path.rglob("*") if "memory" in each.name]
    with pytest.raises(FileNotFoundError, match=r"hocket=\{'resume': 'memory://composer/none'\}"):
        trainer(load_path="memory://composer/none")

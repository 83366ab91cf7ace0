"""CutOut against what its paper says of squares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

import hocket
from hocket_testkit import AlgorithmConformance
from hocket_vision import CutOut, small_resnet
from hocket_vision.boxes import draw_boxes
from hocket_vision.cutout import fill_boxes
from hocket_vision.functional import cutout


class TestCutOut(AlgorithmConformance):
    def make(self):
        return CutOut()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(2, 20), st.integers(2, 20), st.floats(0.01, 1), st.integers(1, 3), st.integers(0, 99))
@settings(deadline=None)
def test_holes_are_squares_clipped_at_the_borders(height, width, length, holes, seed):
    images = torch.ones(3, 2, height, width)
    hidden = cutout(images, holes, length, generator=seeded(seed)) == 0
    side = max(1, int(min(height, width) * length))
    assert images.all() and hidden[:, 0].equal(hidden[:, 1])
    assert (hidden[:, 0].flatten(1).sum(1) <= holes * side**2).all()
    if holes == 1:
        for image in hidden[:, 0]:
            rows, columns = image.any(1), image.any(0)
            assert image.equal(rows[:, None] & columns) and rows.sum() <= side and columns.sum() <= side
            assert rows.any() and rows.sum() >= side // 2


def test_each_image_has_its_own_square():
    """Composer hides the same one in all images of a batch."""
    hidden = cutout(torch.ones(16, 1, 32, 32), generator=seeded()) == 0
    assert len({tuple(image.flatten().tolist()) for image in hidden}) > 10


@pytest.mark.parametrize("shape", [(5, 9, 7), (5, 3, 9, 7)])
def test_devices_fill_the_same_pixels(shape, monkeypatch):
    """The masks that are used on devices other than the CPU, by hand."""
    images, boxes = torch.rand(shape), draw_boxes(9, 7, 4, 4, 10, generator=seeded()).view(2, 5, 4)
    expected = images.clone()
    for hole in boxes.tolist():
        for i, (top, bottom, left, right) in enumerate(hole):
            expected[i, ..., top:bottom, left:right] = 0.5
    assert fill_boxes(images, boxes, 0.5).equal(expected)
    on_meta = fill_boxes(images.to("meta"), boxes, 0.5)
    assert on_meta.shape == images.shape


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_keeps_dtype_and_memory_format(dtype):
    images = torch.ones(4, 3, 8, 8).to(dtype).contiguous(memory_format=torch.channels_last)
    filled = cutout(images, fill=7, generator=seeded())
    assert filled.dtype is dtype and filled.is_contiguous(memory_format=torch.channels_last)
    assert filled.unique().tolist() == [1, 7]


def test_arguments_out_of_range_are_refused():
    for length in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="length"):
            CutOut(length=length)
    with pytest.raises(ValueError, match="num_holes"):
        cutout(torch.ones(1, 1, 4, 4), num_holes=0)
    with pytest.raises(TypeError, match="cutout takes a batch of images"):
        cutout(torch.ones(4, 4))


def test_acts_between_start_and_stop_by_batch():
    hidden = []

    class Look(hocket.Callback):
        def before_forward(self, state):
            hidden.append(bool((state.batch[0] == 0).any()))

    trainer = hocket.Trainer(
        model=small_resnet(), loss=torch.nn.CrossEntropyLoss(), train_data=[(torch.ones(4, 1, 8, 8), torch.arange(4))] * 5,
        optimizer="sgd(lr=0.1)", duration="1ep", algorithms=[CutOut(start="0.2dur", stop="0.6dur")], callbacks=[Look()],
        device="cpu", checkpoints=False,
    )  # fmt: skip
    trainer.fit()
    assert hidden == [False, True, True, False, False]

"""Random numbers of GPUs, emulated: what torch says about generators is replaced."""

from __future__ import annotations

import pytest
import torch

from hocket.basics import seeding


class GPUs:
    """The generators of a process that sees so many GPUs and computes on one of them; states are numbers in tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, computes_on: int, started: bool = True) -> None:
        self.states = [torch.tensor([0])] * count
        self.started = started
        replaced = {
            "is_initialized": lambda: self.started,
            "current_device": lambda: computes_on,
            "device_count": lambda: count,
            "get_rng_state_all": lambda: list(self.states),
            "set_rng_state": lambda state, device: self.states.__setitem__(device, state),
            "manual_seed_all": lambda seed: setattr(self, "states", [torch.tensor([seed])] * count),
        }
        for name, function in replaced.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def draw(self, device: int, numbers: int) -> None:
        self.states[device] = self.states[device] + numbers


@pytest.mark.parametrize("count, computes_on", [(8, 5), (4, 1), (1, 0)], ids=["1 x 8", "2 x 4", "one GPU each"])
def test_a_rank_takes_its_numbers_to_another_gpu(monkeypatch, count: int, computes_on: int) -> None:
    """Rank 5 of 2 x 4 GPUs computed on the second of its machine."""
    before = GPUs(monkeypatch, 4, 1)
    before.draw(1, 1000)
    saved = seeding.from_tree(seeding.to_tree(seeding.capture()))
    after = GPUs(monkeypatch, count, computes_on)
    seeding.restore(saved)
    assert after.states[computes_on] == 1000


def test_all_gpus_of_one_process_are_restored(monkeypatch) -> None:
    """A model may be spread over them."""
    gpus = GPUs(monkeypatch, 3, 0)
    for device in range(3):
        gpus.draw(device, 10 + device)
    with seeding.preserved():
        gpus.draw(2, 5)
    assert gpus.states == [10, 11, 12]


def test_checkpoints_that_do_not_know_the_gpu_are_restored_by_index(monkeypatch) -> None:
    gpus = GPUs(monkeypatch, 2, 1)
    saved = seeding.capture()
    del saved["cuda_device"]
    saved["cuda"] = [torch.tensor([7]), torch.tensor([8])]
    seeding.restore(saved)
    assert gpus.states == [7, 8]


def test_tensor_parallel_neighbours_take_the_leaders_numbers(monkeypatch) -> None:
    """The leader computes on the first GPU, its neighbour on the second."""
    leader = GPUs(monkeypatch, 2, 0)
    leader.draw(0, 400)
    sent = seeding.capture()
    neighbour = GPUs(monkeypatch, 2, 1)
    neighbour.draw(1, 3)
    seeding.restore(sent)
    assert neighbour.states[1] == 400


def test_a_gpu_that_was_first_used_inside_gives_the_caller_its_numbers_back(monkeypatch) -> None:
    torch.manual_seed(123)
    gpus = GPUs(monkeypatch, 1, 0, started=False)
    stream = seeding.RandomStream(7)
    with stream:
        gpus.started = True
        torch.cuda.manual_seed_all(7)
        gpus.draw(0, 50)
    assert gpus.states == [123], "as torch.manual_seed left it"
    with stream:
        assert gpus.states == [57]
    assert gpus.states == [123]


def test_a_stream_goes_on_elsewhere_from_where_it_was_left() -> None:
    """Whatever is drawn outside between the two."""
    torch.manual_seed(5)
    expected = torch.rand(4).tolist()
    stream, other = seeding.RandomStream(5), seeding.RandomStream(6)
    with stream:
        first = torch.rand(1).tolist()
    torch.rand(7)
    other.load_state_dict(stream.state_dict())
    with other:
        rest = torch.rand(3).tolist()
    assert first + rest == expected

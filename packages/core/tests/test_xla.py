"""Training on torch_xla's CPU client beside the CPU itself. `nox -s xla` installs it; elsewhere all of this is skipped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

torch_xla = pytest.importorskip("torch_xla")

import hocket  # noqa: E402
from hocket_testkit.compare import difference  # noqa: E402
from hocket_testkit.reference import convolutional_network, labelled_images  # noqa: E402

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _cpu_client(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.chdir(tmp_path)


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return convolutional_network()


def trainer(device: str, network: nn.Module | None = None, **options) -> hocket.Trainer:
    data = labelled_images()
    settings = {"optimizer": "adamw(lr=0.003)", "duration": "2ep", "clip_gradients": 1.0, "seed": 3, **options}
    return hocket.Trainer(
        model=network or model(), loss=F.cross_entropy, train_data=data, eval_data=data, device=device, **settings
    )


@pytest.mark.parametrize("options", [{}, {"microbatch": 3}], ids=str)
def test_trains_and_evaluates_as_on_the_cpu(options) -> None:
    here, there = trainer("cpu", **options), trainer("xla", **options)
    metrics = [each.fit().metrics["eval/loss"] for each in (here, there)]
    assert there.state.device.type == "xla" and next(there.state.task.parameters()).device.type == "xla"
    assert difference(there.model_state_dict(), here.model_state_dict(), TOLERANCE) is None
    assert difference(metrics[1], metrics[0], TOLERANCE) is None
    outputs = [torch.cat(each.predict(labelled_images())) for each in (here, there)]
    assert difference(outputs[1], outputs[0], TOLERANCE) is None


def test_every_batch_is_computed_when_it_ends() -> None:
    pending = []

    class Look(hocket.Callback):
        def batch_checkpoint(self, state) -> None:
            weights = [parameter.detach() for parameter in state.task.parameters()]
            pending.append(torch_xla._XLAC._get_xla_tensors_text(weights))

    with trainer("xla", callbacks=[Look()]) as run:
        run.fit()
    assert len(pending) == 8
    recorded = [line for text in pending for line in text.splitlines() if " = " in line and "device_data()" not in line]
    assert not recorded, "what is left of a batch is values"


def test_an_own_loop_trains_as_on_the_cpu() -> None:
    weights = []
    for device in ("cpu", "xla"):
        runtime = hocket.Runtime(device=device)
        network = model().to(runtime.device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        prepared, optimizer = runtime.setup(network, optimizer)
        for inputs, targets in runtime.setup_data(labelled_images()):
            runtime.backward(F.cross_entropy(prepared(inputs), targets))
            runtime.step(optimizer)
        weights.append(runtime.model_state(prepared))
    assert difference(weights[1], weights[0], TOLERANCE) is None


def test_random_numbers_follow_the_seed_and_evaluation_leaves_them_alone() -> None:
    def losses(seed: int, **options) -> dict[str, torch.Tensor]:
        network = nn.Sequential(model(), nn.Dropout(0.5))
        torch.rand(3, device="xla")  # the process's own random numbers are none of its business
        with trainer("xla", network, seed=seed, **options) as run:
            run.fit()
            return run.model_state_dict()

    first = losses(3)
    assert difference(losses(3, eval_every="1ba"), first) is None
    assert difference(losses(4), first) is not None


def test_bf16_is_close_to_fp32() -> None:
    with trainer("xla", precision="bf16") as half, trainer("cpu") as full:
        losses = [each.fit().metrics["eval/loss"] for each in (half, full)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]

"""Ray Train with two workers on this machine. `nox -s ray` installs it; elsewhere all of this is skipped."""

from __future__ import annotations

import os
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train.torch")

from hocket_strategies.ray import launch  # noqa: E402

#: Trains on two ranks; in the first attempt rank 1 dies in the second epoch, if told to.
SCRIPT = """
import os, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hocket

folder, dies = Path(sys.argv[1]), sys.argv[2] == "dies"
attempt = len(list(folder.glob("attempt-*-of-1")))

class Dies(hocket.Callback):
    def epoch_start(self, state):
        if dies and state.strategy.rank == 1 and state.timestamp.epoch == 1 and attempt == 0:
            (folder / "attempt-0-of-1").touch()
            os._exit(3)

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
generator = torch.Generator().manual_seed(1)
data = DataLoader(TensorDataset(torch.randn(13, 4, generator=generator).double(), torch.arange(13) % 3), 4)
trainer = hocket.Trainer(
    model=model, loss=nn.functional.cross_entropy, train_data=data, global_batch=4, eval_data=data, strategy="ray",
    device="cpu", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9), duration="3ep",
    callbacks=[Dies()], folder=folder / "runs",
)
trainer.fit()
strategy = trainer.state.strategy
torch.save((strategy.world_size, trainer.model_state_dict()), folder / f"rank-{strategy.rank}.pt")
"""


@pytest.fixture(scope="module", autouse=True)
def cluster():
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_V2_ENABLED="1")
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 * 2**20,
        configure_logging=False,
    )
    yield
    ray.shutdown()


def plain():
    """Weights, and the mean loss over the data, of a loop in one process."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(13, 4, generator=generator).double(), torch.arange(13) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(3):
        for batch in range(0, 13, 4):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch : batch + 4]), targets[batch : batch + 4]).backward()
            optimizer.step()
    return dict(model.state_dict()), F.cross_entropy(model(inputs), targets).item()


@pytest.mark.parametrize("dies", ["lives", "dies"])
def test_a_script_on_two_workers(tmp_path, dies):
    """The weights of one process on both; a worker that dies has the script started again on all."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    result = launch(
        script,
        arguments=[str(tmp_path), dies],
        scaling={"num_workers": 2},
        failure={"max_failures": 1},
        run={"name": f"run-{dies}", "storage_path": str(tmp_path / "ray")},
    )
    weights, loss = plain()
    assert (tmp_path / "attempt-0-of-1").exists() is (dies == "dies")
    for rank in range(2):
        world_size, got = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True)
        assert world_size == 2
        torch.testing.assert_close(got, weights, rtol=1e-12, atol=1e-12)
    with result.checkpoint.as_directory() as folder:
        kept = torch.load(os.path.join(folder, "model.pt"), weights_only=True)
    torch.testing.assert_close(kept, weights, rtol=1e-12, atol=1e-12)
    assert result.metrics["eval/loss"] == pytest.approx(loss)
    assert (result.metrics["epoch"], result.metrics["batch"]) == (3, 12)


def test_a_function_with_arguments(tmp_path):
    def training(folder, samples):
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        import hocket

        trainer = hocket.Trainer(
            model=nn.Linear(2, 2),
            loss=nn.functional.cross_entropy,
            train_data=DataLoader(TensorDataset(torch.rand(samples, 2), torch.arange(samples) % 2)),
            global_batch=4,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            strategy="ray",
            device="cpu",
            duration="1ep",
            folder=folder,
        )
        return trainer.fit().timestamp.sample

    result = launch(
        training,
        arguments={"folder": str(tmp_path), "samples": 10},
        scaling={"num_workers": 2},
        run={"storage_path": str(tmp_path / "ray")},
    )
    assert result.error is None and result.return_value == 10
    assert result.metrics["batch"] == 3 and result.metrics["train/loss"] > 0  # nothing was evaluated

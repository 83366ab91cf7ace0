"""The best checkpoint: `Result.best`, and its evaluation without a trace in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_data, make_model, make_trainer, same, weights
from torch.nn import functional as F

import hocket
from hocket.checkpoints import CheckpointError, Store, read_weights
from hocket_cli import main

BEST = ("test/loss", "min", 1)


def make(**changes: Any) -> hocket.Trainer:
    """A Trainer whose learning rate makes its loss go up and down, so that the best is not the last."""
    return make_trainer(
        **{
            "device": "cpu", "eval_data": {"test": make_data(40, shuffle=False)}, "eval_every": "1ba", "duration": "4ep",
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=4.0),
            "checkpoints": hocket.Checkpoints("runs/a", every=None, best=BEST), "seed": 3, **changes,
        }
    )  # fmt: skip


def loss_of(path: str, batches: int = 40) -> float:
    """The loss of a checkpoint's weights, in plain PyTorch."""
    model = make_model()
    model.load_state_dict(read_weights(path))
    with torch.no_grad():
        parts = [(F.cross_entropy(model(x), y, reduction="sum").double(), len(y)) for x, y in make_data(batches)]
    return float(sum(each for each, _ in parts) / sum(n for _, n in parts))


def test_the_best_is_the_minimum_of_the_history_and_evaluates_to_its_value() -> None:
    trainer = make()
    result = trainer.fit()
    batches, losses = result.history.series("test/loss")
    lowest = min(losses)
    assert result.best.value == lowest and result.best.metric == "test/loss"
    assert result.best.path.endswith(f"-ba{batches[losses.index(lowest)]}") and lowest < losses[-1]
    assert result.best.path.startswith("runs/a/")
    before, rows = weights(trainer), trainer.result().history
    assert trainer.evaluate("best") == {"test/loss": lowest}
    assert lowest == pytest.approx(loss_of(result.best.path), rel=1e-6)
    assert trainer.evaluate(checkpoint="latest") == {"test/loss": losses[-1]}
    assert trainer.evaluate({"more": make_data(60)}, checkpoint=result.best.path)["more/loss"] == pytest.approx(
        loss_of(result.best.path, 60), rel=1e-6
    )
    assert same(weights(trainer), before)
    again = trainer.result()
    assert again.metrics == result.metrics and repr(dict(again.history)) == repr(dict(rows))


def test_training_goes_on_as_if_nothing_had_been_evaluated() -> None:
    def run(folder: str, ask: bool) -> list[torch.Tensor]:
        trainer = make(
            checkpoints=hocket.Checkpoints(folder, best=BEST), algorithms=[{"ema": {"half_life": "2ba"}}],
            model=make_model(dropout=0.2),
        )  # fmt: skip
        trainer.fit("4ba")  # within an epoch
        if ask:
            trainer.evaluate("best")
        trainer.fit("3ba")
        return [*weights(trainer), *trainer.model_state_dict(evaluated=True).values()]

    assert same(run("runs/a", True), run("runs/b", False))


def test_averages_of_that_time_are_evaluated() -> None:
    trainer = make(algorithms=[{"ema": {"half_life": "2ba"}}])
    result = trainer.fit()
    assert trainer.evaluate("best")["test/loss"] == result.best.value
    assert trainer.evaluate("best")["test/loss"] != pytest.approx(loss_of(result.best.path), rel=1e-6), "weights"
    assert trainer.evaluate()["test/loss"] == result.metrics["test/loss"]


def test_a_failing_evaluation_leaves_the_weights_of_the_run() -> None:
    trainer = make(algorithms=["ema"])
    trainer.fit()
    before = weights(trainer)

    def failing() -> Any:
        yield next(iter(make_data()))
        raise OSError("planned")

    with pytest.raises(OSError, match="planned"):
        trainer.evaluate({"more": hocket.EvalSet(failing())}, checkpoint="best")
    assert same(weights(trainer), before)
    assert trainer.evaluate()["test/loss"] == trainer.result().metrics["test/loss"]


def test_a_store_behind_a_url() -> None:
    pytest.importorskip("fsspec")
    trainer = make(checkpoints=hocket.Checkpoints("memory://best/a", best=BEST))
    result = trainer.fit()
    assert result.best.path.startswith("memory://best/a/ep")
    assert trainer.evaluate("best")["test/loss"] == trainer.evaluate(result.best.path)["test/loss"] == result.best.value


def test_the_best_of_a_resumed_run_is_that_of_all_of_it() -> None:
    first = make().fit("6ba").best
    resumed = make(resume="auto", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=4.0), duration="6ba")
    with pytest.warns(UserWarning, match="Training is over"):
        assert resumed.fit().best == first == resumed.result().best


def test_without_a_best() -> None:
    assert make_trainer(device="cpu").fit("1ba").best is None
    trainer = make(checkpoints=hocket.Checkpoints("runs/a"))
    with pytest.raises(CheckpointError, match=r"no checkpoint in runs/a yet. Train first"):
        trainer.evaluate("latest")
    assert trainer.fit("1ba").best is None
    with pytest.raises(CheckpointError, match=r"Checkpoints\('runs/a', best=\('test/loss', 'min', 1\)\)"):
        trainer.evaluate("best")
    with pytest.raises(ValueError, match="'best' is one of this run's checkpoints, but it writes none"):
        make(checkpoints=None).evaluate("best")
    with pytest.raises(CheckpointError, match=r"runs/a.*no checkpoint 'ep9-ba9'"):
        trainer.evaluate("runs/a/ep9-ba9")


def test_other_weights_are_refused_before_anything_changes() -> None:
    name = make(model=torch.nn.Linear(8, 3)).fit("1ba").best.path
    trainer = make(checkpoints=None)
    before = weights(trainer)
    with pytest.raises(CheckpointError, match=r"do not fit the model, and nothing was evaluated.\nmissing.*0.weight"):
        trainer.evaluate(name)
    assert same(weights(trainer), before)


def test_checkpoints_of_weights_only() -> None:
    trainer = make(checkpoints=hocket.Checkpoints("runs/a", best=BEST, weights_only=True))
    result = trainer.fit()
    assert "version" not in Store("runs/a").read(result.best.path.rpartition("/")[2])
    assert trainer.evaluate("best")["test/loss"] == result.best.value
    with pytest.raises(CheckpointError, match="no state of the algorithm 'ema'"):
        make(checkpoints=None, algorithms=["ema"]).evaluate(result.best.path)


def test_not_during_a_fit() -> None:
    class Ask(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            trainer.evaluate("best")

    trainer = make(callbacks=[Ask()])
    with pytest.raises(RuntimeError, match="The weights of a checkpoint cannot be used during a fit"):
        trainer.fit()


def test_the_command_line_evaluates_a_checkpoint_with_its_averages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("evaluated.py").write_text(
        "import torch\n"
        "def data():\n"
        "    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))\n"
        "    return torch.utils.data.DataLoader(list(zip(inputs, inputs.sum(1, keepdim=True))), 8)\n"
    )
    Path("run.yaml").write_text(
        "model: {torch.nn:Linear: {in_features: 4, out_features: 1}}\n"
        "train_data: evaluated:data\neval_data: {test: evaluated:data}\nloss: mse\noptimizer: sgd(lr=0.1)\n"
        "algorithms: [{ema: {half_life: 4ba}}]\nduration: 3ep\nseed: 1\nloggers: []\nrun_name: r\n"
        "checkpoints: {folder: kept, best: [test/loss, min, 1]}\n"
    )
    assert main(["train", "run.yaml"]) == 0
    trained = capsys.readouterr().out
    for which in ("best", "latest", "kept/ep3-ba6", "kept/latest", "runs/r/weights.safetensors"):
        assert main(["evaluate", "run.yaml", "--weights", which]) == 0
        said = capsys.readouterr().out.strip()
        assert said.startswith("test/loss ") and said in trained
    assert main(["predict", "run.yaml", "--weights", "best", "--out", "o.safetensors"]) == 0
    assert main(["evaluate", "run.yaml", "--weights", "kept/ep9-ba9"]) == 2
    assert "There is no kept/ep9-ba9" in capsys.readouterr().err

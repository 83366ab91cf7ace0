"""The callback ``export``, and ``hocket export`` of recorded runs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

import hocket.testkit
from hocket.errors import Unsupported
from hocket_cli import main
from hocket_tools.exporting.callback import Export

sys.path.append(str(Path(__file__).parent))
import exported_models as models


class TestExport(hocket.testkit.CallbackConformance):
    def make(self) -> Export:
        return Export("safetensors", every="3ba")


def test_a_fit_that_cannot_be_exported_does_not_start(tmp_path):
    trainer = models.trainer_of(
        models.Undecided(), models.pairs(), loss="cross_entropy", folder=tmp_path, callbacks=[{"export": {}}]
    )
    with pytest.raises(Unsupported, match="depends on the values of tensors"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0 and not list(tmp_path.rglob("export.json"))


def test_the_newest_export_has_the_weights_of_the_end(tmp_path):
    from safetensors.torch import load_file

    trainer = models.trainer_of(
        models.Heads(), models.rows(), inputs="x", targets="y", outputs="logits", loss="cross_entropy", folder=tmp_path,
        callbacks=[{"export": {"to": "safetensors", "every": "1ba"}}], duration="3ba",
        algorithms=[{"ema": {"half_life": "1ba"}}],
    )  # fmt: skip
    folder = trainer.fit().run_folder / "exports" / "safetensors"
    expected = trainer.model_state_dict(evaluated=True)
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in expected)
    assert json.loads((folder / "export.json").read_text())["origin"]["position"]["batch"] == 3


CONFIGURATION = """
model: exported_nets:Heads
train_data: exported_nets:rows
eval_data: {{test: exported_nets:rows}}
loss: cross_entropy
inputs: x
targets: y
outputs: logits
optimizer: adamw(lr=1e-2)
duration: 2ep
device: cpu
run_name: a
algorithms: [{{ema: {{half_life: 1ba}}}}]
{}
"""


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """Train a recorded run, with checkpoints or without, and return its folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(models.__file__, tmp_path / "exported_nets.py")

    def train(more: str = "") -> Path:
        (tmp_path / "c.yaml").write_text(CONFIGURATION.format(more))
        assert main(["train", "c.yaml"]) == 0
        capsys.readouterr()
        return tmp_path / "runs" / "a"

    yield train
    sys.modules.pop("exported_nets", None)


def weights_at(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def test_command_exports_what_a_run_evaluates(trained, capsys):
    from safetensors.torch import load_file

    run = trained("checkpoints: {folder: runs/a/checkpoints, keep: null}")
    assert main(["export", "runs/a", "--to", "safetensors", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["folder"] == str(run / "exports" / "safetensors") and printed["difference"] <= 1e-4
    assert [batch["samples"] for batch in printed["batches"]] == [1, 7]
    assert printed["export"]["origin"]["id"] == yaml.safe_load((run / "config.yaml").read_text())["x-hocket"]["run"]
    final = load_file(run / "weights.safetensors")  # of `hocket train`, which are those of evaluation
    exported = weights_at(run / "exports" / "safetensors")
    assert all(torch.equal(exported[name], final[name]) for name in final)

    assert main(["export", "runs/a/checkpoints/ep1-ba2", "--to", "safetensors", "--out", "first"]) == 0
    assert not torch.equal(weights_at(Path("first"))["classes.weight"], final["classes.weight"])
    shutil.move("runs/a/checkpoints/latest", "runs/a/checkpoints/moved")  # the newest is known without it
    shutil.copytree("runs/a/checkpoints/ep2-ba4", "elsewhere")
    assert main(["export", "elsewhere", "--to", "safetensors", "--out", "second"]) == 0
    assert torch.equal(weights_at(Path("second"))["classes.weight"], final["classes.weight"])


def test_command_reads_the_weights_of_a_run_without_checkpoints(trained, capsys):
    from safetensors.torch import load_file

    run = trained()
    assert main(["export", "runs/a", "--to", "safetensors"]) == 0
    assert "batch 7: largest difference" in capsys.readouterr().out
    final = load_file(run / "weights.safetensors")
    assert torch.equal(weights_at(run / "exports" / "safetensors")["classes.weight"], final["classes.weight"])


def test_command_names_mistakes(trained, capsys):
    run = trained()
    (run / "weights.safetensors").unlink()
    for arguments, text in (
        (["runs/b"], "runs/b: It does not exist"),
        (["c.yaml"], "c.yaml was not recorded by a run"),
        (["runs/a"], "It has neither checkpoints nor weights.safetensors"),
        (["runs/a", "--dynamic", "x"], "--dynamic x is not an input and the number of its axis"),
    ):
        assert main(["export", *arguments, "--to", "safetensors"]) == 2
        assert text in capsys.readouterr().err

"""The callback ``export``, and ``hocket export`` of recorded runs."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

import hocket.testkit
import hocket_tools
from hocket.errors import ExistingFile, Unsupported, WrongFile
from hocket_cli import main
from hocket_testkit import run_ranks
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


# --- ranks


class Drifting(models.Undecided):
    """Compute something else in every call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) + 0.01 * self.calls


def on_two_ranks(folder: Path, model: type[models.Undecided], strategy: str) -> list[str]:
    x, y = models.pairs()[0]

    def rank_main(rank: int) -> str:
        data = DataLoader(TensorDataset(x, y), 4)
        trainer = models.trainer_of(
            model(), data, loss="cross_entropy", folder=folder, run_name="a", strategy=strategy,
            callbacks=[{"export": {"to": "safetensors", "every": "1ba"}}],
        )  # fmt: skip
        try:
            trainer.fit()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return str(trainer.state.timestamp.batch)

    return run_ranks(rank_main, 2)


def test_one_of_two_ranks_writes(tmp_path):
    assert on_two_ranks(tmp_path, models.Undecided, "ddp") == ["1", "1"]
    (file,) = tmp_path.rglob("export.json")
    assert json.loads(file.read_text())["origin"]["position"]["batch"] == 1
    assert sorted(path.name for path in file.parent.parent.iterdir()) == ["safetensors"], "nothing is left beside it"


@pytest.mark.parametrize(
    ("model", "strategy", "said"),
    [
        (Drifting, "ddp", "does not compute what the run predicts"),
        (models.Undecided, "fsdp", "holds shards of the model, which cannot be exported. Type hocket export RUN"),
    ],
)
def test_all_ranks_raise(tmp_path, model, strategy, said):
    assert all(said in message for message in on_two_ranks(tmp_path, model, strategy))
    assert not list(tmp_path.rglob("export.json"))


# --- the command

HEADS = """
model: exported_nets:Heads
train_data: exported_nets:rows
eval_data: {test: exported_nets:rows}
loss: cross_entropy
inputs: x
targets: y
outputs: logits
algorithms: [{ema: {half_life: 1ba}}]
"""
COMMON = """
optimizer: adamw(lr=1e-2)
duration: 2ep
device: cpu
run_name: a
seed: 1
"""


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """Train a recorded run, and return its folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(models.__file__, tmp_path / "exported_nets.py")

    def train(more: str = "", configuration: str = HEADS) -> Path:
        (tmp_path / "c.yaml").write_text(configuration + COMMON + more)
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
    for command in (["predict", "--to"], ["predict", "--out"], ["export", "--to", "safetensors", "--out"]):
        out = f"c.yaml/o{'.safetensors' if command == ['predict', '--out'] else ''}"
        assert main([command[0], "runs/a", *command[1:], out]) == 2
        assert f"{out} cannot be written: Not a directory" in capsys.readouterr().err
    (run / "weights.safetensors").unlink()
    for arguments, text in (
        (["runs/b"], "runs/b: It does not exist"),
        (["c.yaml"], "c.yaml was not recorded by a run"),
        (["runs/a"], "It has neither checkpoints nor weights.safetensors"),
    ):
        assert main(["export", *arguments, "--to", "safetensors"]) == 2
        assert text in capsys.readouterr().err


DIGITS = """
model: exported_nets:Net
train_data: {hocket_vision:digits: {split: train}}
eval_data: {test: {hocket_vision:digits: {split: test}}}
loss: cross_entropy
algorithms: [{ema: {half_life: 5ba}}, blurpool]
"""
UNET = """
model: exported_nets:UNet
train_data: exported_nets:images
eval_data: {test: exported_nets:images}
loss: cross_entropy
"""
UNET_WITH_ADAPTERS = f"""{UNET}
algorithms: [{{adapters: {{peft: {{r: 2, target_modules: [down, middle, low, out]}}}}}}]
"""
TEXTS = """
train_data: exported_nets:texts
eval_data: {test: exported_nets:texts}
"""
ALIBI = f"""{TEXTS}
model: exported_nets:language_task
algorithms: [{{alibi: {{max_sequence_length: 48}}}}]
"""
LORA = f"""{TEXTS}
model: {{exported_nets:language_task: {{peft: {{r: 2, target_modules: [c_attn], fan_in_fan_out: true}}}}}}
"""
DICT = """
model: exported_nets:HeadsTask
train_data: exported_nets:rows
eval_data: {test: exported_nets:rows}
"""
SIZES = ["--dynamic", "image:2", "--dynamic", "image:3"]
GRAPHS, WEIGHTS = ("torch-export", "onnx"), ("safetensors",)
BOTH = ("merged", "apart")


@pytest.mark.long
@pytest.mark.parametrize(
    ("configuration", "formats", "adapters", "options"),
    [
        pytest.param(DIGITS, (*GRAPHS, *WEIGHTS), ("merged",), [], id="digits"),
        pytest.param(UNET, (*GRAPHS, *WEIGHTS), ("merged",), SIZES, id="unet"),
        pytest.param(UNET_WITH_ADAPTERS, ("torch-export", *WEIGHTS), BOTH, SIZES, id="unet with adapters"),
        pytest.param(ALIBI, (*GRAPHS, *WEIGHTS), ("merged",), [], id="alibi"),
        pytest.param(LORA, (*GRAPHS, *WEIGHTS, "huggingface"), BOTH, [], id="lora"),
        pytest.param(DICT, (*GRAPHS, *WEIGHTS), ("merged",), [], id="dict"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_command_exports_runs_in_all_formats(trained, capsys, configuration, formats, adapters, options):
    for package in ("hocket_vision", "hocket_nlp", "peft", "onnxruntime"):
        pytest.importorskip(package)
    trained(configuration=configuration)
    for to, how in itertools.product(formats, adapters):
        arguments = ["--to", to, "--adapters", how, "--out", f"{to}-{how}", *options]
        assert main(["export", "runs/a", "--json", *arguments]) == 0
        printed = json.loads(capsys.readouterr().out)
        batches = printed["batches"]
        assert [batch["samples"] for batch in batches[:2]] == [1, 7] and printed["difference"] <= 1e-4
        assert len(batches) == (2 if configuration in (DIGITS, DICT) else 3), "another length is verified"
        assert printed["export"]["adapters"] == (how if "peft" in configuration else None)
    if "huggingface" not in formats:
        assert main(["export", "runs/a", "--to", "huggingface", "--out", "no"]) == 2 and not Path("no").exists()
    if configuration == UNET_WITH_ADAPTERS:
        merged = models.UNet().eval()
        merged.load_state_dict(weights_at(Path("safetensors-merged")))  # its own names
        images = torch.randn(3, 3, 8, 24)
        for how in BOTH:
            actual = torch.export.load(f"torch-export-{how}/model.pt2").module()(image=images)
            torch.testing.assert_close(actual, merged(images), rtol=0, atol=1e-4)


# --- folders


@pytest.mark.parametrize(
    ("out", "said"), [("full", "not an earlier export"), ("file/x", "cannot be"), ("runs/a", "run itself")]
)
def test_a_folder_that_cannot_be_written_costs_no_training(tmp_path, monkeypatch, out, said):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    for file in ("full/notes", "file"):
        Path(file).touch()
    trainer = models.trainer_of(
        models.Heads(), models.rows(), inputs="x", targets="y", outputs="logits", loss="cross_entropy", folder="runs",
        run_name="a", callbacks=[{"export": {"to": "safetensors", "every": None, "out": out}}],
    )  # fmt: skip
    with pytest.raises(OSError, match=said):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0


def test_two_callbacks_do_not_replace_the_export_of_each_other(tmp_path):
    trainer = models.trainer_of(
        models.HeadsTask(), models.rows(), folder=str(tmp_path),
        callbacks=[{"export": {"to": to, "out": str(tmp_path / "out")}} for to in ("safetensors", "torch-export")],
    )  # fmt: skip
    with pytest.raises(ExistingFile, match=r"Two export callbacks, .* Give one another folder, such as"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0


@pytest.mark.parametrize("to", ["torch-export", "safetensors"])
def test_a_full_disk_is_said(tmp_path, to):
    resource = pytest.importorskip("resource")
    trainer = models.trainer_of(models.HeadsTask(), models.rows())
    trainer.fit()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))  # the files of a full disk end early too
    try:
        with pytest.raises(WrongFile, match=r"out cannot be written: .*Give another folder"):
            hocket_tools.export(trainer, to, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["export", "runs/a", "--to", "safetensors"], ["evaluate", "runs/a", "test"]])
def test_the_state_of_callbacks_is_no_matter_of_weights(trained, capsys, command):
    stopping = "{early-stopping: {monitor: test/loss, patience: 5}}"
    trained(f"checkpoints: runs/a/checkpoints\ncallbacks: [journal, {stopping}]")
    assert main([*command, "--weights", "latest"]) == 0, capsys.readouterr().err


def test_the_export_of_another_run_is_replaced_when_asked(tmp_path, capsys):
    first, second = (models.trainer_of(models.HeadsTask(), models.rows(), run_name=name) for name in "ab")
    (tmp_path / "link").symlink_to("out")
    for folder in ("out", "out", "link"):
        hocket_tools.export(first, "safetensors", tmp_path / folder)
    with pytest.raises(ExistingFile, match=r"out has an export of run a .* replace it: --overwrite on"):
        hocket_tools.export(second, "safetensors", tmp_path / "out")
    assert json.loads((tmp_path / "link/export.json").read_text())["origin"]["run"] == "a"
    assert "had an export" not in capsys.readouterr().err
    hocket_tools.export(second, "safetensors", tmp_path / "link", overwrite=True)
    assert "out had an export of run a" in capsys.readouterr().err
    with pytest.raises(ExistingFile, match="out has an export to safetensors, and this one is to torch-export"):
        hocket_tools.export(second, "torch-export", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "link"}
    assert json.loads((tmp_path / "out/export.json").read_text())["origin"]["run"] == "b"


def test_the_command_replaces_the_export_of_another_run_when_asked(trained, capsys):
    trained()
    assert main(["train", "c.yaml", "run_name=b"]) == 0
    arguments = ["--to", "safetensors", "--out", "out"]
    assert main(["export", "runs/a", *arguments]) == main(["export", "runs/a", *arguments]) == 0
    assert main(["export", "runs/b", *arguments]) == 2
    assert "out has an export of run a" in (said := capsys.readouterr().err) and "replace it: --overwrite on" in said
    assert main(["export", "runs/b", *arguments, "--overwrite"]) == 0


def test_the_callback_replaces_the_export_of_another_run_when_asked(tmp_path):
    out = tmp_path / "out"

    def train(name, **arguments):
        trainer = models.trainer_of(
            models.HeadsTask(), models.rows(), run_name=name, folder=str(tmp_path / "runs"),
            callbacks=[{"export": {"to": "safetensors", "out": str(out), "every": "1ba", **arguments}}],
        )  # fmt: skip
        try:
            trainer.fit()
        finally:
            assert json.loads((out / "export.json").read_text())["origin"]["run"] == ("b" if arguments else "a")

    train("a")
    with pytest.raises(ExistingFile, match=r"out has an export of run a .* overwrite: true in YAML"):
        train("b")
    train("b", overwrite=True)


#: Export in forks that are killed before the n-th change of the file system, and in two that race.
KILLED = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
import exported_models as models
import hocket_tools
from pathlib import Path

trainer = models.trainer_of(models.HeadsTask(), models.rows())

def export(value, at=0):
    changes = 0
    def hook(event, arguments):
        nonlocal changes
        if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "ctypes.dlsym"):
            changes += 1
            if changes == at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    torch.nn.init.constant_(trainer.state.model.network.classes.bias, value)
    hocket_tools.export(trainer, "safetensors", "out")

def forked(*arguments):
    if not (pid := os.fork()):
        try:
            export(*arguments)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def value():
    from safetensors.torch import load_file
    assert {{"model.safetensors", "export.json", "verification.json"}} == set(os.listdir("out")), os.listdir("out")
    return float(next(each for name, each in load_file("out/model.safetensors").items() if name.endswith("classes.bias"))[0])

assert ended(forked(1.0)) == 0 and value() == 1.0
at, code, before = 0, -9, 1.0
while code == -9:
    at += 1
    code = ended(forked(float(at + 1), at))
    assert value() in (before, float(at + 1)), (at, os.listdir())
    before = value()
assert code == 0 and at > 5
for _ in range(3):
    assert list(map(ended, [forked(-1.0), forked(-2.0)])) == [0, 0] and value() in (-1.0, -2.0)
assert os.listdir() == ["out"]
"""


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith(("linux", "darwin")), reason="exchanges folders")
def test_a_killed_export_leaves_the_old_or_the_new_one_and_two_leave_one(tmp_path):
    text = KILLED.format(tests=str(Path(__file__).parent))
    ended = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr

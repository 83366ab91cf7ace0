"""Recorded configurations: ``config.yaml`` of a run and of its checkpoints, and runs that repeat another bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import hocket
from hocket_cli import main

MINE = """
import hocket, torch
from torch.utils.data import DataLoader, TensorDataset

class Net(torch.nn.Sequential):
    def __init__(self, width: int = 8):
        super().__init__(torch.nn.Linear(3, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1))

def loader(count: int = 32, batch_size: int = 4):
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size, shuffle=True)

def crash(outputs, targets):
    raise RuntimeError("no loss today")

def late(outputs, targets, before=[]):
    if before:
        crash(outputs, targets)
    before.append(outputs)
    return outputs.mean()

class Early(hocket.Callback):
    def epoch_start(self, state):
        state.bus.log_metrics(state, {"early": 1.0})
"""
CONFIG = """\
model: recorded_mine:Net
loss: torch.nn:MSELoss
train_data: recorded_mine:loader
eval_data: {test: {recorded_mine:loader: {count: 8}}}
optimizer: adamw(lr=1e-2)
schedule: cosine(warmup=0.1dur)
duration: 3ep
device: cpu
seed: 7
run_name: a
checkpoints: {folder: runs/a/stored, every: 1ep}
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "recorded_mine", raising=False)
    Path("recorded_mine.py").write_text(MINE)
    Path("c.yaml").write_text(CONFIG)

    def call(*arguments: str) -> tuple[int, str, str]:
        return main([*arguments]), *capsys.readouterr()

    return call


def weights(name: str) -> dict[str, torch.Tensor]:
    return load_file(f"runs/{name}/weights.safetensors")


def same(one: str, other: str) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def files(folder: str) -> dict[str, bytes]:
    return {each.as_posix(): each.read_bytes() for each in Path(folder).rglob("*") if each.is_file()}


def test_a_run_is_repeated_bit_for_bit_from_its_folder_and_its_checkpoints(run: Run) -> None:
    assert run("train", "c.yaml")[0] == 0
    before = files("runs/a")
    assert "runs/a/config.yaml" in before
    for number, place in enumerate(("runs/a", "runs/a/stored", "runs/a/stored/ep1-ba8", "runs/a/config.yaml"), 2):
        code, _, said = run("train", "--from", place)
        assert code == 0, said
        assert f"hocket: {place} is repeated as a-{number}.\n" in said
        assert same("a", f"a-{number}")
    assert files("runs/a") == before, "the repeated run is not touched"
    assert Path("runs/a-2/checkpoints/latest").exists()
    assert yaml.safe_load(Path("runs/a-2/config.yaml").read_text())["x-hocket"]["repeats"] == "runs/a"


@pytest.mark.parametrize("name", ["resnet-50", "trial-003", "b"])
def test_only_the_number_of_an_earlier_repetition_is_counted_on(name: str, run: Run) -> None:
    short = ("duration=1ba", "checkpoints=null")
    assert run("train", "c.yaml", *short, f"run_name={name}")[0] == 0
    assert f"is repeated as {name}-2." in run("train", "--from", f"runs/{name}")[2]
    assert f"is repeated as {name}-3." in run("train", "--from", f"runs/{name}-2")[2]
    assert run("train", "--from", f"runs/{name}", "run_name=seed-7")[0] == 0
    assert "is repeated as seed-7-2." in run("train", "--from", "runs/seed-7")[2]


def test_a_repeated_run_without_a_name_of_its_own_is_numbered(run: Run) -> None:
    assert run("train", "c.yaml", "duration=1ba", "checkpoints=null", "run_name=null")[0] == 0
    (folder,) = Path("runs").iterdir()
    assert f"is repeated as {folder.name}-2." in run("train", "--from", str(folder))[2]


@pytest.mark.parametrize("place", ["c.yaml", ".", "mine", "my file.yaml"])
def test_a_configuration_that_no_run_recorded_is_not_repeated(place: str, run: Run) -> None:
    Path("mine").mkdir()
    for each in ("config.yaml", "mine/config.yaml", "my file.yaml"):
        Path(each).write_text(CONFIG)
    code, _, said = run("train", "--from", place)
    write = {".": "config.yaml", "mine": "mine/config.yaml", "my file.yaml": "'my file.yaml'"}.get(place, place)
    assert code == 2 and said.count("\n") == 1 and f"Write `hocket train {write}`" in said, said
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("place", "write"),
    [
        ("runs/a/weights.safetensors", "Give runs/a,"),
        ("runs/a/run.json", "Give runs/a,"),
        ("x.pt", "such as runs/a,"),
    ],
)
def test_another_file_of_a_run_is_no_configuration(place: str, write: str, run: Run) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text(CONFIG)
    Path("runs/a/run.json").write_text("{}")
    for each in ("runs/a/weights.safetensors", "x.pt"):
        Path(each).write_bytes(b"\x80\xff\x00")
    code, _, said = run("train", "--from", place)
    assert code == 2 and said.count("\n") == 1 and f"hocket: {place}: " in said and write in said, said


def test_with_overrides_it_is_another_run(run: Run) -> None:
    assert run("train", "c.yaml", "duration=1ep")[0] == 0
    code, _, said = run("train", "--from", "runs/a", "optimizer.adamw.lr=0.5", "run_name=b", "checkpoints.keep=1")
    assert code == 0, said
    recorded = yaml.safe_load(Path("runs/b/config.yaml").read_text())
    assert recorded["optimizer"]["adamw"]["lr"] == 0.5 and recorded["duration"] == "1ep"
    assert recorded["checkpoints"] == {"folder": "runs/b/checkpoints", "every": "1ep", "keep": 1}
    assert not same("a", "b")


def test_what_has_changed_is_said_in_one_line(run: Run) -> None:
    assert run("train", "c.yaml", "duration=1ep", "seed=null", "checkpoints=null")[0] == 0
    text = Path("runs/a/config.yaml").read_text()
    Path("runs/a/config.yaml").write_text(re.sub(r"torch: [\d.]+[^,} ]*", "torch: 1.0", text))
    Path("recorded_mine.py").write_text(MINE + "# changed\n")
    Path("c.yaml").write_text(CONFIG + "\n")
    code, _, said = run("train", "--from", "runs/a")
    (line,) = [each for each in said.splitlines() if "is repeated as" in each]
    assert code == 0
    for words in ("torch was 1.0, is", "recorded_mine has changed", "c.yaml has changed", "it has no seed="):
        assert words in line


def test_a_run_that_was_resumed_with_other_values_says_so_when_it_is_repeated(run: Run) -> None:
    assert run("train", "c.yaml", "duration=1ep", "resume=auto")[0] == 0
    assert "changed" not in yaml.safe_load(Path("runs/a/config.yaml").read_text())["x-hocket"]
    assert run("train", "c.yaml", "duration=2ep", "resume=auto")[0] == 0
    code, _, said = run("train", "--from", "runs/a")
    assert code == 0 and "perhaps not bit for bit: duration changed when the run was resumed" in said


def test_the_command_that_resumes_repeats_the_overrides_of_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOCKET_OVERRIDES", "run_name=ck checkpoints=ck")
    code, _, said = run("train", "c.yaml", "duration=1ep")
    assert code == 0
    (again,) = re.findall(r"hocket (train c.yaml .*) 'duration=", said)
    monkeypatch.delenv("HOCKET_OVERRIDES")
    assert again == "train c.yaml run_name=ck checkpoints=ck resume=auto"
    assert run(*again.split(), "duration=2ep")[0] == 0


def test_another_learning_rate_is_no_matter_of_an_evaluation(run: Run) -> None:
    assert run("train", "c.yaml", "optimizer.adamw.lr=3e-2", "duration=1ep")[0] == 0
    code, out, said = run("evaluate", "c.yaml", "--weights", "latest")
    assert code == 0 and "test/loss" in out and "configured differently" not in said
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, said = run("train", "c.yaml", "resume=auto")
    assert code == 0 and "configured differently" in said and "write the same values as then" in said
    assert "trainer.state" not in said and "begin a new run: write `resume: null`" in said


def test_the_record_has_every_key_and_what_it_was_made_from(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_OVERRIDES", "duration=2ep 'schedule=linear'")
    code, _, said = run("train", "c.yaml", "duration=1ep")
    assert code == 0 and said.startswith("hocket: HOCKET_OVERRIDES overrides duration=2ep, schedule=linear.\n")
    recorded = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    about = recorded.pop("x-hocket")
    from hocket_cli.keys import keys

    assert list(recorded) == list(keys())
    assert recorded["duration"] == "1ep", "the command line precedes the environment"
    assert "linear" in recorded["schedule"], "and that the file"
    assert recorded["optimizer"]["adamw"]["betas"] == [0.9, 0.999], "with the defaults of plug-ins"
    assert about["overrides"] == ["duration=1ep"] and about["environment"] == ["duration=2ep", "schedule=linear"]
    assert about["file"] == "c.yaml" and about["versions"]["hocket"] == hocket.__version__
    assert about["versions"]["torch"] == torch.__version__ and len(about["modules"]["recorded_mine"]) == 64


@pytest.mark.filterwarnings("ignore:predict.data. was given")
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("module", ["recorded_mine.py", "recorded_mine"])
def test_a_recorded_configuration_is_used_from_any_folder(
    moved: bool, module: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh(folder: Path) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [each for each in sys.path if not each.startswith(str(tmp_path))])
        monkeypatch.delitem(sys.modules, "recorded_mine", raising=False)

    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    project.mkdir()
    Path("recorded_mine.py").rename(project / "recorded_mine.py")
    Path("c.yaml").rename(project / "c.yaml")
    if module == "recorded_mine":
        (project / module).mkdir()
        (project / "recorded_mine.py").rename(project / module / "__init__.py")
    fresh(project)
    assert run("train", "c.yaml", "model.width=5")[0] == 0
    if moved:
        project = project.rename(tmp_path / "other")
    a = project / "runs/a"
    for arguments in (
        ["plan", f"{a}/config.yaml"],
        ["evaluate", f"{a}/config.yaml", "--weights", f"{a}/weights.safetensors"],
        ["predict", f"{a}/config.yaml", "--weights", f"{a}/weights.safetensors", "--out", "o.safetensors"],
        ["train", "--from", str(a)],
        *([] if moved else [["train", "--from", f"{a}/stored", "run_name=b"]]),
        ["train", "runs/a-2/config.yaml", "resume=auto", "duration=4ep"],  # as the run before says
    ):
        fresh(elsewhere)
        code, out, said = run(*arguments)
        assert code == 2 and not out and "recorded_mine" not in sys.modules, said
        assert f"recorded_mine ({project / module})" in said and "add --trust" in said
        fresh(elsewhere)
        code, _, said = run(*arguments, "--trust")
        assert code == 0 and "perhaps not bit for bit" not in said, said
        assert f"recorded_mine ({project / module}) is imported from where it was recorded" in said
    (project / module).rename(tmp_path / "kept")
    fresh(elsewhere)
    code, _, said = run("plan", "runs/a-2/config.yaml")
    assert code == 2 and "pip install" not in said
    assert f"nor at {project / module}, where its run had it. Type this command in the folder" in said
    older = Path("runs/a-2/config.yaml").read_text().partition("  sources:")[0]
    Path("older.yaml").write_text(older)
    code, _, said = run("plan", "older.yaml")
    assert code == 2 and f"in {elsewhere}. Type this command in the folder" in said
    Path("recorded_mine.py").symlink_to("other.py")
    Path("other.py").write_text(MINE)
    assert run("plan", "runs/a-2/config.yaml")[0] == 0, "the working folder has it"
    assert run("train", "runs/a-2/config.yaml", "resume=null", "run_name=c", "checkpoints=null")[0] == 0
    recorded = yaml.safe_load(Path("runs/c/config.yaml").read_text())["x-hocket"]["sources"]
    assert recorded == {"recorded_mine": ["../../recorded_mine.py", str(elsewhere / "recorded_mine.py")]}


@pytest.mark.parametrize("sources", [{}, {"sources": {"gone_module": []}}])
def test_a_module_that_a_record_names_is_not_to_be_installed(run: Run, sources: dict[str, object]) -> None:
    text = CONFIG.replace("recorded_mine:Net", "gone_module:Net") + yaml.safe_dump(
        {"x-hocket": {"run": "1", **sources}}
    )
    Path("c.yaml").write_text(text)
    code, _, said = run("plan", "c.yaml", "--trust")
    assert code == 2 and "There is no module 'gone_module'" in said and "pip install" not in said


def test_another_project_with_modules_of_the_same_names_is_not_mixed_in(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its module, nor one that a module imports, in the working folder or beside a copy of the run."""

    def typed(*arguments: str) -> tuple[float | None, str]:
        monkeypatch.setattr(sys, "path", [each for each in sys.path if not each.startswith(str(tmp_path))])
        for name in ("recorded_mine", "recorded_scale"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        code, out, said = run(*arguments, "--trust")
        assert code == 0, said
        losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("test/loss")]
        return (losses[-1] if losses else None), said

    project, other = tmp_path / "project", tmp_path / "other"
    for folder, scale in ((project, "1.0"), (other, "100.0")):
        folder.mkdir()
        (folder / "recorded_mine.py").write_text(f"from recorded_scale import SCALE\n{MINE}")
        (folder / "recorded_scale.py").write_text(f"SCALE = {scale}\n")
        text = (folder / "recorded_mine.py").read_text().replace("inputs.sum(1,", "SCALE * inputs.sum(1,")
        (folder / "recorded_mine.py").write_text(text + f"# {scale}\n")
    Path("c.yaml").rename(project / "c.yaml")
    monkeypatch.chdir(project)
    right, _ = typed("train", "c.yaml", "checkpoints=null")
    weights = f"{project}/runs/a/weights.safetensors"
    monkeypatch.chdir(other)
    assert typed("evaluate", f"{project}/c.yaml", "--weights", weights)[0] == right
    assert typed("evaluate", f"{project}/runs/a/config.yaml", "--weights", weights)[0] == right
    found, said = typed("evaluate", f"{project}/runs/a/config.yaml", "--weights", weights)
    assert (
        found == right and f"recorded_mine ({project}/recorded_mine.py) is imported from where it was recorded" in said
    )
    assert typed("train", "--from", f"{project}/runs/a")[0] == right
    shutil.copytree(project / "runs/a", other / "runs/copy")  # as if the project had moved, and its module had changed
    found, said = typed("evaluate", f"{other}/runs/copy/config.yaml", "--weights", weights)
    assert found != right and f"was recorded with other contents of recorded_mine ({other}/recorded_mine.py)" in said


def test_an_edit_in_a_copy_of_a_project_counts_whatever_the_module_is_called(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    names = ("recorded_a", "recorded_mine", "recorded_z")
    for name in names:
        Path(f"{name}.py").write_text(f"{MINE}\nWHERE = 'first'\n")
        Path(f"{name}.py").rename(project / f"{name}.py")
    text = CONFIG.replace("model: recorded_mine", "model: recorded_a").replace("{recorded_mine:", "{recorded_z:")
    (project / "c.yaml").write_text(text)

    def fresh() -> None:
        monkeypatch.setattr(sys, "path", [each for each in sys.path if not each.startswith(str(tmp_path))])
        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)

    monkeypatch.chdir(project)
    fresh()
    assert run("train", "c.yaml", "checkpoints=null")[0] == 0
    for edited in names:
        copy = Path(shutil.copytree(project, tmp_path / f"copy-{edited}"))
        (copy / f"{edited}.py").write_text(f"{MINE}\nWHERE = 'edited'\n")
        monkeypatch.chdir(copy)
        for arguments in (("plan", "runs/a/config.yaml"), ("train", "--from", "runs/a")):
            fresh()
            code, _, said = run(*arguments)
            assert code == 0 and edited in said
            assert {sys.modules[name].__file__ for name in names} == {f"{copy}/{name}.py" for name in names}


@pytest.mark.parametrize(
    "made",
    ["3", "{modules: [a]}", "{sources: {recorded_mine: null}}", "{sources: {recorded_mine: [1]}, modules: text}",
     "{sources: [a]}", "{modules: {1: 2}, sources: {recorded_mine: text}}"],
)  # fmt: skip
def test_what_a_run_did_not_record_is_ignored(made: str, run: Run) -> None:
    Path("c.yaml").write_text(f"{CONFIG}x-hocket: {made}\n")
    assert run("plan", "c.yaml")[0] == 0


def test_a_checkpoint_that_is_gone_hinders_no_evaluation(run: Run) -> None:
    assert run("train", "c.yaml", "duration=1ep")[0] == 0
    given = ("evaluate", "c.yaml", "--weights", "runs/a/weights.safetensors")
    whole = run(*given)
    for resume in ("gone/ep1-ba8", "latest", "runs/a/weights.safetensors"):
        assert run(*given, f"resume={resume}") == whole


def test_the_printed_configuration_is_the_same_run(run: Run) -> None:
    assert run("train", "c.yaml", "duration=1ep")[0] == 0
    code, printed, _ = run("train", "c.yaml", "duration=1ep", "run_name=b", "checkpoints=null", "--print-config")
    Path("printed.yaml").write_text(printed)
    assert code == 0 and run("train", "printed.yaml")[0] == 0
    assert same("a", "b")


def test_a_run_that_fails_before_its_first_step_leaves_its_name_free(run: Run) -> None:
    for loggers in ("[]", "[jsonl]"):
        with pytest.raises(RuntimeError, match="no loss today"):
            run("train", "c.yaml", "loss=recorded_mine:crash", "checkpoints=null", f"loggers={loggers}")
        assert not Path("runs/a").exists()
    code, _, said = run("train", "c.yaml", "checkpoints=null", "loggers=[jsonl]", "callbacks=[sample-visualizer]")
    assert code == 2 and "Write `on=test`" in said  # when the fit starts, after the hyperparameters were logged
    assert not Path("runs/a").exists()
    assert run("train", "c.yaml", "duration=1ep")[0] == 0


@pytest.mark.parametrize(
    "more", ["callbacks=[recorded_mine:Early]", "callbacks=[heartbeat]", "loss=recorded_mine:late"], ids=str
)
def test_a_run_that_fails_keeps_what_it_recorded(more: str, run: Run) -> None:
    loss = [] if more.startswith("loss=") else ["loss=recorded_mine:crash"]
    with pytest.raises(RuntimeError, match="no loss today"):
        run("train", "c.yaml", *loss, "checkpoints=null", "loggers=[jsonl]", more)
    assert Path("runs/a/metrics.jsonl").is_file() and Path("runs/a/summary.json").is_file()
    assert "Early" not in more or '"early": 1.0' in Path("runs/a/metrics.jsonl").read_text()


def test_a_run_that_takes_over_a_folder_keeps_the_rows_in_it(run: Run) -> None:
    """The earlier run was killed before its first checkpoint."""
    with pytest.raises(RuntimeError, match="no loss today"):
        run("train", "c.yaml", "loss=recorded_mine:late", "checkpoints=kept", "loggers=[jsonl]")
    Path("runs/a/summary.json").unlink()
    with Path("runs/a/metrics.jsonl").open("a") as file:
        file.write('{"batch": 1, "train/loss": 3.0}\n')
    assert run("train", "c.yaml", "checkpoints=kept", "loggers=[]", "callbacks=[sample-visualizer]")[0] == 2
    assert '{"batch": 1, "train/loss": 3.0}' in Path("runs/a/metrics.jsonl").read_text()


def test_python_runs_have_no_configuration(run: Run) -> None:
    data = [(torch.randn(4, 3), torch.randn(4, 1))] * 4
    hocket.Trainer(
        model=torch.nn.Linear(3, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", train_data=data, duration="1ep",
        device="cpu", run_name="p", loggers=["jsonl"], checkpoints="stored",
    ).fit()  # fmt: skip
    assert not Path("runs/p/config.yaml").exists()
    for place, words in (
        ("stored", "records no configuration"),
        ("runs/p", "has no config.yaml"),
        ("runs/q", "not exist"),
    ):
        code, _, said = run("train", "--from", place)
        assert code == 2 and said.count("\n") == 1 and words in said


def test_tests_of_a_run_write_nothing(run: Run) -> None:
    assert run("train", "c.yaml", "fast_dev_run=2")[0] == 0
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "runs/a", "c.yaml"], "one too many"),
        (["--from", "recorded_mine.py"], "It is a file, and no configuration. Give the folder of a run"),
        (["--from", "runs/a", "optimizer.adamw.lrr=1"], "Did you mean 'lr'?"),
        (["--from"], "--from of train needs one argument"),
    ],
)
def test_errors(arguments: list[str], words: str, run: Run) -> None:
    assert run("train", "c.yaml", "duration=1ba", "checkpoints=null")[0] == 0
    code, _, said = run("train", *arguments)
    assert code == 2 and said.count("\n") == 1 and words in said


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("durration=1ep", "'durration=1ep' in HOCKET_OVERRIDES: 'durration' is not a key"),
        ("optimizer.adamw.lr=fast", "'optimizer.adamw.lr=fast' in HOCKET_OVERRIDES: `optimizer.adamw.lr=fast` is text"),
        ("duration", "in HOCKET_OVERRIDES: An override is key=value"),
        ("run_name='x", "Close each quote"),
    ],
)
def test_errors_of_the_environment(value: str, words: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_OVERRIDES", value)
    code, _, said = run("train", "c.yaml")
    assert code == 2 and words in said.splitlines()[-1], said
    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_written_is_named(run: Run) -> None:
    Path("runs").mkdir()
    Path("runs/lost").symlink_to("nowhere")
    code, _, said = run("train", "c.yaml", "checkpoints=null", "run_name=lost")
    assert code == 2 and said.count("\n") == 1, said
    assert "Nothing can be written to runs/lost: File exists." in said and "such as folder='runs'." in said


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="this user may write everywhere")
def test_a_folder_without_permission_is_named(run: Run) -> None:
    Path("locked").mkdir(mode=0o500)
    code, _, said = run("train", "c.yaml", "checkpoints=null", "folder=locked")
    assert code == 2 and said.count("\n") == 1 and "Nothing can be written to locked/a: Permission denied." in said, (
        said
    )

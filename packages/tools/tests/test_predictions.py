"""Predictions in files: the rows of `Trainer.predict`, whatever the number of ranks, formats and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hocket
from hocket.errors import ExistingFile
from hocket_checkpoints.storage.locks import InUse
from hocket_cli import main
from hocket_testkit import run_ranks
from hocket_tools import predict_into, read_predictions
from hocket_tools.judging.ordered import Sharded

EMA = pytest.importorskip("hocket_general").EMA

INPUTS = torch.randn(83, 4, generator=torch.Generator().manual_seed(0))


def loader(batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(INPUTS, INPUTS.sum(1)), batch_size, **options)


def trainer(model: nn.Module | None = None, **options: Any) -> hocket.Trainer:
    torch.manual_seed(0)
    return hocket.Trainer(model=model or nn.Linear(4, 3), device="cpu", **options)


def files(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(INPUTS, INPUTS.sum(1), strict=True)


@pytest.mark.parametrize("suffix", ["npz", "parquet", "jsonl"])
@pytest.mark.parametrize("data", ["loader", "shuffled", "stream", "list"])
def test_rows_are_those_of_predict(tmp_path: Path, suffix: Any, data: str) -> None:
    given: Any = {
        "loader": loader, "shuffled": lambda: loader(shuffle=True), "stream": lambda: DataLoader(Stream(), 8),
        "list": lambda: list(loader()),
    }[data]()  # fmt: skip
    run = trainer()
    assert predict_into(run, given, tmp_path / "p", format=suffix, batches_per_file=3) == 83
    found = read_predictions(tmp_path / "p")
    expected = torch.cat(run.predict(loader())).numpy()
    assert found["output"].dtype == np.float32 and np.array_equal(found["output"], expected)
    assert list(found) == (["index", "output"] if data in ("loader", "shuffled") else ["output"])
    assert [len(each["output"]) for each in found.parts()] == [24, 24, 24, 11] and found.rows == 83
    if data == "loader":
        assert found["index"].tolist() == list(range(83))


class Parts(NamedTuple):
    logits: torch.Tensor
    states: tuple[torch.Tensor, torch.Tensor]
    loss: torch.Tensor


class Several(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        outputs = super().forward(inputs)
        states = outputs.double().unsqueeze(2).expand(-1, -1, 2), outputs.bfloat16()
        return {
            "parts": Parts(outputs, states, outputs.mean()),
            "text": [f"é{each:.3f}" for each in outputs[:, 0].tolist()],
        }


@pytest.mark.parametrize("suffix", ["npz", "parquet", "jsonl"])
def test_parts_of_outputs_are_columns(tmp_path: Path, suffix: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(Several(4, 3))
    predict_into(run, loader(), tmp_path / "p", format=suffix, batches_per_file=2)
    found = read_predictions(tmp_path / "p")
    expected = run.predict(loader())
    assert sorted(found) == ["index", "parts/logits", "parts/states/0", "parts/states/1", "text"]
    assert np.array_equal(found["parts/logits"], torch.cat([each["parts"].logits for each in expected]).numpy())
    states = torch.cat([each["parts"].states[0] for each in expected]).numpy()
    assert found["parts/states/0"].shape == (83, 3, 2) and np.array_equal(found["parts/states/0"], states)
    assert found["parts/states/1"].dtype == np.float32
    assert found["text"].tolist() == [text for each in expected for text in each["text"]]
    assert capsys.readouterr().err.count("parts/loss") == 1
    with pytest.raises(KeyError, match=r"no column 'logits'. The columns are index"):
        found["logits"]


class Growing(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        return {"text": ["x" * len(inputs) ** 2] * len(inputs)}


@pytest.mark.parametrize("suffix", ["npz", "parquet", "jsonl"])
def test_texts_of_later_files_may_be_longer(tmp_path: Path, suffix: Any) -> None:
    batches = [torch.ones(2, 4), torch.ones(5, 4)]
    predict_into(trainer(Growing(4, 3)), batches, tmp_path / "p", format=suffix, batches_per_file=1)
    assert read_predictions(tmp_path / "p")["text"].tolist() == ["x" * 4] * 2 + ["x" * 25] * 5


class Ragged(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        outputs = super().forward(inputs)
        return outputs[:, : 2 if len(inputs) < 8 else 3] / torch.tensor([1.0, 0.0, 1.0])[: 2 if len(inputs) < 8 else 3]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rows_of_several_shapes_and_infinite_values(tmp_path: Path, suffix: Any) -> None:
    run = trainer(Ragged(4, 3))
    predict_into(run, loader(), tmp_path / "p", format=suffix)
    found, expected = read_predictions(tmp_path / "p")["output"], run.predict(loader())
    rows = [row.numpy() for each in expected for row in each]
    assert len(found) == 83 and all(np.array_equal(*pair) for pair in zip(found, rows, strict=True))
    assert not np.isfinite(found[0][1])
    with pytest.raises(ValueError, match=r"rows of several shapes.*--format parquet"):
        predict_into(run, loader(), tmp_path / "q")


def test_a_call_continues_after_an_error_and_reads_only_what_is_missing(tmp_path: Path) -> None:
    class Counted(TensorDataset):
        read: list[int] = []
        fails = True

        def __getitem__(self, index: int) -> Any:
            if index == 60 and self.fails:
                raise OSError("the disk is gone")
            self.read.append(index)
            return super().__getitem__(index)

    data = Counted(INPUTS, INPUTS.sum(1))
    run = trainer()
    with pytest.raises(OSError, match="disk"):
        predict_into(run, DataLoader(data, 8), tmp_path / "p", batches_per_file=2)
    assert sorted(files(tmp_path / "p")) == [
        ".columns.json", "part-000000.npz", "part-000001.npz", "part-000002.npz", "predictions.json",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not complete"):
        read_predictions(tmp_path / "p")
    Counted.fails = False
    data.read.clear()
    assert predict_into(run, DataLoader(data, 8), tmp_path / "p", batches_per_file=2) == 83
    assert min(data.read) == 48
    predict_into(run, loader(), tmp_path / "q", batches_per_file=2, name="")
    assert {name: each for name, each in files(tmp_path / "p").items()} == files(tmp_path / "q")
    data.read.clear()
    assert predict_into(run, DataLoader(data, 8), tmp_path / "p", batches_per_file=2) == 83 and not data.read


def test_memory_is_bounded_by_a_file(tmp_path: Path) -> None:
    import gc
    import weakref

    alive: list[Any] = []
    most = 0

    class Watched(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            nonlocal most
            outputs = super().forward(inputs)
            gc.collect()
            alive.append(weakref.ref(outputs.untyped_storage()))
            most = max(most, sum(each() is not None for each in alive))
            return outputs

    predict_into(trainer(Watched(4, 3)), loader(4), tmp_path / "p", batches_per_file=3)
    assert len(alive) == 21 and most <= 5


def test_other_predictions_and_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    predict_into(trainer(), loader(), folder)
    before = files(folder)
    for options, data, said in (
        ({}, loader(4), "in data"),
        ({"format": "jsonl"}, loader(), "in format"),
        ({"batches_per_file": 2, "name": "x"}, loader(), "in data, batches_per_file"),
    ):
        with pytest.raises(ExistingFile, match=rf"{said}\. Give another path to keep both, or replace it: --overwrite"):
            predict_into(trainer(), data, folder, **options)
    with pytest.raises(ExistingFile, match=r"in weights\."):
        predict_into(trainer(nn.Linear(4, 3)), loader(), folder) if torch.manual_seed(1) else None
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").write_text("")
    with pytest.raises(ExistingFile, match="is there, and is not of earlier predictions, which alone is replaced"):
        predict_into(trainer(), loader(), tmp_path / "other")
    with pytest.raises(OSError, match=r"r\.npz is named like a file, and a folder is written\. Give .*r\."):
        predict_into(trainer(), loader(), tmp_path / "r.npz")
    with pytest.raises(TypeError, match=r"^predict_into\(data\) is one Tensor, and not batches\. Give a loader"):
        predict_into(trainer(), INPUTS, tmp_path / "r")
    with pytest.raises(ValueError, match="format='csv'"):
        predict_into(trainer(), loader(), folder, format="csv")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no sample"):
        predict_into(trainer(), [], tmp_path / "empty")
    assert files(folder) == before
    predict_into(trainer(), loader(), folder, format="jsonl", batches_per_file=1, overwrite=True)
    predict_into(trainer(), loader(), tmp_path / "new", format="jsonl", batches_per_file=1)
    assert files(folder) == files(tmp_path / "new")
    with pytest.raises(ExistingFile, match="not of earlier predictions"):
        predict_into(trainer(), loader(), tmp_path / "other", overwrite=True)


@pytest.mark.parametrize("suffix", ["npz", "parquet", "jsonl"])
@pytest.mark.parametrize("complete", [True, False])
def test_damaged_files_are_named_and_written_again(
    tmp_path: Path, suffix: Any, complete: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "p"
    predict_into(trainer(), loader(), folder, format=suffix, batches_per_file=3)
    before = files(folder)
    path = folder / f"part-000001.{suffix}"
    for cut in (before[path.name][:100], before[path.name] + b"{}\n", b""):
        path.write_bytes(cut)
        for read in (lambda found: found["output"], lambda found: list(found.parts())):
            with pytest.raises(ValueError, match=rf"{path.name} is damaged: .* Repeat the command") as raised:
                read(read_predictions(folder))
            assert "\n" not in str(raised.value)
        if not complete and cut == before[path.name][:100]:  # as of a killed command, which did not record sizes
            about = json.loads(before["predictions.json"])
            columns = json.dumps(about.pop("columns"))
            (folder / ".columns.json").write_text(columns)
            about = {"version": 1, "made_of": about["made_of"], "complete": False}
            (folder / "predictions.json").write_text(json.dumps(about))
        assert predict_into(trainer(), loader(), folder, format=suffix, batches_per_file=3) == 83
        assert files(folder) == before and f"{path.name} is damaged, and is written again." in capsys.readouterr().err
    (folder / "predictions.json").write_text('{"version": 1')
    with pytest.raises(ValueError, match=r"has a damaged predictions\.json"):
        read_predictions(folder)
    with pytest.raises(ExistingFile, match=r"a damaged predictions\.json.* --overwrite"):
        predict_into(trainer(), loader(), folder, format=suffix, batches_per_file=3)
    assert predict_into(trainer(), loader(), folder, format=suffix, batches_per_file=3, overwrite=True) == 83


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("done", [[], [0, 2], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("stream", [False, True])
def test_every_batch_is_read_by_one_rank_and_all_ranks_take_equally_many_steps(
    ranks: int, done: Any, stream: bool
) -> None:
    read, steps = [], set()
    for rank in range(ranks):
        data = Sharded(list(range(14)) if stream else DataLoader(TensorDataset(torch.arange(14)), 1), 3, rank, ranks)
        data.done = done
        batches = list(data._read())
        steps.add(len(batches))
        real = [each for each in batches if not isinstance(each, hocket.data.Padding)]
        read += [(int(each[0]) if not stream else each) for each in real]
        assert len({int(each) // 3 for each in read}) == len(set(int(each) // 3 for each in read))
    assert sorted(read) == [each for each in range(14) if each // 3 not in done] and len(steps) == 1


def two_ranks(rank: int, folder: str, kind: str, limit: Any) -> int:
    run = trainer(strategy="ddp", limit_predict=limit)
    data: Any = {"loader": loader, "stream": lambda: DataLoader(Stream(), 8)}[kind]()
    return predict_into(run, data, folder, batches_per_file=2)


@pytest.mark.parametrize(("kind", "limit"), [("loader", None), ("stream", None), ("loader", 0.5)])
def test_two_ranks_write_the_files_of_one(tmp_path: Path, kind: str, limit: Any) -> None:
    rows = run_ranks(two_ranks, 2, str(tmp_path / "two"), kind, limit)
    one = trainer(limit_predict=limit)
    data: Any = loader() if kind == "loader" else DataLoader(Stream(), 8)
    assert (
        [predict_into(one, data, tmp_path / "one", batches_per_file=2)] * 2 == rows == ([40] * 2 if limit else [83] * 2)
    )
    assert files(tmp_path / "one") == files(tmp_path / "two")
    (tmp_path / "two/part-000001.npz").unlink()  # as if killed; one rank continues what two began
    predict_into(one, data, tmp_path / "two", batches_per_file=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_the_averages_of_a_checkpoint_predict(tmp_path: Path) -> None:
    def fitted() -> hocket.Trainer:
        return trainer(
            loss="mse", optimizer="sgd(lr=0.1)", train_data=[(INPUTS, INPUTS[:, :3])] * 8, duration="1ep",
            algorithms=[EMA(half_life="2ba")], checkpoints=str(tmp_path / "ck"), resume="auto",
        )  # fmt: skip

    run = fitted()
    run.fit()
    newest = str(sorted((tmp_path / "ck").glob("ep*"))[-1])
    expected = torch.cat(run.predict(loader())).numpy()
    predict_into(run, loader(), tmp_path / "a")
    predict_into(fitted(), loader(), tmp_path / "b", checkpoint=newest)
    assert np.array_equal(read_predictions(tmp_path / "a")["output"], expected)
    assert files(tmp_path / "a") == files(tmp_path / "b")


MINE = """
import os
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

INPUTS = torch.arange(240.0).view(60, 4) / 240

class Slow(torch.nn.Linear):
    def forward(self, inputs):
        time.sleep(float(os.environ.get("SLEEP", 0)))
        return super().forward(inputs)

def data():
    return DataLoader(TensorDataset(INPUTS, INPUTS[:, :1]), 2)

def broken():
    inputs = INPUTS.clone()
    inputs[7], inputs[9, 0] = float("nan"), float("inf")
    return DataLoader(TensorDataset(inputs, inputs[:, :1]), 2)

def stream():
    return iter([*broken()])
"""
CONFIGURATION = """
model: {mine:Slow: {in_features: 4, out_features: 1}}
train_data: mine:data
loss: mse
optimizer: sgd(lr=0.1)
duration: 1ep
device: cpu
seed: 1
run_name: r
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("c.yaml").write_text(CONFIGURATION)
    sys.modules.pop("mine", None)
    assert main(["train", "c.yaml"]) == 0
    return tmp_path


def test_the_command_writes_predictions_of_a_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["predict", "runs/r", "mine:data", "--to", "p", "--json", "--format", "jsonl"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": 60, "path": "p"}
    assert main(["predict", "runs/r", "mine:data", "--to", "p", "--format", "jsonl"]) == 0
    assert capsys.readouterr().out == "60 rows in p\n"
    assert main(["predict", "runs/r", "mine:data", "--out", "o.safetensors"]) == 0
    from safetensors.torch import load_file

    assert np.array_equal(load_file("o.safetensors")["outputs"].numpy(), read_predictions("p")["output"])
    for data, to, where in (
        ("broken", ["--to", "b", "--batches-per-file", "3"], "sample 7, sample 9"),
        ("stream", ["--to", "s", "--batches-per-file", "3"], "row 1 of part-000001.npz, row 3 of part-000001.npz"),
        ("broken", ["--out", "b.safetensors"], "row 7, row 9"),
    ):
        assert main(["predict", "runs/r", f"mine:{data}", *to]) == 0
        said = capsys.readouterr().err
        assert said.count("NaN") == 1 and f"NaN or infinity in the outputs of 2 of 60 rows: {where}. Look" in said
    for options, said in (
        (["--out", "o.safetensors", "--to", "p"], "--to p and --out o.safetensors were both given"),
        (["--out", "o.safetensors", "--format", "jsonl"], "--format jsonl has no effect without --to"),
    ):
        assert main(["predict", "runs/r", "mine:data", *options]) == 2
        assert said in capsys.readouterr().err
    before = Path("o.safetensors").read_bytes()
    assert main(["predict", "runs/r", "mine:data", "--out", "o.safetensors"]) == 0
    assert "replaced" not in capsys.readouterr().err and Path("o.safetensors").read_bytes() == before
    assert main(["predict", "runs/r", "mine:broken", "--out", "o.safetensors"]) == 2
    said = capsys.readouterr().err
    assert "o.safetensors has predictions that differ from those of this command in data, samples. Give another" in said
    assert Path("o.safetensors").read_bytes() == before
    assert main(["predict", "runs/r", "mine:broken", "--out", "o.safetensors", "--overwrite"]) == 0
    assert "o.safetensors had predictions that differ" in capsys.readouterr().err
    assert main(["predict", "runs/r", "mine:broken", "--to", "p"]) == 2
    assert (
        "p has predictions that differ from those of this command in data, format, samples. Give"
        in capsys.readouterr().err
    )
    assert (
        main(["predict", "runs/r", "mine:broken", "--to", "p", "--overwrite"]) == 0
        and Path("p/part-000000.npz").exists()
    )
    assert main(["predict", "runs/r", "mine:data", "--out", "runs/r/weights.safetensors", "--overwrite"]) == 2
    assert "weights.safetensors is there, and is not a file of outputs" in capsys.readouterr().err
    assert main(["predict", "runs/r", "mine:data"]) == 2
    assert "one of --to and --out" in capsys.readouterr().err
    assert main(["predict", "runs/r", "test", "--to", "q"]) == 2
    assert "There is no evaluation set 'test'; the configuration has none." in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_command_is_continued_with_the_same_bytes(project: Path, how: signal.Signals) -> None:
    arguments = ["predict", "runs/r", "mine:data", "--batches-per-file", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLEEP": "0.2"}
    killed = subprocess.Popen([sys.executable, "-m", "hocket", *arguments, "--to", "p"], env=environment)
    until = time.monotonic() + 120
    while not list(project.glob("p/part-000002.*")) and time.monotonic() < until:
        time.sleep(0.05)
    killed.send_signal(how)
    killed.wait(60)
    there = files(project / "p")
    kept = {name: each for name, each in there.items() if name.startswith("part-")}
    assert 3 <= len(kept) < 15
    if how == signal.SIGINT:
        assert not any(name.startswith(".part") for name in there)
    assert main([*arguments, "--to", "p"]) == main([*arguments, "--to", "q"]) == 0
    found = {name: each for name, each in files(project / "p").items() if name[0] != "."}
    expected = files(project / "q")
    manifests = [json.loads(each.pop("predictions.json")) for each in (found, expected)]
    for each in manifests:  # pytest's process has imported more files
        each["made_of"].pop("code")
    assert manifests[0] == manifests[1]
    assert found == expected and kept.items() <= found.items()


@pytest.mark.long
def test_two_processes_do_not_write_into_one_folder(project: Path) -> None:
    command = [sys.executable, "-m", "hocket", "predict", "runs/r", "mine:data", "--to", "p"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLEEP": "0.2"}
    both = [
        subprocess.Popen([*command, "--format", each], env=environment, stderr=subprocess.PIPE, text=True)
        for each in ("npz", "jsonl")
    ]
    said = [each.communicate(timeout=240)[1] for each in both]
    codes = [each.returncode for each in both]
    assert sorted(codes) == [0, 2], said
    refused = said[codes.index(2)]
    assert "End that one first, or give this one another folder." in refused or "differ from those of this" in refused
    assert {each.name for each in (project / "p").iterdir()} == {
        "predictions.json", f"part-000000.{('npz', 'jsonl')[codes.index(0)]}"
    }  # fmt: skip
    assert read_predictions(project / "p").rows == json.loads((project / "p/predictions.json").read_text())["rows"]


def test_a_folder_is_locked_while_predictions_are_written(tmp_path: Path) -> None:
    class Nested(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with pytest.raises(
                InUse, match=r"p is in use: run '.+' \(process .+ writes to it\. End that one first, or give"
            ):
                predict_into(trainer(), loader(), tmp_path / "p", overwrite=True)
            return super().forward(inputs)

    predict_into(trainer(Nested(4, 3)), loader(), tmp_path / "p")
    assert files(tmp_path / "p").keys() == {"predictions.json", "part-000000.npz"}


class Drawn(torch.utils.data.Dataset[Any]):
    """Samples from a file, so to say: not tensors in memory."""

    def __init__(self, inputs: torch.Tensor, noise: bool = False) -> None:
        self.inputs, self.noise = inputs, noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.inputs[at] + self.noise * torch.rand(4)


@pytest.mark.parametrize("kind", ["tensors", "samples", "list"])
def test_predictions_of_other_samples_are_not_kept(tmp_path: Path, kind: str) -> None:
    def data(inputs: torch.Tensor) -> Any:
        if kind == "list":
            return list(inputs.split(8))
        return DataLoader(Drawn(inputs) if kind == "samples" else TensorDataset(inputs), 8)

    run, other = trainer(), INPUTS.clone()
    other[50 if kind == "tensors" else -1] += 1
    predict_into(run, data(INPUTS), tmp_path / "p", batches_per_file=3)
    assert predict_into(run, data(INPUTS), tmp_path / "p", batches_per_file=3) == 83
    for given in (other, INPUTS[:-1]):
        with pytest.raises(ExistingFile, match=r"predictions that differ .*samples"):
            predict_into(run, data(given), tmp_path / "p", batches_per_file=3)


def test_samples_that_are_drawn_are_continued_and_reading_them_draws_nothing(tmp_path: Path) -> None:
    run, data = trainer(), DataLoader(Drawn(INPUTS, noise=True), 8)
    torch.manual_seed(3)
    predict_into(run, data, tmp_path / "p")
    torch.manual_seed(3)
    expected = torch.cat(run.predict(data)).numpy()
    np.testing.assert_array_equal(read_predictions(tmp_path / "p")["output"], expected)
    assert predict_into(run, data, tmp_path / "p") == 83


def test_predictions_of_another_model_or_code_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("of_the_model.py").write_text("FACTOR = 1\n")
    monkeypatch.delitem(sys.modules, "of_the_model", raising=False)
    __import__("of_the_model")
    linear = nn.Linear(4, 3)
    predict_into(trainer(nn.Sequential(linear, nn.ReLU())), loader(), "p")
    with pytest.raises(ExistingFile, match=r"in model\."):
        predict_into(trainer(nn.Sequential(linear, nn.Sigmoid())), loader(), "p")
    Path("of_the_model.py").write_text("FACTOR = 2\n")
    with pytest.raises(ExistingFile, match=r"in code \(of_the_model.py\)\."):
        predict_into(trainer(nn.Sequential(linear, nn.ReLU())), loader(), "p")

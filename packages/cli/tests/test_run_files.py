"""What the logger jsonl writes beside the metrics, also when the run is killed, and how runs are listed from it."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hocket
from hocket.basics import run_files as files
from hocket.basics.direction import mode_of
from hocket.plugins.delivery import LoggerWarning
from hocket.schedules import Plateau
from hocket.state.simple_metrics import METRICS
from hocket_cli import main, run_listing
from hocket_insight.callbacks.early_stopping import EarlyStopping
from hocket_loggers.png import png
from hocket_loggers.resumable_lines import LinesFile

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


class Shows(hocket.Callback):
    """Logs every kind of record every second batch, of values that follow from the batch."""

    def __init__(self, fails: int | None = None) -> None:
        self.fails = fails

    def batch_end(self, state: hocket.State) -> None:
        now, bus = state.timestamp.batch, state.bus
        if now % 2 == 0:
            bus.log_images(state, "samples/input", [torch.full((3, 4, 5), now / 100), torch.zeros(1, 2, 2)])
            bus.log_table(state, "samples/rows", ["a", "b"], [[now, "x"]])
            bus.log_text(state, "samples/text", f"batch {now}")
            bus.log_histogram(state, "weights", [1.0, now], [0.0, 0.5, 1.0])
        if now == self.fails:
            raise ValueError("as asked")


def make(name: str = "a", fails: int | None = None, **changes: Any) -> hocket.Trainer:
    torch.manual_seed(0)
    data = [(torch.ones(2, 3), torch.zeros(2, 1))] * 5
    arguments = {
        "model": torch.nn.Linear(3, 1), "loss": torch.nn.MSELoss(), "optimizer": "sgd(lr=0.1)", "train_data": data,
        "eval_data": {"test": data}, "duration": "2ep", "device": "cpu", "seed": 1, "log_every": "1ba", "loggers": ["jsonl"],
        "callbacks": [Shows(fails)], "run_name": name, "folder": "runs", "resume": "auto",
        "checkpoints": hocket.Checkpoints(f"runs/{name}/checkpoints", every="3ba", keep=None, best=("test/loss", "min", 1)),
    }  # fmt: skip
    return hocket.Trainer(**(arguments | changes))


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of all files, and the images, without what differs between runs."""
    lines = list(files.objects(folder / "metrics.jsonl")) + list(files.objects(folder / "media/metrics.jsonl"))
    for line in lines:
        line["images of"] = [(folder / "media" / name).read_bytes() for name in line.pop("files", ())]
        for key in ("run", "seconds", "hyperparameters"):
            line.pop(key, None)
    return lines


def images(folder: Path) -> int:
    return len(list(folder.glob("media/*/*.png")))


def test_after_a_kill_every_record_is_there_once() -> None:
    """The process ends within a line of the index, after its images were written."""

    def killed() -> None:
        write = LinesFile.write

        def half(self: LinesFile, *lines: Any) -> None:
            write(self, *lines)
            if lines[-1].get("batch") == 8 and "images" in lines[-1]:
                assert self._file is not None
                self._file.write(b'{"table": "samples/ro')
                os._exit(9)

        LinesFile.write = half  # type: ignore[method-assign]
        make().fit()

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join(60)
    assert process.exitcode == 9 and images(Path("runs/a")) == 8
    make().fit()
    make("b").fit()
    assert records(Path("runs/a")) == records(Path("runs/b"))
    assert images(Path("runs/a")) == images(Path("runs/b")) == 10


def test_a_run_resumed_from_before_its_first_record_has_none_of_the_later_ones() -> None:
    make().fit()
    for name in ("ep1-ba6", "ep1-ba5", "ep1-ba9", "ep2-ba10", "latest"):
        path = Path("runs/a/checkpoints") / name
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    left = sorted(each.name for each in Path("runs/a/checkpoints").iterdir() if each.is_dir())
    assert left == ["ep0-ba3"]
    make(callbacks=[]).fit()
    assert images(Path("runs/a")) == 2  # of batch 2, before the checkpoint
    batches = [line["batch"] for line in files.objects(Path("runs/a/media/metrics.jsonl")) if "batch" in line]
    assert batches == [2] * 4


def test_images_are_what_another_reader_reads() -> None:
    image = pytest.importorskip("PIL.Image")
    given = torch.randint(256, (3, 7, 5), dtype=torch.uint8)
    Path("a.png").write_bytes(png(given))
    read = image.open("a.png")
    assert read.mode == "RGB" and list(read.tobytes()) == given.permute(1, 2, 0).flatten().tolist()
    Path("b.png").write_bytes(png(torch.tensor([[0.0, 0.5], [1.0, math.nan]])))
    assert list(image.open("b.png").tobytes()) == [0, 128, 255, 0]
    Path("c.png").write_bytes(png(torch.zeros(4, 3000, 10)))
    assert image.open("c.png").size == (4, 1000) and image.open("c.png").mode == "RGBA"
    with pytest.raises(ValueError, match=r"shape \(7, 2, 2\)"):
        png(torch.zeros(7, 2, 2))


def test_records_are_bounded() -> None:
    trainer = make(callbacks=[], checkpoints=None, resume=None)
    state, bus = trainer.state, trainer.state.bus
    bus.log_images(state, "i", [torch.zeros(1, 2, 2)] * 20)
    bus.log_table(state, "t", ["a"], [["x" * 1000]] * 200)
    bus.log_text(state, "x", "y" * 30_000)
    trainer.close()
    _, i, t, x = files.objects(trainer.state.run_folder / "media/metrics.jsonl")
    assert (len(i["files"]), i["omitted"]) == (16, 4)
    assert (len(t["rows"]), t["omitted"], len(t["rows"][0][0])) == (100, 100, 501)
    assert (len(x["content"]), x["omitted"]) == (20_000, 10_000)


# --- the summary, and the list of runs


def test_the_summary_says_how_the_run_ended_and_what_it_was() -> None:
    result = make(profile_plugins=True).fit()
    summary = files.content(result.run_folder / "summary.json")
    assert (
        summary["status"] == "finished"
        and summary["position"]["batch"] == 10
        and summary["best"] == ["test/loss", "min"]
    )
    assert summary["plan"]["events"]["batch_end"][0] == "shows" and summary["system"]["torch"] == torch.__version__
    assert {each["plugin"]: each["calls"] for each in summary["costs"] if each["hook"] == "batch_end"}["shows"] == 10
    history = result.history
    for name, (latest, least, greatest) in summary["values"].items():
        column = [value for value in history[name] if not math.isnan(value)]
        assert (latest, least, greatest) == (column[-1], min(column), max(column)), name


def test_an_evaluation_after_a_fit_is_part_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """In the table and in the page; as in the lines that jsonl writes, and for a Trainer that only evaluates, too."""
    late = [(torch.ones(2, 3), torch.zeros(2, 1))] * 3
    on_request = {"test": late, "late": hocket.EvalSet(late, every="0ba")}
    with make(callbacks=[], eval_data=on_request) as trainer:
        folder = trainer.fit().run_folder
        first = trainer.evaluate()["late/loss"]
        (only,) = trainer.evaluate({"only": late}).values()
    value = ((trainer.state.model(late[0][0]) - late[0][1]) ** 2).mean().item()
    assert first == pytest.approx(value) and only == pytest.approx(value)
    assert run_listing.read(folder).values["only/loss"] == (only, only, only)
    with make(callbacks=[], eval_data={"later": late}) as again:
        again.evaluate()
    names = ["late/loss", "later/loss", "only/loss"]
    assert main(["runs", "runs", "--metrics", ",".join(names)]) == 0
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert all(name in head for name in names) and row.count(f"{value:.6g}") >= 3 and "finished" in row
    assert main(["report", str(folder), "--out", "page.html"]) == 0
    assert all(name in Path("page.html").read_text() for name in names)
    assert {*names} <= {name for line in files.objects(folder / "metrics.jsonl") for name in line}


def test_the_summary_of_a_resumed_run_counts_the_lines_before_it() -> None:
    with pytest.raises(ValueError, match="as asked"):
        make(fails=8).fit()
    assert run_listing.read(Path("runs/a")).status == "failed" and "as asked" in run_listing.read(Path("runs/a")).reason
    make().fit()
    make("b").fit()
    resumed, straight = (run_listing.read(Path("runs") / name) for name in "ab")
    assert resumed.status == straight.status == "finished"
    assert resumed.values == straight.values


def test_the_summary_of_a_diverged_run() -> None:
    """The latest value is NaN, though least and greatest are finite; as in the file of metrics."""

    class Diverges(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            state.log({"value": math.nan if state.timestamp.batch > 6 else float(state.timestamp.batch)})

    folder = make(callbacks=[Diverges()]).fit().run_folder
    for _ in range(2):
        latest, least, greatest = run_listing.read(folder).values["value"]
        assert math.isnan(latest) and (least, greatest) == (1.0, 6.0)
        (folder / "summary.json").unlink(missing_ok=True)


def test_a_removed_file_is_said() -> None:
    class Removes(hocket.Callback):
        def fit_end(self, state: hocket.State) -> None:
            (state.run_folder / "metrics.jsonl").unlink()

    with pytest.warns(LoggerWarning, match=r"metrics\.jsonl was removed while the run wrote it"):
        make(callbacks=[Removes()]).fit()


def test_the_status_is_that_of_the_process() -> None:
    make(duration="1ep").fit()
    path = Path("runs/a/summary.json")
    summary = json.loads(path.read_text()) | {"status": "running"}
    path.write_text(json.dumps(summary))
    assert run_listing.read(Path("runs/a")).status == "running"
    summary["process"]["started"] = "1"  # another process has this number now
    path.write_text(json.dumps(summary))
    assert run_listing.read(Path("runs/a")).status == "killed"
    summary["process"]["host"] = "elsewhere"
    path.write_text(json.dumps(summary))
    assert run_listing.read(Path("runs/a")).status == "running"
    os.utime(path, (1, 1))
    os.utime(path.with_name("metrics.jsonl"), (1, 1))
    found = run_listing.read(Path("runs/a"))
    assert found.status == "silent" and "elsewhere" in found.reason
    path.write_text('{"half a')
    assert run_listing.read(Path("runs/a")).status == "unknown"


@pytest.fixture
def runs() -> None:
    """Three runs, as older versions and other programs may have left them."""
    for number, accuracy in enumerate([0.5, 0.95, "NaN"]):
        folder = Path("runs/sweep") / f"r{number}"
        folder.mkdir(parents=True)
        lines = [
            {"hyperparameters": {}, "run": str(number)},
            {"epoch": 1, "batch": 5, "sample": 5, "token": 0, "seconds": 65.0, "train/loss": 1.0, "test/accuracy": 0.6},
            {"epoch": 2, "batch": 9 + number, "sample": 9, "token": 0, "seconds": 7300.0, "test/accuracy": accuracy},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"epoch": 3, "ba')
    Path("runs/other").mkdir()


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    assert main(["runs", *words]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("unknown: ")]


def test_runs_are_listed(runs: None, capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows = listed(capsys, "--sort", "test/accuracy", "--metrics", "test/accuracy")
    assert head == ["name", "began", "status", "position", "trained", "test/accuracy", "highest", "test/accuracy"]
    assert [row[0] for row in rows] == ["r1", "r0", "r2"]  # 0.95, 0.5 and NaN, which is never best
    assert rows[2][-2:] == ["nan", "0.6"]
    assert rows[0][1:] == ["unknown", "ep", "2", "ba", "10", "2", "h", "1", "min", "0.95", "0.95"]
    assert [row[0] for row in listed(capsys, "--filter", "test/accuracy>=0.5")[1:]] == ["r0", "r1"]
    assert [row[0] for row in listed(capsys, "runs/sweep/r0", "runs", "--filter", "r[02]")[1:]] == ["r0", "r2"]
    assert listed(capsys, "--filter", "nothing*") == [["No", "run", "passes", "the", "filters."]]
    assert main(["runs", "--json", "--filter", "r1"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["values"]["test/accuracy"] == {"latest": 0.95, "least": 0.6, "greatest": 0.95}


def test_runs_of_the_same_name_are_listed_with_the_folders_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("runs/a/t0", "runs/b/t0", "runs/b/t1", "other/b/t0"):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "metrics.jsonl").write_text('{"test/loss": 1.0}\n')
    shown = [row[0] for row in listed(capsys, "runs", "other", "--sort", "name")[1:]]
    assert shown == ["a/t0", "other/b/t0", "runs/b/t0", "t1"]
    assert [row[0] for row in listed(capsys, "runs")[1:]] == ["a/t0", "b/t0", "t1"]
    assert [row[0] for row in listed(capsys, "runs", "--filter", "t0")[1:]] == ["a/t0", "b/t0"]
    assert [row[0] for row in listed(capsys, "runs", "--filter", "b/*")[1:]] == ["b/t0"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sort", "test/acuracy"], "Did you mean 'test/accuracy'?"),
        (["--metrics", "tset/accuracy"], "Did you mean 'test/accuracy'?"),
        (["--filter", "test/acc>0.5"], "Did you mean 'test/accuracy'?"),
        (["--filter", "test/accuracy>high"], "not a number"),
        (["--filter", "finshed"], "Did you mean 'finished'?"),
        (["absent"], "there is no folder 'absent'"),
        (["runs/other"], "There is no run in runs/other"),
    ],
)
def test_mistakes_are_explained(runs: None, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_best_run_by_any_metric_of_hocket_is_first(capsys: pytest.CaptureFixture[str]) -> None:
    """The first run has the lower values, of a metric whose name says what is better, and of one whose name does not."""
    better = {**dict.fromkeys(METRICS, "low"), "accuracy": "high", "odd": "high"}
    for name, value in (("low", 0.1), ("high", 0.2)):
        Path("runs", name).mkdir(parents=True)
        line = {"epoch": 1, "batch": 1} | {f"test/{metric}": value for metric in better}
        Path("runs", name, "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for metric, best in better.items():
        for words, first in (((), best), (("--reverse",), "low" if best == "high" else "high")):
            assert main(["runs", "--sort", f"test/{metric}", *words]) == 0
            out, err = capsys.readouterr()
            head, row, *_ = out.splitlines()
            assert row.split()[0] == first and f"{best}est test/{metric}" in head
            assert ("Write --reverse for the lowest" in err) == (metric == "odd" and not words)


@pytest.mark.parametrize(
    ("better", "names"),
    [
        ("min", "eval/loss test/dice_loss val_mae RMSE top1_error wer MeanSquaredError bpc latency_p95 test/perplexity"),
        ("max", "test/acc f1_score BinaryF1Score mAP50 test/mIoU BinaryAUROC R2Score recall@5 bleu4 top1 psnr"),
        (None, "lr/group0 test/odd grad_norm mapped accurate test/accuracy_loss wera memory/reserved size maes 1 é"),
    ],
)  # fmt: skip
def test_the_usual_names_say_what_is_better(better: str | None, names: str) -> None:
    assert {name: mode_of(name) for name in names.split()} == dict.fromkeys(names.split(), better)
    for name in names.split() if better is None else ():
        for ask in (EarlyStopping, Plateau):
            with pytest.raises(ValueError, match="mode='max' or mode='min'"):
                ask(name)
        with pytest.raises(ValueError, match="'min' if lower is better"):
            hocket.Checkpoints("a", best=name)  # type: ignore[arg-type]


def test_listing_runs_imports_no_torch(runs: None) -> None:
    code = "import sys; from hocket_cli import main; main(['runs']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


# --- plots


def test_a_plot_has_a_chart_for_each_prefix_and_the_values() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    result = make(checkpoints=None, resume=None, callbacks=["lr-monitor"]).fit()
    figure = result.plot()
    assert [axis.get_title() for axis in figure.axes] == ["lr", "train", "test"]
    (line,) = result.plot("test/loss", by="epoch").axes[0].lines
    assert list(line.get_xdata()) == [1, 2] and list(line.get_ydata()) == result.history.series("test/loss")[1]
    (axis,) = result.history.plot("loss").axes
    assert [each.get_label() for each in axis.lines] == ["train/loss", "test/loss"]
    with pytest.raises(KeyError, match="history\\['train/loss'\\]"):
        result.plot("train/los")
    with pytest.raises(KeyError, match="by='epoch'"):
        result.plot("epoch")
    with pytest.raises(TypeError, match="Write each on its own"):
        result.plot(["train/loss"])  # type: ignore[arg-type]
    pyplot.close("all")


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    history = make(checkpoints=None, resume=None, callbacks=[]).fit().history
    with pytest.raises(ImportError, match="pip install matplotlib"):
        history.plot()

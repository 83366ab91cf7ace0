"""A run touches only what it wrote; tests of a run leave nothing."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.basics.run_folder import Run, RunFolder, RunFolderError, TemporaryFolder
from hocket.checkpoints import CheckpointError
from hocket_checkpoints.storage import format as formats
from hocket_checkpoints.storage.store import Store
from hocket_testkit import run_ranks

BATCHES = [(torch.full((2, 3), float(number)), torch.zeros(2, 1)) for number in range(3)]


def make(place: str | Path | None = "ck", policy: Any = None, **changes: Any) -> hocket.Trainer:
    arguments = {
        "model": nn.Linear(3, 1), "loss": nn.functional.mse_loss, "train_data": BATCHES, "optimizer": "sgd(lr=0.01)",
        "duration": "3ep", "log_every": "1ba", "loggers": ["jsonl"], "device": "cpu", "seed": 1,
        "checkpoints": None if place is None else hocket.Checkpoints(place, **{"keep": None, **(policy or {})}),
    }  # fmt: skip
    return hocket.Trainer(**{**arguments, **changes})


def names(folder: str | Path = "ck") -> list[str]:
    return Store(folder).names()


def files() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_overwrite_replaces_what_it_announces_once_there_is_something_else(capsys: Any) -> None:
    make().fit()
    Path("ck/ep1-ba3").rename("ck/kept")
    trainer = make(policy={"overwrite": True, "keep": 1}, duration="1ep")
    assert "replaces ep2-ba6, ep3-ba9 in ck" in capsys.readouterr().err and len(names()) == 3
    trainer.fit()
    assert names() == ["kept", "ep1-ba3"]


def test_copies_from_another_run_are_not_counted_among_its_own() -> None:
    make("other", duration="1ep").fit()
    make(duration="2ep").fit()
    shutil.copytree("other/ep1-ba3", "ck/ep0-ba1")
    make(resume="auto", policy={"keep": 1}).fit()
    assert names() == ["ep0-ba1", "ep3-ba9"]


def test_a_temporary_folder_goes_with_its_run(tmp_path: Path) -> None:
    folder = TemporaryFolder(tmp_path, Run("1", "a"))
    path = folder.claim()
    assert path.is_dir() and path == folder.claim()
    del folder
    assert not path.exists()


def test_of_two_runs_of_one_name_one_gets_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (RunFolder(tmp_path, Run(number, "a")) for number in "12")
    draw, claimed = os.urandom, []

    def meanwhile(size: int) -> bytes:
        """What comes between the look for a mark and the mark."""
        if not claimed:
            claimed.append("soon")
            claimed[0] = str(second.claim())
        return draw(size)

    monkeypatch.setattr(os, "urandom", meanwhile)
    with pytest.raises(RunFolderError, match="files of another run"):
        first.claim()
    second.check()
    assert claimed == [str(tmp_path / "a")]


def test_what_another_run_puts_there_meanwhile_is_not_replaced() -> None:
    class Copies(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            shutil.copytree("other/ep1-ba3", "ck/ep1-ba3", dirs_exist_ok=True)

    make("other", duration="1ep").fit()
    trainer = make(duration="1ep", callbacks=[Copies()])
    with pytest.raises(CheckpointError, match="'ep1-ba3' is of another run, and is not replaced"):
        trainer.fit()
    assert formats.about("ck/ep1-ba3") == formats.about("other/ep1-ba3")


def test_what_an_older_version_wrote_is_not_of_a_run_that_began_here() -> None:
    trainer = make(policy={"keep": 1})
    trainer.fit("1ep")
    about = formats.about("ck/ep1-ba3")
    del about["run"]
    formats.write("ck/ep0-ba1", formats.read("ck/ep1-ba3"), about)
    with pytest.raises(CheckpointError, match="by another: ep0-ba1"):
        trainer.fit("1ep")
    assert names() == ["ep0-ba1", "ep1-ba3"]


def test_a_resumed_run_is_the_same_run_without_its_name() -> None:
    first = make(duration="1ep").fit()
    second = make(duration="2ep", resume="auto").fit()
    third = make(duration="3ep", resume="ck/ep2-ba6").fit()
    assert first.run_folder == second.run_folder == third.run_folder and len(list(Path("runs").iterdir())) == 1
    assert {formats.about(f"ck/{name}")["run"]["id"] for name in names()} == {formats.about("ck/ep1-ba3")["run"]["id"]}


def test_an_older_checkpoint_of_the_same_run() -> None:
    """Going on from there would replace newer ones: refused, elsewhere a run of its own, or announced."""
    make().fit()
    before = files()
    with pytest.raises(
        CheckpointError, match=r"written after 'ep1-ba3': ep2-ba6, ep3-ba9.*resume='auto'.*overwrite=True"
    ):
        make(resume="ck/ep1-ba3")
    branch = make("branch", resume="ck/ep1-ba3").fit()
    assert branch.timestamp.batch == 9 and before.items() <= files().items() and len(list(Path("runs").iterdir())) == 2
    make(resume="ck/ep1-ba3", policy={"overwrite": True}, duration="2ep").fit()
    assert names() == ["ep1-ba3", "ep2-ba6"]


def test_checkpoints_of_older_versions() -> None:
    """They say nothing of a run: not a new one's, and a resumed one's."""
    (make(duration="2ep").fit().run_folder / "run.json").unlink()
    for name in names():
        tree, about = formats.read(f"ck/{name}"), formats.about(f"ck/{name}")
        del tree["run_id"], about["run"]
        formats.write(f"ck/{name}", tree, about)
    with pytest.raises(CheckpointError, match="has checkpoints of another run: ep1-ba3, ep2-ba6"):
        make()
    make(resume="auto", policy={"keep": 1}).fit()
    assert names() == ["ep3-ba9"]


def test_folds_in_one_folder_are_refused() -> None:
    make(duration="1ep").fit()
    with pytest.raises(CheckpointError, match="another folder"):
        make(duration="1ep")
    weights = make("weights", {"weights_only": True}, duration="1ep")
    weights.fit()
    with pytest.raises(CheckpointError, match="another folder"):
        make("weights", {"weights_only": True})


def test_the_same_trainer_goes_on_in_its_folder_and_notices_others() -> None:
    trainer, late = make(), make(resume="auto")
    for _ in range(2):
        trainer.fit("1ep")
    with pytest.raises(CheckpointError, match="written after this Trainer was made, by another: ep1-ba3, ep2-ba6"):
        late.fit()
    assert names() == ["ep1-ba3", "ep2-ba6"]
    trainer.fit("1ep")  # what was refused holds no lock


def test_all_ranks_refuse_together(tmp_path: Path) -> None:
    make(tmp_path / "ck", duration="1ep").fit()

    def rank_main(rank: int) -> str:
        with pytest.raises(RuntimeError, match="overwrite=True") as refused:
            make(tmp_path / "ck", strategy="ddp", duration="1ep")
        return str(refused.value)

    first, second = run_ranks(rank_main, 2)
    assert second == f"Rank 0: {first}"


@pytest.mark.parametrize(
    "name", ["../../x", "/x", "a/b", "a\\b", "", ".", "..", ".x", "a\nb", "a\0", "x" * 300, " a", "ä" * 121]
)
def test_names_that_are_no_folder(name: str) -> None:
    with pytest.raises(ValueError, match=r"run_name=.* (is a path|is not a valid folder name).*such as"):
        make(None, run_name=name)
    assert not list(Path().iterdir())


@pytest.mark.parametrize("name", ["baseline-1", "größe (2)", "a:b", "x" * 128])
def test_names_that_are_one(name: str) -> None:
    assert make(None, run_name=name, duration="1ba").fit().run_folder == Path("runs", name)
    assert Path("runs", name, "metrics.jsonl").exists()
    with pytest.raises(TypeError, match="give text"):
        make(None, run_name=3)


class WritesDown(hocket.Callback):
    def fit_end(self, state: hocket.State) -> None:
        (state.run_folder / "note.txt").write_text("done")


@pytest.mark.parametrize("test", [{"fast_dev_run": 2}, {"overfit": 1}])
def test_tests_of_a_run_leave_nothing(test: Any) -> None:
    """Before the first run, and after a finished one, from which they do not begin."""
    more = {
        "eval_data": {"a": BATCHES, "asked": hocket.EvalSet(BATCHES, every="0ba")},
        "microbatch": "auto",
        "duration": "1ep",
    }

    def tried() -> None:
        trainer = make(policy={"keep": 1}, resume="auto", callbacks=[WritesDown()], run_name="run", **more, **test)
        result = trainer.fit()
        assert result.timestamp.batch == next(iter(test.values())) and not result.checkpoints
        if "fast_dev_run" in test:
            assert {"a/loss", "asked/loss"} <= result.metrics.keys() and trainer.fit("7ep").timestamp.batch == 4

    tried()
    assert not files()
    make(run_name="run", **more).fit()
    before = files()
    tried()
    assert files() == before


def test_a_trial_evaluation_and_a_plan_leave_nothing() -> None:
    trainer = make(eval_data=BATCHES, sanity_eval=1, run_name="run")
    assert trainer.plan() and not files()
    trainer.fit("1ba")
    rows = Path("runs/run/metrics.jsonl").read_text()
    make("other", eval_data=BATCHES, run_name="other").fit("1ba")
    other = Path("runs/other/metrics.jsonl").read_text()
    assert len(rows.splitlines()) == len(other.splitlines())


def test_a_cache_that_cannot_be_written_ends_no_run() -> None:
    Path("runs").write_text("")
    with pytest.warns(UserWarning, match=r"microbatch='auto' found 2, but cannot store it in runs/microbatch\.json"):
        assert make(None, microbatch="auto", loggers=[]).fit().timestamp.batch == 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(None, microbatch="auto", loggers=[], folder="elsewhere").fit()
    assert Path("elsewhere/microbatch.json").exists()


class Stops(hocket.Callback):
    def __init__(self, batch: int) -> None:
        self._batch = batch

    def batch_start(self, state: hocket.State) -> None:
        if state.timestamp.batch == self._batch:
            raise OSError("the machine is gone")


def rows(file: Path) -> list[int]:
    return [row["batch"] for row in map(json.loads, file.read_text().splitlines()) if "batch" in row]


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(capsys: Any) -> None:
    """By the same line, with its name; what it logged before is kept."""
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            make(run_name="a", resume="auto", callbacks=[Stops(2)]).fit()
    run = Path("runs/a")
    assert make(run_name="a", resume="auto", duration="2ep").fit().run_folder == run
    assert [rows(run / f"metrics{which}.jsonl") for which in (".earlier-1", ".earlier-2", "")] == [
        [1, 2], [1, 2], [1, 2, 3, 4, 5, 6],
    ]  # fmt: skip
    assert "its lines are kept in metrics.earlier-2.jsonl" in capsys.readouterr().err
    make(run_name="a", resume="auto", duration="3ep").fit()
    assert rows(run / "metrics.jsonl") == list(range(1, 10))
    with pytest.raises(RunFolderError, match="another run"):
        make("other", run_name="a", resume="auto")
    make(run_name="a", policy={"overwrite": True}, duration="1ep").fit()
    assert rows(run / "metrics.earlier-3.jsonl") == list(range(1, 10)) and rows(run / "metrics.jsonl") == [1, 2, 3]


def test_a_run_goes_on_in_one_of_two_copies(capsys: Any) -> None:
    """Else they would remove each other's rows; a moved folder and a backup that is put back are no second one."""
    make(duration="1ep").fit()
    file = next(Path("runs").glob("*/metrics.jsonl"))
    shutil.copytree("ck", "copy")

    class Second(hocket.Callback):
        def batch_start(self, state: hocket.State) -> None:
            if state.timestamp.batch == 4:
                with pytest.raises(CheckpointError, match=r"a copy of .*ck, which the run is writing to now"):
                    make("copy", resume="auto")

    make(resume="auto", duration="2ep", callbacks=[Second()]).fit()
    with pytest.raises(CheckpointError, match=r"continued to ep2-ba6.*resume='copy/ep1-ba3'"):
        make("copy", resume="auto")
    assert rows(file) == [1, 2, 3, 4, 5, 6]
    make("branch", resume="copy/ep1-ba3", duration="2ep").fit()
    shutil.move("ck", "moved")
    make("moved", resume="auto", duration="3ep").fit()
    assert rows(file) == list(range(1, 10))
    shutil.move("copy", "ck")
    shutil.rmtree("moved")
    make(resume="auto", duration="2ep").fit()
    assert rows(file) == [1, 2, 3, 4, 5, 6]


def test_the_newest_by_its_file_and_a_folder_of_several() -> None:
    make(duration="2ep").fit()
    assert make("a", resume="ck/latest").fit().timestamp.batch == 9 and names("a") == ["ep3-ba9"]
    assert make(resume="ck/latest").fit().timestamp.batch == 9 and names() == ["ep1-ba3", "ep2-ba6", "ep3-ba9"]
    with pytest.warns(
        UserWarning, match=r"resume='ck' is a folder of checkpoints.* its newest, 'ep3-ba9'.*ck/ep3-ba9'"
    ):
        assert make("b", resume="ck").fit().timestamp.batch == 9 and names("b") == ["ep3-ba9"]
    with pytest.raises(CheckpointError, match=r"has no checkpoint 'ep7'; it has ep1-ba3.*resume='.*ep3-ba9'"):
        make("b", resume="ck/ep7")
    for what in (3, ""):
        with pytest.raises(TypeError, match=f"resume={what!r} is not a checkpoint\\. Give 'auto'"):
            make("b", resume=what)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"run": ""}'])
def test_a_mark_that_cannot_be_read(text: str) -> None:
    mark = make(duration="1ep").fit().run_folder / "run.json"
    mark.write_text(text)
    with pytest.raises(RunFolderError, match=r"run\.json cannot be read.*remove this one file"):
        make(resume="auto")
    mark.unlink()
    assert rows(make(resume="auto", duration="2ep").fit().run_folder / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]

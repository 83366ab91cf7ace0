"""The page: what is in it is what the run wrote, whatever that is."""

from __future__ import annotations

import base64
import json
import math
import random
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import PROGRAM, Browser
from hypothesis import given, strategies as st

import hocket
from hocket.basics import run_files as files
from hocket_cli import main
from hocket_cli.document import parse
from hocket_loggers.png import png
from hocket_report import Report, panels, vega, write
from hocket_report.logged_values import Logged, downsampled, read as read_curves

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
#: A text that would leave every element, attribute and script that it may stand in.
EVIL = '</script><img src=x onerror="window.hacked=1">\'`${1}&lt;'


class Shows(hocket.Callback):
    """Logs a record of each kind at the end of an epoch."""

    def epoch_end(self, state: hocket.State) -> None:
        bus = state.bus
        bus.log_images(state, "samples/input", [torch.full((1, 4, 4), 0.5)])
        bus.log_table(state, "samples/rows", ["column"], [[EVIL], [state.timestamp.epoch]])
        bus.log_text(state, "samples/text", f"{EVIL} {state.timestamp.epoch}")
        bus.log_histogram(state, "samples/weights", [1, 2], [0.0, 0.5, 1.0])


def train(name: str = "a", lr: float = 0.1, **changes: Any) -> hocket.Result:
    data = [(torch.ones(2, 3), torch.zeros(2, 1))] * 10
    arguments = {
        "model": torch.nn.Linear(3, 1), "loss": torch.nn.MSELoss(), "optimizer": f"sgd(lr={lr})", "train_data": data,
        "eval_data": {"test": data}, "duration": "2ep", "device": "cpu", "seed": 1, "log_every": "1ba", "loggers": ["jsonl"],
        "callbacks": ["lr-monitor", "speed-monitor", "memory-monitor", Shows()], "run_name": name, "folder": "runs",
        "profile_plugins": True, "checkpoints": hocket.Checkpoints(f"runs/{name}/checkpoints", best=("test/loss", "min", 1)),
    }  # fmt: skip
    return hocket.Trainer(**(arguments | changes)).fit()


class Page(HTMLParser):
    """A page as a browser's parser sees it: the text of each section, the attributes of each element, and the data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._section, self._data, self._script = "", "", False
        self.feed(path.read_text(encoding="utf-8"))
        self.data = json.loads(self._data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag == "section":
            self._section = found["id"] or ""
        self._script = tag == "script"
        self._is_data = found.get("id") == "data"

    def handle_data(self, text: str) -> None:
        if self._script and self._is_data:
            self._data += text
        elif not self._script:
            self.texts[self._section] = self.texts.get(self._section, "") + " " + text

    def handle_endtag(self, tag: str) -> None:
        self._script = self._script and tag != "script"

    def curve(self, label: str, run: int = 0) -> tuple[list[float], list[float]]:
        """Batches and values of a curve."""
        (found,) = (
            each
            for chart in self.data["charts"]
            for each in chart["curves"]
            if (each["label"], each["run"]) == (label, run)
        )
        return [self.data["positions"][run]["batch"][at] for at in found["at"]], found["y"]


def test_the_page_has_what_the_run_logged() -> None:
    result = train()
    page = Page(write([result.run_folder]))
    for name in ("train/loss", "test/loss", "lr/group0", "speed/samples_per_second", "memory/resident_peak"):
        rows = [row for row in files.objects(result.run_folder / "metrics.jsonl") if name in row]
        batches, values = page.curve(name)
        assert batches == [row["batch"] for row in rows]
        assert values == pytest.approx([row[name] for row in rows], rel=1e-4)
    assert all(
        "add" not in text.lower() for section, text in page.texts.items() if section in ("plan", "costs", "samples")
    )
    assert all(name in page.texts["plan"] for name in ("batch_end", "speed-monitor", "checkpoints", "jsonl"))
    costs = {plugin for plugin, _ in result.costs if result.costs[plugin, _].calls}
    assert all(name in page.texts["costs"] for name in costs)
    assert torch.__version__ in page.texts["system"] and "sgd(lr=0.1)" in page.texts["configuration"]
    assert result.best is not None
    assert f"{Path(result.best.path).name}  best" in page.texts["checkpoints"]
    assert all(name in page.texts["checkpoints"] for name in result.checkpoints)
    assert f"{EVIL} 2" in page.texts["samples"] and f"{EVIL} 1" not in page.texts["samples"]
    (image,) = (attributes["src"] for tag, attributes in page.elements if tag == "img")
    assert base64.b64decode(str(image).removeprefix("data:image/png;base64,")) == png(torch.full((1, 4, 4), 0.5))
    assert page.data["histograms"] == [{"counts": [1, 2], "edges": [0.0, 0.5, 1.0]}]
    assert "Profile" in page.texts["profile"] and 'profile: "5ba after 10ba"' in page.texts["profile"]


class Slow(hocket.Callback):
    """Takes 5 ms of each batch, and notes what it took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def batch_end(self, state: hocket.State) -> None:
        began = time.perf_counter()
        time.sleep(0.005)
        self.seconds.append(time.perf_counter() - began)


def test_the_costs_of_a_resumed_run_include_those_of_earlier_processes() -> None:
    before, slow = Slow(), Slow()
    train(callbacks=[before], duration="3ep")
    train(callbacks=[slow], resume="auto", duration="5ep")
    slow.seconds += before.seconds
    summary = files.content(Path("runs/a/summary.json"))
    assert (summary["fit_batches"], summary["position"]["batch"], len(slow.seconds)) == (50, 50, 50)
    found = re.search(r"slow +([\d.]+) ms ([\d,]+) µs ([\d.]+)% batch_end", Page(write("runs/a")).texts["costs"])
    assert found is not None
    total, each, share = (float(text.replace(",", "")) for text in found.groups())
    took = sum(slow.seconds)
    expected = [took * 1e3, took / 50 * 1e6, took / summary["fit_seconds"] * 100]
    assert [total, each, share] == pytest.approx(expected, rel=0.02)


def test_costs_of_a_few_batches_are_not_shown_as_those_of_the_fit() -> None:
    train(callbacks=[Slow()], profile="2ba after 3ba", profile_plugins=False)
    text = Page(write("runs/a")).texts["costs"]
    assert "profile_plugins: true" in text and "slow" not in text
    assert "Try: 'slow' every n batches" in Page(write("runs/a")).texts["profile"]
    train("old", callbacks=[Slow()])
    summary = files.content(Path("runs/old/summary.json"))
    del summary["fit_batches"]  # as before there was this number
    Path("runs/old/summary.json").write_text(json.dumps(summary))
    assert "slow" not in Page(write("runs/old")).texts["costs"]


def test_a_comparison_shows_what_differs() -> None:
    folders = [train("a").run_folder, train("b", lr=0.2).run_folder]
    page = Page(write(folders, "out/ab.html"))
    assert page.curve("test/loss", 0)[1] != page.curve("test/loss", 1)[1]
    differences = page.texts["configuration"].partition("All values")[0]
    assert (
        all(text in differences for text in ("sgd(lr=0.1)", "sgd(lr=0.2)", "run_name"))
        and "duration" not in differences
    )
    assert [each["name"] for each in page.data["runs"]] == ["a", "b"]


#: Pairs of values that differ in YAML 1.2, and may not in YAML 1.1 or as texts of Python.
WRITTEN = [
    ["no", "false"], ["007", "7"], ["1_000", "1000"], ["[yes]", "[true]"], ["1:30", "90"], ["'1'", "1"], ["'null'", "null"],
    ["0o10", "010"], ["'1e-3'", "1e-3"],
]  # fmt: skip


def test_values_of_a_configuration_are_those_that_hocket_reads() -> None:
    for number, run in enumerate("ab"):
        Path("runs", run).mkdir(parents=True)
        Path("runs", run, "metrics.jsonl").touch()
        lines = [f"  key{row}: {texts[number]}\n" for row, texts in enumerate(WRITTEN)]
        Path("runs", run, "config.yaml").write_text("model:\n" + "".join(lines))
    differing, _, everything = Page(write(["runs/a", "runs/b"])).texts["configuration"].partition("All values")
    assert all(f"model.key{row} " in differing for row in range(len(WRITTEN)))
    read = [parse(f"a: {text}", "").plain()["a"] for texts in WRITTEN for text in texts]
    shown = re.findall(r"model\.key\d+\s+(\S+)\s+(\S+)", everything)
    assert [parse(f"a: {text}", "").plain()["a"] for row in shown for text in row] == read


def test_a_value_of_a_configuration_is_that_of_an_argument() -> None:
    """One of the runs has a configuration, the other arguments of the Trainer. Neither can be too deep."""
    arguments = {"truth": True, "text": "no", "list": [1, "x"], "deep": json.loads("[" * 400 + "]" * 400)}
    for run in "ab":
        Path("runs", run).mkdir(parents=True)
        Path("runs", run, "metrics.jsonl").write_text(json.dumps({"hyperparameters": arguments}))
    Path("runs/b/config.yaml").write_text("{truth: true, text: 'no', list: [1, x], other: null}")
    differing = Page(write(["runs/a", "runs/b"])).texts["configuration"].partition("All values")[0]
    assert [name for name in (*arguments, "other") if name in differing] == ["deep", "other"]


def test_trials_of_several_sweeps_are_told_apart() -> None:
    folders = [Path("runs/wide/t0"), Path("runs/deep/t0")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"batch": 1, "test/loss": 1.0}\n')
    page = Page(write(folders, "t.html"))
    assert [each["name"] for each in page.data["runs"]] == ["wide/t0", "deep/t0"]


def test_the_profile_is_shown() -> None:
    folder = train().run_folder
    (folder / "profile").mkdir()
    causes = [{"what": "the loader", "share": 0.4, "advice": ["num_workers=4"]}]
    content = {
        "version": 1,
        "batches": 5,
        "seconds_per_batch": 0.012,
        "shares": {"data wait": 0.4},
        "plugins": {"ema": 0.1},
    }
    (folder / "profile/summary.json").write_text(json.dumps(content | {"causes": causes}))
    text = Page(write([folder])).texts["profile"]
    assert all(
        each in text for each in ("12.0 ms", "data wait", "40.0%", "ema", "10.0%", "the loader", "num_workers=4")
    )


def evil() -> Path:
    """A run of which every text is hostile, and some values are of no known type."""
    folder = Path("runs/evil")
    for name in ("media", "profile", EVIL.replace("/", "-")):
        (folder / name).mkdir(parents=True)
    lines: list[Any] = [
        {"hyperparameters": {EVIL: {EVIL: EVIL}}, "run": "1"},
        {"epoch": 0, "batch": 1, f"train/{EVIL}": "NaN", "train/loss": "Infinity", "__proto__": 1, EVIL: 10**400},
        {"epoch": 0, "batch": 2, "seconds": 0.2, f"train/{EVIL}": 1.5, "train/loss": 2, "toString": 3, EVIL: 4},
        5, {"batch": "x", "train/loss": 7},
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"epoch": 0, "ba')
    (folder / "run.json").write_text(json.dumps({"run": "1", "name": EVIL, "began": 5, "checkpoints": 3}))
    plan = {
        "plugins": [{"kind": EVIL, "name": EVIL, "config": {EVIL: EVIL}}, 1],
        "events": {EVIL: [EVIL], "init": EVIL},
    }
    summary = {
        "run": "1", "status": "failed", "error": EVIL, "plan": plan, "costs": [{"plugin": EVIL, "hook": EVIL, "seconds": 1}, 2],
        "fit_seconds": 1, "fit_batches": 1,
        "system": {EVIL: EVIL}, "evaluated": [f"train/{EVIL}"], "values": {f"train/{EVIL}": [1, 1, 1]}, "best": [EVIL, "max"],
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    profile = {"shares": {EVIL: 0.5}, "causes": [{"what": EVIL, "advice": [EVIL], "share": EVIL}]}
    (folder / "profile/summary.json").write_text(json.dumps(profile))
    about = {"written": 5, "metrics": {EVIL: 1}, "timestamp": {"epoch": EVIL}}
    (folder / EVIL.replace("/", "-") / "manifest.json").write_text(json.dumps({"about": about}))
    media = [
        {"text": EVIL, "batch": EVIL, "content": EVIL}, {"table": EVIL, "columns": [EVIL], "rows": [[EVIL], 5]},
        {"images": EVIL, "files": ["../../../secret.png", EVIL, 3]}, {"histogram": EVIL, "counts": [1], "edges": [0, 1]},
    ]  # fmt: skip
    (folder / "media/metrics.jsonl").write_text("\n".join(map(json.dumps, media)))
    Path("secret.png").write_bytes(b"secret")
    return folder


def test_hostile_texts_are_only_texts() -> None:
    page = Page(write([evil()]))
    assert [attributes for tag, attributes in page.elements if tag == "img"] == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert all(
        EVIL in page.texts[each] for each in ("", "plan", "costs", "profile", "system", "configuration", "samples")
    )
    assert page.curve("train/loss") == ([1, 2], [None, 2]) and page.curve(EVIL) == ([1, 2], [None, 4])
    assert base64.b64encode(b"secret").decode() not in Path("report.html").read_text()


def test_files_of_any_content_make_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of every file are replaced at random, and some files are cut."""
    monkeypatch.setattr(vega, "bundle", lambda: "")  # not what this is about, and it takes time
    folder = train().run_folder
    junk = [None, True, -1, 1e400, math.nan, "", [], {}, EVIL, [1, [2]], {"a": [{}]}, 10**400, "\ud800", {"": None}]
    originals = {path: path.read_text() for path in folder.rglob("*.json*") if "tree" not in path.name}

    def mutated(value: Any, rng: random.Random) -> Any:
        if rng.random() < 0.05:
            return rng.choice(junk)
        if isinstance(value, dict):
            return {key: mutated(each, rng) for key, each in value.items()}
        return [mutated(each, rng) for each in value] if isinstance(value, list) else value

    for seed in range(30):
        rng = random.Random(seed)
        for path, text in originals.items():
            lines = [text] if path.suffix == ".json" else text.splitlines()
            changed = "\n".join(json.dumps(mutated(json.loads(line), rng)) for line in lines)
            path.write_text(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.2 else changed)
        Page(write([folder, folder]))


def test_damaged_files_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    lines = Path("runs/a/metrics.jsonl").read_bytes().splitlines(keepends=True)
    Path("runs/a/metrics.jsonl").write_bytes(b"".join([*lines[:2], b"\xff\x00\n", *lines[2:], b'{"batch": 3, "los']))
    Path("runs/a/summary.json").write_text("{")
    write("runs/a")
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "hocket: runs/a/summary.json is damaged; the report leaves that out.",
        "hocket: runs/a/metrics.jsonl has 1 line that cannot be read; the report leaves that out.",
    ]


def test_a_run_without_anything_says_what_to_add() -> None:
    Path("runs/empty").mkdir(parents=True)
    Path("runs/empty/metrics.jsonl").touch()
    texts = Page(write(["runs/empty"])).texts
    wanted = {
        "curves": "lr-monitor",
        "costs": "profile_plugins: true",
        "samples": "sample-visualizer",
        "checkpoints": "runs/a",
    }
    assert all(text in texts[section] for section, text in wanted.items())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent"], "absent does not exist"),
        (["runs"], "It has runs: hocket report runs/a"),
        (["file"], "file is a file"),
        (["odd"], "hocket report 'odd/${x} <y>'."),
        (["runs/a", "--output", "b.html"], "--out"),
        (["runs/a", "-o", "config.yaml"], "Write config.html"),
        (["runs/a", "-o", "."], "Write report.html"),
        (["runs/a", "-o", "runs"], "Write runs/report.html"),
        (["runs/a", "-o", "mine.html"], "is no report, so it is not replaced"),
        (["runs/a", "-o", "loop/r.html"], "Nothing can be written to loop: "),
        ([], "needs run"),
    ],
)
def test_mistakes_are_explained(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/metrics.jsonl").touch()
    Path("file").touch()
    Path("mine.html").write_text("<p>mine")
    Path("loop").symlink_to("loop")
    Path("odd/${x} <y>").mkdir(parents=True)
    Path("odd/${x} <y>/metrics.jsonl").touch()
    assert main(["report", *words]) == 2
    assert said in capsys.readouterr().err
    assert Path("mine.html").read_text() == "<p>mine"


def test_the_command_writes_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/metrics.jsonl").touch()
    assert main(["report", "runs/a", "--out", "b.html"]) == 0
    assert capsys.readouterr().out.startswith("b.html (")


# --- curves


@given(
    st.lists(st.floats(width=32) | st.integers(-5, 5), min_size=1, max_size=300).map(
        lambda each: [float(v) for v in each]
    ),
    st.integers(4, 80),
)
def test_downsampling_keeps_the_extremes_and_the_ends(values: list[float], most: int) -> None:
    kept = downsampled(values, most)
    assert kept == sorted(set(kept)) and len(kept) <= max(most, 4) and {0, len(values) - 1} <= set(kept)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [values[index] for index in kept if math.isfinite(values[index])]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_epochs_are_interpolated() -> None:
    logged = Logged()
    rows = [(0, 5), (0, 10), (1, 10), (1, 15), (2, 20), (2, 25)]
    logged.add([{"epoch": epoch, "batch": batch} for epoch, batch in rows])
    assert logged.epochs() == [0.5, 1.0, 1.0, 1.5, 2.0, 2.5]


def long_run(rows: int) -> Path:
    folder = Path("runs/long")
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for batch in range(1, rows + 1):
            line = {
                "epoch": batch // 1000,
                "batch": batch,
                "sample": batch * 64,
                "token": batch * 999,
                "seconds": batch * 0.013,
            }
            line |= {f"train/{name}": math.sin(batch / 7 + number) for number, name in enumerate("abcdefgh")}
            file.write(json.dumps(line | {"train/loss": 1e6 if batch == rows // 2 else 1 / batch}) + "\n")
    return folder


def test_a_long_run_is_a_small_page_with_its_spikes() -> None:
    page = write([long_run(20_000)])
    assert page.stat().st_size < 3e6
    batches, values = Page(page).curve("train/loss")
    assert values[batches.index(10_000)] == 1e6 and len(values) < 3000
    assert "downsampled" in Page(page).texts["curves"]
    assert read_curves(Path("runs/long/metrics.jsonl")).rows == 20_000


# --- the callback


def test_the_callback_writes_the_page_of_the_finished_run() -> None:
    result = train(callbacks=["report"])
    page = Page(result.run_folder / "report.html")
    assert "finished" in page.texts[""] and "jsonl" in page.texts["costs"]


def test_the_callback_writes_the_page_of_a_failed_run_and_fails_none() -> None:
    class Fails(hocket.Callback):
        def batch_end(self, state: hocket.State) -> None:
            if state.timestamp.batch == 5:
                raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        train(callbacks=["report", Fails()])
    assert "as asked" in Page(Path("runs/a/report.html")).texts[""]
    with pytest.warns(UserWarning, match=r"was not written.*loggers"):
        assert train("b", callbacks=[Report()], loggers=[]).timestamp.batch == 20


# --- in a browser


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    pages = [write([train("a").run_folder, train("b").run_folder], "ab.html"), write([evil()], "evil.html")]
    pages.append(write([long_run(100_000)], "long.html"))
    assert all(page.stat().st_size < 3e6 for page in pages)
    with Browser(tmp_path) as browser:
        for page in pages:
            for width, dark in ((400, True), (1600, False)):
                browser.open(page, width, 4000, dark)
                browser.settle()
                assert browser.messages == []
                fetched = [each for each in browser.requested if not each.startswith("data:")]
                assert fetched == [page.resolve().as_uri()]
                assert browser.evaluate("document.documentElement.scrollWidth") == width
                assert browser.evaluate("window.hacked") is None
                charts, drawn = (
                    "document.querySelectorAll('main > section > .charts .chart')",
                    "path.mark-line, g.mark-line path",
                )
                assert browser.evaluate(f"[...{charts}].filter(each => !each.querySelector('{drawn}')).length") == 0
                paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (paper == "rgb(255, 255, 255)") != dark
        browser.open(pages[0], 1600, 1000)
        browser.settle()
        middle = "({x, y, width, height}) => [x + width / 2, y + height / 2]"
        x, y = browser.evaluate(f"({middle})(document.querySelector('.plot').getBoundingClientRect())")
        browser.move(x, y), browser.move(x + 3, y)
        browser.settle()
        assert "train/loss" in browser.evaluate("document.querySelector('.tip').textContent")
        browser.evaluate(
            "{const by = document.getElementById('axis'); by.value = 'seconds'; by.dispatchEvent(new Event('change'))}"
        )
        browser.settle()
        assert "seconds" in browser.evaluate("document.querySelector('.plot').textContent") and browser.messages == []


def test_the_plan_of_a_page_has_a_place_for_every_event() -> None:
    """An event that is added to hocket is given the part of a run in which it happens."""
    listed = [event for _, events in panels._PHASES for event in events]
    assert sorted(listed) == sorted(event.value for event in hocket.Event)

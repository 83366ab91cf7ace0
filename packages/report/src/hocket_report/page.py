"""The page: one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hocket.basics import run_files as files
from hocket.basics.run_folder import writable
from hocket.basics.safe_files import BLOCK, opened, printable, replace
from hocket.errors import WrongValue
from hocket_cli import run_listing
from hocket_report import curves, panels, run_contents, vega
from hocket_report.logged_values import points
from hocket_report.markup import Markup, code, escape, hint, joined, section, tag
from hocket_report.run_contents import Run
from hocket_report.samples import Samples

#: By which an earlier report is recognised, which may be replaced.
_MARK = '<meta name="generator" content="hocket report">'
_WRITE = "--out report.html"


def write(
    folders: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], out: str | os.PathLike[str] = "report.html"
) -> Path:
    """Write a page about one run, or a comparison of several, and return its path.

    The page is at most about 3 MB, also for long runs, of which curves and samples are reduced; it says so. Damaged files are
    named on stderr.

    Args:
        folders: the folders of the runs, with what the logger ``jsonl`` has written there.
        out: the file to write; its folder is made.

    Raises:
        ValueError: a folder is no run's, or none was given; or ``out`` is no name of a page, or a file that is no report.

    Example:
        >>> import hocket, torch
        >>> from hocket_report import write
        >>> trainer = hocket.Trainer(
        ...     model=torch.nn.Linear(4, 1), loss=torch.nn.MSELoss(), optimizer="sgd(lr=0.1)", device="cpu",
        ...     train_data=[(torch.ones(8, 4), torch.ones(8, 1))] * 20, duration="1ep", loggers=["jsonl"],
        ... )
        >>> write([trainer.fit().run_folder], "report.html").name
        'report.html'
    """
    return compare([folders] if isinstance(folders, str | os.PathLike) else folders, out, progress=False)


def compare(folders: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str], progress: bool) -> Path:
    """Write a page about runs; see `write`. ``progress`` shows on stderr how much of the runs is read."""
    given = [Path(each) for each in folders]
    if not given:
        raise WrongValue("A report needs the folder of a run, such as runs/a; `hocket runs` lists them.")
    for folder in given:
        run_contents.check(folder)
    path = Path(out)
    with writable(path.parent, _WRITE):
        _check(path)
    runs = _read(given, progress)
    run_listing.tell_apart([run.about for run in runs])
    for line in (line for run in runs for line in run.damaged):
        print(printable(f"hocket: {line}; the report leaves that out."), file=sys.stderr)
    text = render(runs)
    with writable(path.parent, _WRITE):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text)
    return path


def _read(folders: Sequence[Path], progress: bool) -> list[Run]:
    bar, most = _Bar(folders, progress), points(len(folders))
    try:
        return [run_contents.read(folder, most, bar.begin(number)) for number, folder in enumerate(folders)]
    finally:
        bar.clear()


class _Bar:
    """Shows on stderr which part of the files of metrics is read."""

    def __init__(self, folders: Sequence[Path], shown: bool) -> None:
        self._ends = list(itertools.accumulate(files.size(folder / files.METRICS) for folder in folders))
        self._shown, self._number, self._done, self._latest = shown, 0, 0, -math.inf

    def begin(self, number: int) -> Callable[[], None]:
        """Return what is called after each block of the file of a run."""
        self._number, self._done = number, self._ends[number - 1] if number else 0
        return self._advance

    def _advance(self) -> None:
        self._done = min(self._done + BLOCK, self._ends[self._number])
        if self._shown and time.monotonic() > self._latest + 0.1:
            self._latest, share = time.monotonic(), self._done / max(self._ends[-1], 1)
            where = f"run {self._number + 1} of {len(self._ends)}"
            print(f"\r{'█' * int(share * 30):<30} {share:4.0%}, {where}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the bar."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _check(path: Path) -> None:
    """Raise ValueError unless a page can be written there without replacing anything but an earlier report."""
    if path.suffix not in (".html", ".htm"):
        name = path / "report.html" if path.is_dir() else path.with_suffix(".html")
        raise WrongValue(f"A report is an HTML page, and '{path}' does not end in .html. Write {name}.")
    if os.path.lexists(path) and not _is_report(path):
        raise WrongValue(
            f"'{path}' exists and is no report, so it is not replaced. Write another name, such as report.html."
        )


def _is_report(path: Path) -> bool:
    try:
        with opened(path) as file:
            return _MARK.encode() in file.read(2000)
    except OSError:
        return False


def render(runs: list[Run]) -> str:
    """Return the page."""
    evaluated = [name for run in runs for name in run.about.evaluated]
    data, samples = curves.charts([run.logged for run in runs], evaluated), Samples()
    shown = [
        tag("header", tag("h1", _title(runs)), panels.overview(runs)),
        _curves(runs, data),
        panels.plan(runs),
        panels.costs(runs),
        panels.profile(runs),
        samples.panel(runs),
        panels.checkpoints(runs),
        panels.configuration(runs),
        panels.system(runs),
    ]
    data["runs"] = [{"name": run.about.label, "colour": panels.colour(number)} for number, run in enumerate(runs)]
    data["histograms"] = samples.histograms
    scripts = [vega.bundle(), _file("page.js")]
    return _document(_title(runs), joined(shown), data, scripts)


def _title(runs: list[Run]) -> str:
    names = [run.about.label for run in runs]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _curves(runs: list[Run], data: dict[str, Any]) -> Markup:
    together: list[Markup] = []
    parts: list[Markup] = []
    hints: list[Markup] = []
    for title, _, wanted in curves.SECTIONS:
        here = [number for number, chart in enumerate(data["charts"]) if chart["section"] == title]
        plots = [tag("div", class_="chart", data_chart=str(number)) for number in here]
        if title == "Other values" or len(here) > 12:
            summary = tag("summary", f"{title} ({len(here)})")
            parts += [tag("details", summary, tag("div", *plots, class_="charts"))] if here else []
        elif here:
            together += plots
        else:
            hints.append(hint(joined([f"{title}: nothing was logged. Add ", code(wanted), "."])))
    axes = [tag("option", label, value=name) for name, label in _axes(data)]
    scales = [tag("option", each, value=each) for each in ("linear", "log")]
    controls = tag(
        "p",
        tag("label", "by ", tag("select", *axes, id="axis")), tag("label", "scale ", tag("select", *scales, id="scale")),
        class_="controls",
    )  # fmt: skip
    note = "Each column of pixels keeps its first, last, least and greatest value; other values are not in this page."
    reduced = [hint(f"Long curves are downsampled. {note}")] if data["reduced"] else []
    return section("curves", "Curves", controls, *reduced, tag("div", *together, class_="charts"), *hints, *parts)


def _axes(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the axes on which some run advanced."""
    names = {
        "batch": "batches",
        "epoch": "epochs",
        "sample": "samples",
        "token": "tokens",
        "seconds": "seconds of training",
    }
    return [
        (name, label)
        for name, label in names.items()
        if name == "batch" or any(any(each[name]) for each in data["positions"])
    ]


def _document(title: str, body: Markup, data: dict[str, Any], scripts: list[str]) -> str:
    """Return the document. Only these scripts may run, whatever else got into the page, and nothing is fetched."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    # Vega compiles the expressions of its specifications, which are of page.js alone.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes} 'unsafe-eval'"
    # No text can end the element: "<" is never written.
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8">{_MARK}',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>{_file('page.css')}</style>",
            "</head><body>",
            f"<main>{body}</main>",
            f'<script type="application/json" id="data">{content}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _file(name: str) -> str:
    return (resources.files("hocket_report") / name).read_text(encoding="utf-8")

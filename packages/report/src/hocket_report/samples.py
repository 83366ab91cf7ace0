"""Images, tables, texts and histograms that runs have logged, as HTML."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hocket.basics import run_files as files
from hocket.basics.safe_files import content
from hocket_report.markup import Markup, code, hint, joined, section, table, tag
from hocket_report.panels import name_of
from hocket_report.run_contents import Run

#: Bytes of images and characters of texts and tables on a page, and the most names of each run.
_IMAGES, _TEXTS, _NAMES = 700_000, 200_000, 24
_KINDS = ("images", "table", "text", "histogram")


class Samples:
    """Collect the panel, within the limits of a page."""

    def __init__(self) -> None:
        self._bytes, self._characters = _IMAGES, _TEXTS
        #: Counts and edges of the histograms, for the script of the page.
        self.histograms: list[dict[str, Any]] = []

    def panel(self, runs: Sequence[Run]) -> Markup:
        """Return the latest record of each name, of each run."""
        parts = []
        for number, run in enumerate(runs):
            latest: dict[tuple[str, str], Mapping[str, Any]] = {}
            counts: dict[tuple[str, str], int] = {}
            for line in run.media:
                kind = next((each for each in _KINDS if isinstance(line.get(each), str)), None)
                if kind is not None:
                    key = kind, line[kind]
                    latest[key], counts[key] = line, counts.get(key, 0) + 1
            shown = [self._one(run, *key, line, counts[key]) for key, line in [*latest.items()][:_NAMES]]
            if len(latest) > _NAMES:
                shown.append(hint(f"{len(latest) - _NAMES} more names are in {run.folder / files.MEDIA}."))
            if shown and len(runs) > 1:
                parts.append(tag("h3", name_of(runs, number)))
            parts += [tag("div", *shown, class_="samples")] if shown else []
        what = joined(
            [
                "No images, tables, texts or histograms were logged, such as by ",
                code("callbacks: [sample-visualizer]"),
                ".",
            ]
        )
        return section("samples", "Samples", *(parts or [hint(what)]))

    def _one(self, run: Run, kind: str, name: str, line: Mapping[str, Any], count: int) -> Markup:
        batch = files.number(line.get("batch"))
        where = [] if batch is None else [f"batch {batch:,.0f}"]
        where += [f"{count - 1} earlier"] if count > 1 else []
        omitted = files.number(line.get("omitted"))
        where += [f"{omitted:,.0f} not written"] if omitted else []
        content = {"images": self._images, "table": self._table, "text": self._text, "histogram": self._histogram}[kind]
        return tag("figure", tag("figcaption", tag("b", name), f" {', '.join(where)}"), content(run, line))

    def _images(self, run: Run, line: Mapping[str, Any]) -> Markup:
        shown, left = [], 0
        names = line.get("files")
        for name in names if isinstance(names, list) else ():
            path = files.inside(run.folder / files.MEDIA, name)
            try:
                if path is None:
                    left += 1
                    continue
                data = base64.b64encode(content(path, self._bytes, within=run.folder)).decode()
            except OSError:
                left += 1
                continue
            self._bytes -= len(data)
            shown.append(tag("img", src=f"data:image/png;base64,{data}", alt=f"{line.get('images')}", loading="lazy"))
        rest = [hint(f"{left} are missing, or too large for this page.")] if left else []
        return joined([tag("div", *shown, class_="images"), *rest])

    def _table(self, run: Run, line: Mapping[str, Any]) -> Markup:
        columns = line.get("columns")
        rows = line.get("rows")
        if not isinstance(columns, list) or not isinstance(rows, list):
            return hint("This table cannot be read.")
        body: list[list[str]] = []
        for row in (each for each in rows if isinstance(each, list)):
            cells = ["" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row]
            self._characters -= sum(map(len, cells))
            if self._characters < 0:
                return joined([table(columns, body), hint("The other rows are too long for this page.")])
            body.append(cells)
        return table(columns, body)

    def _text(self, run: Run, line: Mapping[str, Any]) -> Markup:
        text = str(line.get("content", ""))
        if len(text) > self._characters:
            return hint("This text is too long for this page.")
        self._characters -= len(text)
        return tag("pre", text)

    def _histogram(self, run: Run, line: Mapping[str, Any]) -> Markup:
        counts, edges = (_numbers(line.get(key)) for key in ("counts", "edges"))
        if not counts or len(edges) != len(counts) + 1 or len(counts) > 2000 or len(self.histograms) > 100:
            return hint("This histogram cannot be shown.")
        self.histograms.append({"counts": counts, "edges": edges})
        return tag("div", class_="plot", data_histogram=str(len(self.histograms) - 1))


def _numbers(value: Any) -> list[float]:
    found = [files.number(each) for each in value] if isinstance(value, list) else []
    numbers = [each for each in found if each is not None and math.isfinite(each)]
    return numbers if len(numbers) == len(found) else []

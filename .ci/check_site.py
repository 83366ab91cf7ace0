"""Check links, anchors, requests to elsewhere and searches of the built site: ``python .ci/check_site.py dist/site``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: What people search for, and the page that they mean.
SEARCHES = {
    "gradient accumulation": "how-to/gradient-accumulation",
    "resume": "how-to/resume",
    "out of memory": "how-to/out-of-memory",
    "early stopping": "how-to/early-stopping",
    "mixed precision": "how-to/mixed-precision",
    "several optimizers": "how-to/several-optimizers",
    "Runtime": "reference/runtime",
    "learning rate schedule": "how-to/learning-rate-schedules",
    "custom metric": "how-to/custom-metrics",
    "multi node": "how-to/multi-node",
}
#: What a browser loads by itself, by the tag and its attribute. A link is followed by people.
LOADED = {
    ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"), ("use", "href"),
    ("object", "data"), ("form", "action"),
}  # fmt: skip


class Page(HTMLParser):
    """The addresses that a page loads or links, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: list[tuple[bool, str]] = []
        """Whether a browser loads it by itself, and the address."""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        for name in ("href", "src", "data", "action"):
            if name in values:
                self.addresses.append(((tag, name) in LOADED, values[name]))
        if tag == "meta" and values.get("http-equiv") == "refresh":
            self.addresses.append((True, values["content"].partition("url=")[2].strip("'\"")))


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    wrong = [*problems(folder)]
    first = first_hits(folder)
    for query, page in SEARCHES.items():
        hit = next(iter(first(query)), "nothing")
        print(f"search {query!r}: {hit}")
        if hit != page:
            wrong.append(f"A search for {query!r} should find first {page}, not {hit}.")
    print(f"{len(list(folder.rglob('*.html')))} pages, {len(wrong)} problems")
    sys.exit("\n".join(wrong) or None)


def problems(folder: Path) -> Iterator[str]:
    """Yield the dead links of a site, its dead anchors, and what its pages request from elsewhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for loaded, address in dict.fromkeys(page.addresses):
            parts = urlsplit(address)
            where = f"{path.relative_to(folder)}: {address}"
            if parts.scheme or parts.netloc:
                if loaded and parts.scheme != "data":
                    yield f"{where} is requested from elsewhere"
                continue
            base = folder if parts.path.startswith("/") else path.parent
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{where} leads to no file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{where} leads to no anchor"


def first_hits(folder: Path) -> Callable[[str], list[str]]:
    """Return what searches the site by its own scripts and index, and gives the pages in the order of the results."""
    import quickjs

    context = quickjs.Context()
    context.eval(BROWSER)
    static = folder / "_static"
    for script in (static / "searchtools.js", static / "language_data.js", folder / "searchindex.js"):
        context.eval(script.read_text(encoding="utf-8"))

    def search(query: str) -> list[str]:
        found: list[str] = json.loads(context.eval(f"search({json.dumps(query)})"))
        return found

    return search


#: What the scripts of the search ask of a browser, and a search, which takes the results from the end as the page does.
BROWSER = """
var window = globalThis, location = {}, document = {getElementById: () => null, addEventListener: () => null}
var SPHINX_HIGHLIGHT_ENABLED = false, _ = text => text, _ready = () => null
class URLSearchParams { constructor(text) { this.get = () => text } }
function search(query) {
  location.search = query
  return JSON.stringify(Search._performSearch(...Search._parseQuery(query)).reverse().map(result => result[0]))
}
"""


if __name__ == "__main__":
    main()

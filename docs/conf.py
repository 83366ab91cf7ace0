"""The site of these pages: ``nox -s docs`` builds it. The pages are plain Markdown, which a forge shows as well."""

from __future__ import annotations

import os
import posixpath
import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
REPOSITORY = tomllib.loads((ROOT / "packages/core/pyproject.toml").read_text())["project"]["urls"]["Source"]

project = "hocket"
copyright = "the authors of hocket, Apache-2.0"
release = version = re.findall(r'__version__ = "(.*)"', (ROOT / "packages/VERSION.py").read_text())[0]
html_title = f"hocket {release}"

extensions = ["myst_parser", "sphinx_copybutton", "sphinx_llm.txt", "sphinx_reredirects", "notfound.extension"]
exclude_patterns = ["_build", "_generate"]

myst_heading_anchors = 4

copybutton_prompt_text = "$ "
llms_txt_full_build = True
llms_txt_description = "Train a PyTorch model with a loop of which every part is a plug-in."
notfound_urls_prefix = os.environ.get("DOCS_PREFIX", "/")  # where the site is published: /, or /0.1/ for a version

html_theme = "furo"
html_copy_source = False
html_theme_options = {
    "source_edit_link": f"{REPOSITORY}/edit/main/docs/{{filename}}",
    "source_view_link": f"{REPOSITORY}/blob/main/docs/{{filename}}?plain=1",
    "top_of_page_buttons": ["view", "edit"],
}

#: Pages that were at the top of docs/ before they were divided into folders: their addresses still lead to them.
MOVED = {
    "tutorials": "publishing-a-plugin your-model",
    "how-to": "checkpoints estimating evaluation from-accelerate from-composer from-lightning from-transformers "
    "language launching loggers logging migrating monitors notebooks plugins porting profiling "
    "releasing report runtime strategies sweeps",
    "reference": "configuration devices durations errors events losses optimizers precisions stability steps",
    "explanation": "architecture benchmarks evidence performance resuming security",
}
redirects = {page: f"{folder}/{page}.html" for folder, pages in MOVED.items() for page in pages.split()}


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append to an index page the navigation that its links are: pages of its folder, and indexes of folders below."""
    if posixpath.basename(page) == "index" and "{toctree}" not in source[0]:
        below = dict.fromkeys(re.findall(r"\]\(((?:[\w-]+/index)|(?!index)[\w-]+)\.md\)", source[0]))
        if page == "reference/index":  # pages that docs/_generate wrote
            folder = DOCS / "reference"
            files = sorted([*folder.glob("*.md"), *folder.glob("*/index.md")])
            below |= dict.fromkeys(file.relative_to(folder).with_suffix("").as_posix() for file in files)
            del below["index"]
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *below, "```\n"])


def link_to_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Lead links to files outside docs/ to the repository."""

    def absolute(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[1]))
        return link[0] if path.startswith("docs/") else f"]({REPOSITORY}/blob/main/{path}"

    source[0] = re.sub(r"\]\((\.\./[^)#\s]+)", absolute, source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("source-read", link_to_repository)

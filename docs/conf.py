"""The site of these pages: ``nox -s docs`` builds it. The pages are plain Markdown, which a forge shows as well."""

from __future__ import annotations

import functools
import html
import os
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
REPOSITORY = tomllib.loads((ROOT / "packages/core/pyproject.toml").read_text())["project"]["urls"]["Source"]

project = "hocket"
copyright = "the authors of hocket, Apache-2.0"
release = version = re.findall(r'__version__ = "(.*)"', (ROOT / "packages/VERSION.py").read_text())[0]
html_title = f"hocket {release}"
#: Pages that docs/_generate writes from the installed packages.
GENERATED = "reference/generated"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
extensions += ["sphinx_copybutton", "sphinx_llm.txt", "sphinx_reredirects", "notfound.extension"]
exclude_patterns = ["_build", "_generate", "reference/generated/index.md"]

myst_heading_anchors = 4
smartquotes = False  # texts of errors and options are typed, and searched for, as they are

default_role = "py:obj"  # docstrings name objects of hocket and of others in `single quotes`
autodoc_typehints_format = "short"
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 100  # a longer signature has a line for each argument
nitpicky = True  # a name that leads nowhere is an error, but for these:
nitpick_ignore_regex = [
    ("py:.*", r"(?!hocket\b).*"),  # of other packages, or in a short form: code within a text, and annotations
    (
        "py:.*",
        r"hocket\.(basics|data|hookspecs|loop|run|state)\.\w+\.\w.*",
    ),  # in a private module: results, and hints for developers
]
suppress_warnings = ["ref.python"]  # an annotation names the class `Report`, and two of them are public

copybutton_prompt_text = "$ "
llms_txt_full_build = True
llms_txt_build_parallel = False  # after the pages for people, from what was read for them
llms_txt_nested_enabled = False  # one for all pages; one for each folder would take minutes
llms_txt_description = "Train a PyTorch model with a loop of which every part is a plug-in."
notfound_urls_prefix = os.environ.get("DOCS_PREFIX", "/")  # where the site is published: /, or /0.1/ for a version

html_theme = "furo"
html_copy_source = False
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_search_scorer = str(DOCS / "_static/scorer.js")
html_theme_options = {
    "source_edit_link": f"{REPOSITORY}/edit/main/docs/{{filename}}",
    "source_view_link": f"{REPOSITORY}/blob/main/docs/{{filename}}?plain=1",
    "top_of_page_buttons": ["view", "edit"],
}

#: Pages that were at the top of docs/ before they were divided into folders. The address of each still leads to the page of
#: that name, or of a longer one; to a guide rather than to a reference, but for those in `redirects`.
MOVED = """architecture benchmarks checkpoints configuration devices durations errors estimating evaluation events evidence
from-accelerate from-composer from-lightning from-transformers language launching loggers logging losses migrating monitors
notebooks optimizers performance plugins porting precisions profiling resuming runtime strategies sweeps
your-model"""
redirects = {
    "report": "how-to/compare-runs.html",
    "steps": "how-to/several-optimizers.html",
    "how-to/releasing": "../explanation/security.html",
}
for old in MOVED.split():
    new = min(DOCS.glob(f"*/{old}*.md"), key=lambda page: (len(page.name), page))
    redirects[old] = new.relative_to(DOCS).with_suffix(".html").as_posix()


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append to an index page the navigation that its links are: pages of its folder, and indexes of folders below."""
    if page == "reference/index":
        source[0] += generated_index()
    if posixpath.basename(page) == "index" and "{toctree}" not in source[0]:
        below = dict.fromkeys(re.findall(r"\]\(((?:generated/)?(?:[\w-]+/index|(?!index)[\w-]+))\.md\)", source[0]))
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *below, "```\n"])


def name_groups(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Show the headings of index pages in the sidebar, before their first page; captions would show at its top level only."""
    for heading, first in groups().items():
        link = rf'(<li class="[^"]*"><a class="[^"]*" href="{re.escape(context["pathto"](first))}">)'
        caption = rf'<li class="caption"><span class="caption-text">{html.escape(heading)}</span></li>\1'
        context["furo_navigation_tree"], shown = re.subn(link, caption, context["furo_navigation_tree"])
        assert shown == 1, f"The sidebar of {page} has {first} {shown} times."


@functools.cache
def groups() -> dict[str, str]:
    """Return the headings of index pages, and the first page of each."""
    found, named = {}, set[str]()
    for index in sorted(DOCS.glob("*/index.md")):
        for section in index.read_text(encoding="utf-8").split("\n## ")[1:]:
            pages = [f"{index.parent.name}/{name}" for name in re.findall(r"\]\(([\w-]+)\.md\)", section)]
            if new := [name for name in pages if name not in named]:
                found[section.splitlines()[0]] = new[0]
                named.update(new)
    return found


def generated_index() -> str:
    """Return the table of the pages that docs/_generate wrote, which the repository does not hold."""
    text = (DOCS / GENERATED / "index.md").read_text(encoding="utf-8")
    return re.sub(r"^# ", "\n## ", re.sub(r"\]\((?=[\w-]+[/.])", "](generated/", text))


def link_to_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Lead links to files outside docs/ to the repository."""

    def absolute(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[1]))
        return link[0] if path.startswith("docs/") else f"]({REPOSITORY}/blob/main/{path}"

    source[0] = re.sub(r"\]\((\.\./[^)#\s]+)", absolute, source[0])


def mend(app: Sphinx, doctree: nodes.document) -> None:
    """Make a page smaller, and the same for every builder."""
    for node in list(doctree.findall()):
        if node.document not in (
            None,
            doctree,
        ):  # of eval-rst, whose settings hold all pages: saving a page would save them
            node.document = doctree
        if isinstance(node, nodes.abbreviation):  # the * and / of a signature, with a tip that Markdown does not have
            node.parent.replace(node, nodes.Text(node.astext()))


def hide_edit_links(app: Sphinx, page: str, template: str, context: dict[str, object], doctree: object) -> None:
    """Offer no source of a page that has none in the repository."""
    if page.startswith(GENERATED):
        context["theme_top_of_page_buttons"] = []


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", mend)
    app.connect("html-page-context", hide_edit_links)
    app.connect("html-page-context", name_groups, priority=900)  # after the theme, which makes the tree
    app.connect("source-read", add_navigation)
    app.connect("source-read", link_to_repository)

"""What a card says of a plug-in, against its signature; where a method comes from; and results."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Collection, Iterator
from importlib import metadata
from typing import Any

#: A paper by its number or by author and year, or a line that names another source.
_CITED = re.compile(
    r"(?i:arxiv)[\s:./]*(abs/|pdf/)?\d{4}\.\d{4,5}|\b10\.\d{4,9}/\S+|\b[Ss]ources?:\s*\w|^#+ (Sources?|References?)\b.*\n\s*\S"
    r"|\b[A-Z][\w'-]+(,? (and|&) [A-Z][\w'-]+| et al\.?| and others),? \(?(19|20)\d\d\b"
    r"|\((?!Copyright)[A-Z][\w'-]+,? (19|20)\d\d\b",
    re.MULTILINE,
)
_LINK = re.compile(r"https?://[^\s)>\"'\]`]+")
#: Where papers are, and repositories of code: ``/owner/name``.
_PAPERS = re.compile(
    r"https?://([\w.-]+\.)?(arxiv\.org|doi\.org|openreview\.net|aclanthology\.org|jmlr\.org|mlr\.press|mlsys\.org|neurips\.cc|nips\.cc"
    r"|thecvf\.com|acm\.org|ieee\.org|semanticscholar\.org|distill\.pub|biorxiv\.org|hal\.science)/\S+|https?://\S+\.pdf\b"
)
_CODE = re.compile(
    r"https?://(www\.)?(github\.com|gitlab\.com|codeberg\.org|bitbucket\.org|huggingface\.co)/[\w.-]+/[\w.-]+"
)
_RESULTS = re.compile(
    r"^#+ .*(evidence|results|measure|benchmark)[^\n]*|<!-- evidence -->", re.IGNORECASE | re.MULTILINE
)
_OF_ARGUMENTS = re.compile(r"\| *\**(name|argument|(hyper-?)?parameter|option|setting)s?\b", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])[-+−]?\d+(\.\d+)?")


def names_a_source(text: str, own: Collection[str] = ()) -> bool:
    """Return whether a text cites a paper, or links to one or to a repository other than the ``own`` ones.

    Example:
        >>> from hocket_testkit.cards import names_a_source
        >>> names_a_source("Mix pairs (Zhang et al. 2018)."), names_a_source("See https://example.org/docs.")
        (True, False)
    """
    links = [each.rstrip(".,;") for each in _LINK.findall(text)]
    others = [each for each in links if not any(each.startswith(url.rstrip("/")) for url in own if url)]
    if any(_PAPERS.match(each) or _CODE.match(each) for each in others):
        return True
    return _CITED.search(_LINK.sub("", text)) is not None


def own_links(distribution: str) -> list[str]:
    """Return the addresses that a distribution, and hocket, give as theirs."""
    links = []
    for name in (distribution, "hocket"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            given = metadata.metadata(name)
            links += [each.rpartition(",")[2].strip() for each in given.get_all("Project-URL") or []]
            links += given.get_all("Home-page") or []
    return links


def missing_results(text: str) -> str:
    """Return what a section of results lacks to be judged by others, or empty; that its numbers are true, nobody can read."""
    headings = list(_RESULTS.finditer(text))
    lacking = [_lacking(text[each.end() :], len(each.group()) - len(each.group().lstrip("#"))) for each in headings]
    fewest: list[str] = min(lacking, key=len, default=["a section `## Evidence`"])
    return " and ".join(fewest)


def _lacking(text: str, level: int) -> list[str]:
    section = re.split(rf"^#{{1,{level or 2}}} ", text.lstrip("\n# "), maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("|") and _NUMBER.search(line)]
    given = {
        "a table with a number for each run": bool(rows),
        "results of a run with it and of one without it": len(rows) > 1 or len(_NUMBER.findall("".join(rows))) > 2,
        "the number of seeds": re.search(r"\bseeds?\b", section, re.IGNORECASE) is not None,
    }
    return [name for name, there in given.items() if not there]


def stale(text: str, name: str, obj: Any, several: bool) -> list[str]:
    """Return what a card says of arguments that the plug-in's signature does not.

    Args:
        text: the card, in Markdown.
        name: the plug-in's name.
        obj: its class or function.
        several: whether the text is about other plug-ins, too; then only sections whose heading has the name are read.

    Example:
        >>> from hocket_testkit.cards import stale
        >>> class Noise:
        ...     def __init__(self, eta=0.3): ...
        >>> stale("| argument | default |\\n|---|---|\\n| `eta` | 0.1 |\\n| `decay` | 1 |", "noise", Noise, several=False)
        ['eta is 0.1 (its default is 0.3)', 'decay (there is no such argument)']
    """
    try:
        parameters = inspect.signature(obj).parameters
    except (TypeError, ValueError):
        return []
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return []
    sections = re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    words = (name, getattr(obj, "__name__", name))
    if several:
        sections = [each for each in sections if any(word in each.partition("\n")[0] for word in words)]
    faults = []
    for section in sections:
        for table in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
            rows = list(_arguments(table))
            if _OF_ARGUMENTS.match(table) and any(key in parameters for key, _ in rows):
                for key, default in rows:
                    if key not in parameters:
                        faults.append(f"{key} (there is no such argument)")
                    elif _differs(default, parameters[key].default):
                        faults.append(f"{key} is {default} (its default is {parameters[key].default!r})")
        for key in _passed(section, *words):
            if key not in parameters and key != "groups":  # of every optimizer
                faults.append(f"{key} in an example (there is no such argument)")
    return list(dict.fromkeys(faults))


def _arguments(table: str) -> Iterator[tuple[str, str]]:
    """Return the arguments in the first column of a table, each with the text in that of defaults."""
    header, *rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("| \t"))] for line in table.splitlines()
    ]
    at = next((number for number, cell in enumerate(header) if "default" in cell.lower()), None)
    for row in rows:
        default = row[at].strip("` ") if at is not None and at < len(row) else ""
        for key in re.findall(r"`(\w+)`", row[0]):
            yield key, default


def _differs(text: str, default: Any) -> bool:
    """Return whether a text is a literal other than the default."""
    try:
        given = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return False
    if not isinstance(default, bool | int | float | str):  # None may mean a value that is found later
        return False
    return bool(given != default) and str(given) != str(default)


def _passed(section: str, name: str, cls: str) -> Iterator[str]:
    """Return the keywords that a section's code gives to the class, or to the name in a configuration."""
    code = "\n".join(
        [*re.findall(r"```.*?\n(.*?)```", section, re.DOTALL), *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", section)]
    )
    for call in re.findall(
        rf"(?<![\w.])(?:\w+\.)?{re.escape(cls)}\(([^()]*)\)|[\"']{re.escape(name)}\(([^()]*)\)", code
    ):
        yield from re.findall(r"(\w+)\s*=(?!=)", "".join(call))
    for given in re.findall(rf"[\"']?{re.escape(name)}[\"']?: *{{([^{{}}]*)}}", code):
        yield from re.findall(r"(?:^|,)\s*[\"']?(\w+)[\"']?\s*:(?=\s)", given)

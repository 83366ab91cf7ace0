"""Fill the templates, and write the folder of a distribution at once."""

from __future__ import annotations

import argparse
import ast
import builtins
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from string import Template

from hocket.basics.kinds import singular
from hocket.basics.run_folder import writable
from hocket.errors import ExistingFile, WrongValue
from hocket_cli.scaffold.names import Names, check

TEMPLATES = Path(__file__).parent


def run(args: argparse.Namespace) -> int:
    """Write the distribution, print what to type next, and return 0."""
    names = Names(args.kind, args.name)
    check(names)
    author, email = _author(args.author, names)
    _check_url(args.url)
    folder = Path(args.into) / names.distribution
    write(folder, rendered(names, args.license, author, email, args.url))
    print(
        f"Wrote {folder}: {singular(names.kind)} '{names.name}', by {author}, licence {args.license}. Type:\n\n"
        f"  cd {shlex.quote(str(folder))}\n  pip install -e . --group test\n  python -m pytest"
    )
    return 0


def rendered(names: Names, license: str, author: str, email: str = "", url: str | None = None) -> dict[str, str]:
    """Return the text of every file by its path in the folder. Raises WrongValue for a name that the code needs itself."""
    kind = TEMPLATES / "kinds" / names.kind
    values = _values(names, license, author, email, url)
    values["card"] = _filled(kind / "card.md", values).rstrip()
    values["description"] = _quoted(values["card"].partition("\n")[0].rstrip("."))
    files = {"LICENSE": TEMPLATES / "licenses" / f"{license}.txt"}
    for folder in (TEMPLATES / "common", kind):
        files |= {path.relative_to(folder).as_posix().removesuffix(".txt"): path for path in folder.rglob("*.txt")}
    texts = {
        path.replace("PACKAGE", names.package).replace("MODULE", names.module): _filled(template, values)
        for path, template in sorted(files.items())
    }
    taken = set(dir(builtins)).union(*(_imported(text, names) for path, text in texts.items() if path.endswith(".py")))
    if names.attribute in taken:
        raise WrongValue(
            f"'{names.name}' cannot be the name of a new plug-in: its class {names.attribute} would hide another one that "
            "its code uses. Add a word to it."
        )
    return texts


def _values(names: Names, license: str, author: str, email: str, url: str | None) -> dict[str, str]:
    """Return what the templates are filled with, besides the card."""
    holder = {"name": author, "email": email} if email else {"name": author}
    return {
        "kind": names.kind,
        "singular": singular(names.kind),
        "name": names.name,
        "distribution": names.distribution,
        "package": names.package,
        "module": names.module,
        "class_name": names.class_name,
        "attribute": names.attribute,
        "object": {"commands": "command", "datasets": "function"}.get(names.kind, "class"),
        "needs": ', "hocket-streaming>=0.1,<0.2"' if names.kind == "shards" else "",
        "license": license,
        "holder": author,
        "author": "{ " + ", ".join(f"{key} = {_quoted(value)}" for key, value in holder.items()) + " }",
        "urls": f"\n[project.urls]\nSource = {_quoted(url)}\n" if url else "",
        "year": str(datetime.date.today().year),
    }


def _filled(template: Path, values: dict[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(values)


def write(folder: Path, texts: dict[str, str]) -> None:
    """Write the files into a new folder, which appears when it is complete. Raises ExistingFile, or WrongFile."""
    if os.path.lexists(folder):
        raise ExistingFile(f"{folder} exists already, and nothing in it is replaced. Write --into with another folder.")
    temporary = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}")
    with writable(folder.parent, "--into plugins"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            for path, text in texts.items():
                (temporary / path).parent.mkdir(parents=True, exist_ok=True)
                (temporary / path).write_text(text, encoding="utf-8", newline="\n")
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _quoted(text: str) -> str:
    """Return a string of TOML."""
    return json.dumps(text, ensure_ascii=False)


def _imported(source: str, names: Names) -> set[str]:
    """Return the names that a module imports from elsewhere."""
    imports = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Import | ast.ImportFrom))
    return {
        alias.name.partition(".")[0]
        for each in imports
        if not (getattr(each, "module", None) or "").startswith(names.package)
        for alias in each.names
    }


#: A name without what addresses and metadata separate names by, and with a letter; and an e-mail address.
_NAME, _ADDRESS = r"[^<>@,;\x00-\x1f]*[^\W\d_][^<>@,;\x00-\x1f]*", r"[^<>@,;\s]+@[^<>@,;\s]+"


def _author(given: str | None, names: Names) -> tuple[str, str]:
    """Return name and e-mail address: those given, else git's, else the authors of the distribution."""
    if given is None:
        name, address = _git("user.name"), _git("user.email")
        name = name if re.fullmatch(_NAME, name) else f"The {names.distribution} authors"
        return name, address if re.fullmatch(_ADDRESS, address) else ""
    match = re.fullmatch(rf"({_NAME}?)\s*(?:<({_ADDRESS})>)?", given.strip())
    if match is None:
        raise WrongValue(
            f"--author takes the name of a person or group and, if you like, an address, not {given!r}. Write "
            "--author 'Ada Lovelace <ada@example.org>'."
        )
    return match[1], match[2] or ""


def _check_url(url: str | None) -> None:
    """Raise WrongValue unless a URL is one that the metadata may have."""
    if url is not None and not re.fullmatch(r"https?://[^\s/@:]+(:[0-9]+)?(/\S*)?", url):
        raise WrongValue(
            f"--url takes the address of the repository, not {url!r}. Write --url https://github.com/NAME/REPOSITORY."
        )


def _git(key: str) -> str:
    try:
        asked = subprocess.run(["git", "config", key], capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return ""
    return asked.stdout.strip()

"""What a release rests on: one version, complete metadata, checked contents, an index that keeps our names, pinned actions."""

from __future__ import annotations

import io
import itertools
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from pages import ROOT

sys.path += [str(ROOT / ".ci"), str(ROOT / "packages")]

import check_distributions
import raise_version

PROJECTS = sorted(ROOT.glob("packages/*/pyproject.toml"))
VERSION = Version(re.findall('__version__ = "(.*)"', (ROOT / "packages/VERSION.py").read_text())[0])
LICENSE = b"terms"


# --- metadata and versions


def texts(folder: Path) -> dict[str, str]:
    files = [*folder.glob("*/pyproject.toml"), folder / "VERSION.py"]
    return {str(file.relative_to(folder)): file.read_text() for file in files}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for project in PROJECTS:
        folder = tmp_path / "packages" / project.parent.name
        folder.mkdir(parents=True)
        shutil.copy(project, folder)
    shutil.copy(ROOT / "packages/VERSION.py", tmp_path / "packages")
    return tmp_path / "packages"


def test_all_packages_share_cores_facts_and_ask_for_the_present_version(packages: Path) -> None:
    raise_version.write(VERSION, packages)
    assert texts(packages) == texts(ROOT / "packages"), "run: nox -s version -- " + str(VERSION)


@pytest.mark.parametrize("text", ["70.2.0rc1", "70.2.0", "70.2.3", "71.0.0"])
def test_a_raised_version_satisfies_every_requirement_between_the_packages(text: str, packages: Path) -> None:
    version, ours, checked = Version(text), {tomllib.loads(each.read_text())["project"]["name"] for each in PROJECTS}, 0
    raise_version.write(version, packages)
    assert f'__version__ = "{text}"' in (packages / "VERSION.py").read_text()
    for project in packages.glob("*/pyproject.toml"):
        table = tomllib.loads(project.read_text())["project"]
        lists = [table["dependencies"], *table.get("optional-dependencies", {}).values()]
        for requirement in map(Requirement, itertools.chain(*lists)):
            if requirement.name in ours and requirement.specifier:
                assert requirement.specifier.contains(version), requirement  # without leave for pre-releases
                assert not requirement.specifier.contains(VERSION, prereleases=True), requirement
                assert not requirement.specifier.contains(f"{version.major}.{version.minor + 1}.0"), requirement
                checked += 1
    assert checked > 40


def test_a_version_has_three_numbers() -> None:
    with pytest.raises(SystemExit, match=r"type for instance 0\.2\.0"):
        raise_version.main("0.2")


def test_a_package_index_can_follow_every_link_of_a_readme() -> None:
    for readme in ROOT.glob("packages/*/README.md"):
        links = re.findall(r"\]\(([^)]+)\)", readme.read_text())
        assert all(link.startswith("https://") for link in links), (readme, links)


def test_changes_are_of_a_known_kind() -> None:
    kinds = {
        each["directory"] for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    }
    for file in ROOT.glob("changes/*"):
        assert file.name == "README.md" or re.fullmatch(rf"\+[\w-]+\.({'|'.join(kinds)})\.md", file.name), file


# --- what a distribution holds

METADATA = "".join(f"{field}: given\n" for field in check_distributions.METADATA).encode()
WHEEL = {
    "a/__init__.py": b"",
    "a/py.typed": b"",
    "a-1.dist-info/METADATA": METADATA,
    "a-1.dist-info/licenses/LICENSE": LICENSE,
}
SDIST = {"src/a/__init__.py": b"", "src/a/py.typed": b"", "PKG-INFO": METADATA, "LICENSE": LICENSE}


def problems(files: dict[str, bytes], file: Path) -> list[str]:
    if file.suffix == ".whl":
        with ZipFile(file, "w") as wheel:
            for name, data in files.items():
                wheel.writestr(name, data)
    else:
        with tarfile.open(file, "w:gz") as sdist:
            for name, data in files.items():
                (member := tarfile.TarInfo(f"a-1/{name}")).size = len(data)
                sdist.addfile(member, io.BytesIO(data))
    return check_distributions.check(file, LICENSE, ["/home/somebody/"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"a/tests/test_a.py": b""}, "a/tests/test_a.py is no source"),
        ({"a/__pycache__/b.cpython-311.pyc": b""}, "b.cpython-311.pyc is no source"),
        ({"a/.env": b""}, "a/.env is no source"),
        ({"b/__init__.py": b""}, "expected one typed package, found ['a', 'b']"),
        ({"a/b.py": b"FOLDER = '/home/somebody/a'"}, "a/b.py mentions /home/somebody/"),
        ({"a-1.dist-info/licenses/LICENSE": b"other terms"}, "its LICENSE differs"),
        ({"a-1.dist-info/METADATA": METADATA.replace(b"Keywords", b"Words")}, "its metadata has no Keywords"),
        ({"a-1.dist-info/entry_points.txt": b"[hocket.v1.loggers]\nb = a.b:B\n"}, "hocket.v1.loggers b = a.b:B, but"),
    ],
)
def test_a_faulty_wheel_is_found(change: dict[str, bytes], problem: str, tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    assert problems(WHEEL, wheel) == []
    (found,) = problems(WHEEL | change, wheel)
    assert problem in found


def test_a_faulty_sdist_is_found(tmp_path: Path) -> None:
    sdist = tmp_path / "a-1.tar.gz"
    assert problems(SDIST, sdist) == []
    found = problems(SDIST | {"src/a/tests/test_a.py": b"", "run.log": b"/home/somebody/"}, sdist)
    assert [each.split()[1] for each in found] == ["a/tests/test_a.py", "run.log", "expected", "run.log"]


# --- the index of a rehearsal


def test_names_of_ours_never_lead_to_another_index(tmp_path: Path) -> None:
    pytest.importorskip("pypiserver")
    pytest.importorskip("uv")
    from local_index import index

    (tmp_path / "hocket_a-1.0-py3-none-any.whl").write_bytes(b"")

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    def status(url: str, name: str) -> int:
        opener = urllib.request.build_opener(Stay, urllib.request.ProxyHandler({}))
        try:
            return opener.open(f"{url}/simple/{name}/").status
        except urllib.error.HTTPError as error:
            return error.code

    with index(tmp_path, redirect=True) as url:
        assert [status(url, name) for name in ("hocket-a", "hocket-absent", "torch")] == [200, 403, 303]
    with index(tmp_path, redirect=False) as url:
        assert [status(url, name) for name in ("hocket-a", "hocket-absent", "torch")] == [200, 403, 404]
        uv = (sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--no-cache", "--no-config")
        indexes = ("--index", f"{url}/simple/", "--default-index", "http://127.0.0.1:9/")  # where nobody listens
        command = [*uv, *indexes, "--python", sys.executable, "hocket-absent"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "403 Forbidden" in done.stderr and "127.0.0.1:9" not in done.stderr, done.stderr


# --- workflows


def test_every_action_is_pinned_to_a_commit() -> None:
    """In this repository's workflows, and in whatever else here is copied into one: pages, templates, examples."""
    skipped = {".git", ".venv", ".nox", "node_modules"}
    suffixes = {".yml", ".yaml", ".md", ".py", ".toml", ".txt", ".jinja", ".tmpl"}
    used = [
        (file, action, rest)
        for folder in (ROOT / ".github", ROOT / "docs", ROOT / "packages", ROOT / "examples")
        for file in folder.rglob("*")
        if file.suffix in suffixes and not skipped & set(file.parts)
        for action, rest in re.findall(r"^\s*(?:- )?uses: *([\w./-]+@\S+)(.*)", file.read_text(), re.MULTILINE)
    ]
    assert {file.name for file, *_ in used} >= {"test.yml", "release.yml"}
    for file, action, rest in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) and re.fullmatch(r" # v\d+\.\d+\.\d+", rest), (
            file,
            action,
            rest,
        )

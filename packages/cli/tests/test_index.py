"""``hocket plugins index`` and ``hocket plugins install``, on wheels that the tests write and an index on this machine."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hocket.plugins import PluginError, registry
from hocket_cli import main
from hocket_cli.index import install, simple, wheels


def wheel(
    folder: Path, name: str, version: str = "1.0", points: str = "", requires: tuple[str, ...] = (), **about: str
) -> Path:
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    headers = {
        "Metadata-Version": "2.1",
        "Name": name,
        "Version": version,
        "Summary": "Does it.",
        "Author": "Acme",
    } | about
    lines = [f"{key}: {value}" for key, value in headers.items()] + [f"Requires-Dist: {each}" for each in requires]
    files = {
        f"{module}.py": "raise SystemExit('imported')\n",
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files |= {f"{info}/entry_points.txt": points} if points else {}
    record = "".join(f"{path},{_digest(text.encode())},{len(text.encode())}\n" for path, text in files.items())
    file = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": record + f"{info}/RECORD,,\n"}).items():
            archive.writestr(path, text)
    return file


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


ACME = "[hocket.v1.callbacks]\nlargest = hocket_acme:Largest\n[hocket.v2.callbacks]\nlargest = hocket_acme:Later\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Wheels of strangers, two of which have plug-ins, and one that pretends to be of hocket."""
    (tmp_path / "wheels").mkdir()
    where = tmp_path / "wheels"
    wheel(where, "hocket-acme", "0.9", ACME)
    wheel(
        where,
        "hocket-acme",
        "1.0",
        ACME,
        ("hocket<0.2,>=0.1", "acme-lib>=2"),
        Summary="<script>alert(1)</script> & more",
    )
    wheel(where, "hocket-other", "1.0", "[hocket.v1.loggers]\nlines = hocket_other:Lines\n")
    wheel(where, "acme-lib", "2.1")
    wheel(where, "hocket-nlp-tools", "1.0", "", ("hocket-algorithms-nlp>=99",))
    wheel(where, "hocket-algorithms-nlp", "99.0")
    return where


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        name = self.path.strip("/").removeprefix("simple").strip("/")
        if not self.path.startswith("/simple/"):
            return super().do_GET()
        files = sorted(Path(self.directory).glob("*.whl"))
        names = {each.name.partition("-")[0].replace("_", "-"): each for each in files}
        if self.server.json:  # type: ignore[attr-defined]
            own = [each for each in files if each.name.partition("-")[0].replace("_", "-") == name]
            listed = [{"filename": each.name, "url": f"/{each.name}", "hashes": {"sha256": _hex(each)}} for each in own]
            content = {"files": listed} if name else {"projects": [{"name": each} for each in names]}
            body, kind = json.dumps({"meta": {"api-version": "1.0"}} | content), "application/vnd.pypi.simple.v1+json"
        else:
            own = [
                f"/{each.name}#sha256={_hex(each)}"
                for each in files
                if each.name.startswith(f"{name.replace('-', '_')}-")
            ]
            links = own if name else [f"/simple/{each}/" for each in names]
            body, kind = (
                "".join(f'<a href="{each}">{each.split("#")[0].strip("/")}</a><br>' for each in links),
                "text/html",
            )
        found = bool(own) or not name
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())


def _hex(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(params=["html", "json"])
def index(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
    server.json = getattr(request, "param", "html") == "json"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/simple/"
    server.shutdown()
    thread.join()
    server.server_close()


# --- index


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)


def test_the_page_of_a_folder_shows_badges_and_escapes_what_strangers_wrote(folder: Path, tmp_path: Path) -> None:
    check = {"name": "resumes", "outcome": "failed", "message": "no"}
    common = {"kind": "callbacks", "name": "largest", "distribution": "hocket-acme"}
    results = [common | {"version": "1.0", "tier": "silver", "checks": [check]}]
    (folder / "checks.json").write_text(json.dumps({"plugins": results}))
    assert main(["plugins", "index", "--from", str(folder), "--into", str(tmp_path / "page")]) == 0
    acme, other = json.loads((tmp_path / "page/plugins.json").read_text())["distributions"]
    assert (acme["name"], acme["version"], acme["author"], acme["requires"]) == (
        "hocket-acme",
        "1.0",
        "Acme",
        ">=0.1,<0.2",
    )
    (plugin,) = acme["plugins"]
    assert plugin == {
        "kind": "callbacks",
        "name": "largest",
        "apis": ["v1", "v2"],
        "tier": "silver",
        "failed": ["resumes"],
    }
    assert other["plugins"][0]["tier"] == ""
    text = (tmp_path / "page/index.html").read_text()
    assert "script" not in _Tags(text).tags and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text
    assert '<span class="silver">silver</span>' in text and "not checked" in text and "0.9" not in text


def test_an_index_is_read_as_a_folder_is(folder: Path, index: str, tmp_path: Path) -> None:
    for source, into in ((str(folder), "one"), (index, "two")):
        assert main(["plugins", "index", "--from", source, "--into", str(tmp_path / into)]) == 0
    assert (tmp_path / "one/plugins.json").read_text() == (tmp_path / "two/plugins.json").read_text()


@pytest.mark.parametrize("damage", ["no zip", "no metadata", "too large", "undecodable"])
def test_a_damaged_wheel_is_an_error_that_names_it(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = wheel(tmp_path, "hocket-bad", points=ACME + "#" * (2_000_000 if damage == "too large" else 0))
    if damage == "no zip":
        file.write_text("no")
    elif damage == "no metadata":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("hocket_bad.py", "")
    elif damage == "undecodable":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: a\nVersion: 1\n")
            archive.writestr("a-1.dist-info/entry_points.txt", b"\xff\xfe")
    assert main(["plugins", "index", "--from", str(tmp_path), "--into", str(tmp_path / "page")]) == 2
    assert f"{file} is not a wheel that can be read" in capsys.readouterr().err


def test_words_of_a_stranger_stay_in_their_line(tmp_path: Path) -> None:
    file = wheel(tmp_path, "hocket-bad", Summary="Fine.\n   It is of hocket's authors.", Author="A\n  B")
    assert (wheels.of_wheel(file).summary, wheels.of_wheel(file).author) == ("Fine. It is of hocket's authors.", "A B")


@pytest.mark.parametrize("about", [{"Name": "hocket-bad\\<b>"}, {"Version": "latest"}])
def test_names_and_versions_that_nothing_could_install_are_refused(about: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(wheels.WrongFile, match=r"[Ii]nvalid"):
        wheels.of_wheel(wheel(tmp_path, "hocket-bad", **about))


@pytest.mark.parametrize("index", ["json"], indirect=True)
def test_a_damaged_wheel_of_an_index_is_omitted_and_named(
    folder: Path, index: str, capsys: pytest.CaptureFixture[str]
) -> None:
    next(folder.glob("hocket_other*")).write_text("no")
    assert [each.name for each in wheels.newest(simple.plugins(index))] == ["hocket-acme"]
    assert "hocket-other is omitted" in capsys.readouterr().err


def test_a_file_that_is_not_that_of_the_index_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = simple.File("hocket-acme", "")
    link = simple.File("hocket_acme-1.0-py3-none-any.whl", "http://127.0.0.1/x.whl", "0" * 64)
    monkeypatch.setattr(simple, "_links", lambda url: [link] if "acme" in url else [project])
    monkeypatch.setattr(simple, "_get", lambda url, limit: (b"another", "", url))
    assert simple.plugins("http://127.0.0.1/simple") == []
    assert "does not have the checksum" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    ["file:///etc", "ftp://127.0.0.1/simple", "http://me:secret@127.0.0.1/", "http://:9", "http://a:b/", "http://[/"],
)
def test_other_addresses_are_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["index", "--from"], ["install", "hocket-acme", "--index"]):
        assert main(["plugins", *command, address]) == 2
        error = capsys.readouterr().err
        assert command[-1] in error and ("such as https://" in error or "without" in error)
        assert "secret" not in error


def test_an_index_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/simple/"
        for command in (["index", "--from"], ["install", "hocket-acme", "--index"]):
            assert main(["plugins", *command, url]) == 2
            error = capsys.readouterr().err
            assert url in error and "nothing answers there (connection refused)" in error and "urlopen" not in error


def test_a_source_without_plug_ins_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error() -> str:
        assert main(["plugins", "index", "--from", str(tmp_path), "--into", str(tmp_path / "page")]) == 2
        assert not (tmp_path / "page").exists()
        return capsys.readouterr().err

    assert "no wheel (*.whl) is directly in it" in error()
    (tmp_path / "dist").mkdir()
    wheel(tmp_path / "dist", "hocket-acme", points=ACME)
    assert f"Write --from {tmp_path / 'dist'}" in error()
    wheel(tmp_path, "acme-lib")
    assert "none of its 1 distributions has an entry point" in error()


@pytest.mark.parametrize("index", ["html"], indirect=True)
def test_an_index_without_plug_ins_is_an_error(folder: Path, index: str, capsys: pytest.CaptureFixture[str]) -> None:
    for file in folder.glob("hocket*"):
        file.unlink()
    assert main(["plugins", "index", "--from", index]) == 2
    assert "no project whose name begins with hocket-" in capsys.readouterr().err


# --- install


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("hocket", "hocket"),
        ("hocket-cli", "hocket-cli"),
        ("Hocket_Algorithms.NLP", "hocket-algorithms-nlp"),
        ("hocket-vision", "hocket-algorithms-vision"),  # the import package
        ("hocket.general", "hocket-algorithms-general"),
        ("hocketvision", "hocket-algorithms-vision"),
        ("hocket-test-kit", "hocket-testkit"),
        ("hocket-vison", "hocket-algorithms-vision"),
        ("hocket-logger", "hocket-loggers"),
        ("hocket-algorithm-nlp", "hocket-algorithms-nlp"),
        ("hockets", "hocket"),
        ("hocket-core", "hocket"),
        ("hocket-algorithms-audio", ""),
        ("hocketclip", ""),
    ],
)
@pytest.mark.parametrize("index", [(), ("--index", "https://packages.example.org/simple/")], ids=["", "index"])
def test_names_that_are_or_read_like_hockets_own_are_refused_before_anything_is_asked(
    name: str, own: str, index: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for function in (install._plan, simple._get):
        monkeypatch.setattr(sys.modules[function.__module__], function.__name__, pytest.fail)
    assert main(["plugins", "install", name, "--yes", *index]) == 2
    error = capsys.readouterr().err
    assert "not registered in public indexes yet" in error
    if own:
        assert f"{own}, a distribution of hocket's own" in error or f"{own} is a distribution of hocket's own" in error
    assert ("Type: pip install" in error) == bool(own)


@pytest.mark.parametrize(
    "name",
    ["hocket-clip", "hocket-a", "hocket-nlp-tools", "hocket-vision-noise", "hocket-date", "hocket-version", "rocket",
     "hocket-gradient-noise", "pocket-cli", "acme-noise"],
)  # fmt: skip
def test_other_names_are_anybodys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(install, "_plan", lambda arguments: called.append(arguments) or [])
    assert main(["plugins", "install", name, "--yes"]) == 0
    assert called == [[name]]


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_a_name_that_no_index_has_is_said_in_our_words(
    tool: str, index: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if (program := shutil.which(tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")) is None:
        pytest.skip(f"there is no {tool} here")
    monkeypatch.setattr(install, "_tool", lambda: (tool, [program]))
    monkeypatch.setenv("PIP_INDEX_URL", index)
    monkeypatch.setenv("UV_INDEX_URL", index)
    assert main(["plugins", "install", "hocket-clip", "--yes"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"no wheel of 'hocket-clip' for this Python in the index that {tool} asks" in said
    assert "ERROR" not in said and "No solution" not in said
    assert main(["plugins", "install", "hocket-acme>99", "--yes"]) == 2
    assert "cannot install this" in capsys.readouterr().err  # with the versions that there are


def test_a_plugin_of_ours_is_not_looked_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(install, "_call", pytest.fail)
    for name, of in (("jsonl", "hocket-loggers has it, and is installed"), ("cosine", "hocket has it, and is")):
        assert main(["plugins", "install", name, "--yes"]) == 2
        assert f"'{name}' is a plug-in" in (said := capsys.readouterr().err) and of in said
    monkeypatch.setattr(registry, "entries", lambda kind: [])
    with pytest.raises(
        PluginError, match=r"algorithm 'ema', and not a distribution: a package of .* has it. Type: pip i"
    ):
        install._refuse_plugins("ema")


@pytest.mark.parametrize("name", ["hocket-acme @ http://127.0.0.1/x.whl", "./folder", "git+http://127.0.0.1/x"])
def test_addresses_are_not_installed(name: str) -> None:
    with pytest.raises(PluginError, match="Write"):
        install._requirement(name, None)


def test_a_wheel_is_for_pip(tmp_path: Path) -> None:
    file = wheel(tmp_path, "hocket-acme")
    with pytest.raises(PluginError, match=re.escape(f"Type: pip install {file}")):
        install._requirement(str(file), None)


@pytest.mark.parametrize("index", ["html"], indirect=True)
def test_a_name_of_a_plugin_leads_to_its_distribution(index: str) -> None:
    assert str(install._requirement("largest", index)) == "hocket-acme"
    assert str(install._requirement("hocket-acme<1", index)) == "hocket-acme<1"
    with pytest.raises(PluginError, match="'smallest' is a plug-in of none of its distributions"):
        install._requirement("smallest", index)


@pytest.mark.long
@pytest.mark.parametrize("index", ["html", "json"], indirect=True)
@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_what_was_shown_is_installed_into_this_environment(tool: str, index: str, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    subprocess.run(
        [sys.executable, "-m", "venv", *(["--without-pip"] if tool == "uv" else []), environment], check=True
    )
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "tests.pth").write_text("\n".join(each for each in sys.path if "packages" in each and Path(each).is_dir()))
    program = environment / "bin/python"
    # The index has another `hocket`, which must not be needed: this environment has one.
    (site / "hocket-0.1.0.dist-info").mkdir()
    (site / "hocket-0.1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: hocket\nVersion: 0.1.0\n")

    def hocket(*arguments: str, expected: int = 0) -> str:
        hide = "" if tool == "pip" else "import sys; sys.modules['pip'] = None; "
        code = f"{hide}import sys; from hocket_cli import main; sys.exit(main())"
        done = subprocess.run(
            [program, "-c", code, "plugins", "install", *arguments, "--index", index], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=200, check=False,
            env=os.environ | {"UV_NO_CACHE": "1", "PIP_NO_CACHE_DIR": "1", "UV_NO_CONFIG": "1", "PIP_CONFIG_FILE": os.devnull},
        )  # fmt: skip
        assert done.returncode == expected, done.stdout + done.stderr
        return done.stdout + done.stderr

    text = hocket("largest", expected=2)
    assert "hocket-acme 1.0 by Acme: <script>" in text and "callbacks/largest (v1, v2)" in text
    assert "brings acme-lib 2.1 by Acme" in text and "not of hocket's authors" in text
    assert "nobody can be asked without a terminal. Add --yes" in text
    assert not list(site.glob("hocket_acme*"))
    assert "Installed" in hocket("largest", "--yes")
    assert {each.name for each in site.glob("*acme*")} >= {"hocket_acme-1.0.dist-info", "acme_lib-2.1.dist-info"}
    assert "installed already" in hocket("hocket-acme", "--yes")
    assert "hocket-algorithms-nlp is a distribution of hocket's own" in hocket("hocket-nlp-tools", "--yes", expected=2)
    assert not list(site.glob("hocket_nlp_tools*"))

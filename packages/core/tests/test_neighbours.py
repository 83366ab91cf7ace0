"""Distributions that are broken or mean harm: they harm nobody, and are reported with what to do."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import hocket
from hocket import plugins
from hocket.plugins import entry_points, registry
from hocket.plugins.building import build
from hocket_cli import main

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution first on the path: its ``entry_points.txt``, its METADATA and its module, each as they are given."""
    monkeypatch.delenv("HOCKET_PLUGINS", raising=False)
    monkeypatch.delenv("HOCKET_DISABLE_PLUGINS", raising=False)
    modules = []

    def add(
        entries: str | bytes | None = "",
        source: str = "",
        name: str = "acme-things",
        metadata: str | bytes | None = METADATA,
        version: str = "1.0",
        where: str = "site",
    ) -> Path:
        site = tmp_path / where
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(str(site))
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        if isinstance(metadata, str):
            metadata = metadata.format(name=name, version=version).encode()
        if metadata is not None:
            (info / "METADATA").write_bytes(metadata)
        if entries is not None:
            (info / "entry_points.txt").write_bytes(entries.encode() if isinstance(entries, str) else entries)
        (site / f"{name.replace('-', '_')}.py").write_text(source)
        modules.append(name.replace("-", "_"))
        plugins.refresh()
        return info

    yield add
    for module in modules:
        found = getattr(sys.modules.get(module), "__file__", None) or ""
        if found.startswith(str(tmp_path)):  # and not the hocket that a neighbour claims to be
            del sys.modules[module]
    plugins.refresh()


def callback(value: str = "acme_things:Mine", name: str = "mine") -> str:
    return f"[hocket.v1.callbacks]\n{name} = {value}\n"


MINE = '''
from hocket import Callback


class Mine(Callback):
    """Does something."""


nothing, several, number = None, (Mine,), 3


class Stranger:
    """No plug-in of any kind."""


def function():
    return Mine()
'''


def problems() -> str:
    """What the doctor says without starting a process."""
    texts = [f"{dist} {version}: {text}" for dist, version, text in registry.installed().problems]
    texts += [f"{each.dist} {each.version}: {each.problem}" for each in registry.entries() if each.problem]
    return "\n".join(texts)


def train() -> hocket.Trainer:
    data = [(torch.ones(2, 2), torch.zeros(2, 2))]
    return hocket.Trainer(
        model=torch.nn.Linear(2, 2), loss=torch.nn.functional.mse_loss, train_data=data, optimizer="sgd(lr=0.1)"
    )


# --- metadata


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (None, "acme-things 1.0: its METADATA has no Name"),
        ("", "acme-things 1.0: its METADATA has no Name and no Version"),
        ("Metadata-Version: 2.1\nVersion: 1.0\n", "acme-things 1.0: its METADATA has no Name"),
        ("Metadata-Version: 2.1\nName: acme-things\n", "acme-things 1.0: its METADATA has no Version"),
        (b"Name: acme-\xff\xfe\nVersion: 1.0\n", "acme-things 1.0: its metadata cannot be read"),
    ],
    ids=["missing", "empty", "no name", "no version", "not UTF-8"],
)
def test_damaged_metadata(install: Install, metadata: Any, said: str) -> None:
    before = registry.names("callbacks")
    install(callback(), MINE, metadata=metadata)
    assert registry.names("callbacks") == before
    assert said in problems() or "metadata cannot be read" in problems()
    with pytest.raises(
        plugins.BrokenPluginError, match=r"'mine' of acme-things 1\.0 cannot be used: .*Install it again"
    ):
        build("callbacks", "mine")
    train()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[hocket.v1.callbacks]\nmine = acme_things:Mine\n\xff\xfe", "cannot be read: UnicodeDecodeError"),
        (b"\x80" * 100, "cannot be read: UnicodeDecodeError"),
        (b"[hocket.v1.callbacks]\nmine\n", "line 2 .* is 'mine' and not `name = module:Class`"),
        (b"[hocket.v1.callbacks]\n= acme_things:Mine\n", "line 2 "),
        (b"[hocket.v1.callbaks]\nmine = acme_things:Mine\n", "'callbaks' is not a kind of plug-in"),
        (callback("acme_things"), "'acme_things'; its author has to write module:Class"),
        (callback("acme things:Mine"), "has to write module:Class"),
        (callback() + "mine = other_things:Mine\n", "declares 'mine' more than once"),
        (callback(name="mine and yours"), "'mine and yours' is not a valid name"),
        (callback(name="mine(fast)"), "is not a valid name"),
        (callback(name="deep/mine"), "is not a valid name"),
        (b"[hocket.v1.callbacks]\nmine = acme_things:Mine\n" + b"#" * 1_000_001, "at most 1,000,000 are read"),
    ],
)  # fmt: skip
def test_damaged_entry_points(install: Install, content: Any, said: str) -> None:
    before = registry.names("callbacks")
    install(content, MINE)
    assert registry.names("callbacks") == before
    assert re.search(f"acme-things 1.0: .*{said}", problems())


@pytest.mark.parametrize("make", [lambda file: file.mkdir(), lambda file: file.symlink_to("nowhere"), os.mkfifo])
def test_entry_points_that_are_no_file(install: Install, make: Callable[[Path], Any]) -> None:
    info = install(None, MINE)
    make(info / "entry_points.txt")
    plugins.refresh()
    assert "lr-monitor" in registry.names("callbacks")
    assert "acme-things 1.0: its entry_points.txt cannot be read: OSError" in problems()


@pytest.mark.parametrize("name", ["mine and yours", "mine(fast)", "deep/mine"])
def test_naming_what_cannot_be_named_says_why(install: Install, name: str) -> None:
    install(callback(name=name), MINE)
    for spec in (name, {name: {}}):
        with pytest.raises(plugins.BrokenPluginError, match="is not a valid name"):
            build("callbacks", spec)


def test_a_legal_entry_with_extras_and_spaces(install: Install) -> None:
    install(callback("  acme_things : Mine  [fast, small]"), MINE)
    assert plugins.get("callbacks", "mine").__name__ == "Mine"
    assert not problems()


def test_a_distribution_without_plugins_is_not_looked_at(install: Install) -> None:
    install("[console_scripts]\nx\n", metadata=None)
    assert not problems()


def test_what_an_interrupted_pip_leaves_does_not_count(install: Install) -> None:
    install(callback(), MINE, name="~cme-things")
    assert "mine" not in registry.names("callbacks") and not problems()


def test_an_import_finder_that_raises(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_distributions(self, context: Any) -> Iterator[Any]:
            raise RuntimeError("broken finder")

        def find_spec(self, *args: Any) -> None:
            return None

    install(callback(), MINE)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    plugins.refresh()
    assert {"mine", "lr-monitor"} <= set(registry.names("callbacks"))
    assert "broken finder" in problems()


def test_one_distribution_twice(install: Install) -> None:
    install(callback(), MINE, version="1.0", where="second")
    install(callback(name="newer"), MINE, name="Acme-Things", version="2.0", where="first")
    assert "newer" in registry.names("callbacks") and "mine" not in registry.names("callbacks")
    assert "installed twice: 2.0 in" in problems() and "2.0 is used; uninstall the other" in problems()


def test_one_distribution_twice_and_the_same(install: Install) -> None:
    for where in ("wheel", "editable"):
        install(callback(), MINE, where=where)
    assert plugins.get("callbacks", "mine").__name__ == "Mine"
    assert not problems()


def test_a_distribution_that_calls_itself_hocket(install: Install) -> None:
    before = {kind: registry.names(kind) for kind in plugins.KINDS}
    install(callback(), MINE, name="Hocket", version="9.9")
    install(None, MINE, name="hocket", version="0", metadata=None)
    assert {kind: registry.names(kind) for kind in plugins.KINDS} == before
    assert "installed twice: 9.9" in problems()


# --- what entry points lead to


@pytest.mark.parametrize(
    ("kind", "attribute", "said"),
    [
        ("callbacks", "nothing", "it is None and not a class"),
        ("loggers", "several", "it is a tuple and not a class"),
        ("algorithms", "function", "it is a function and not a class"),
        ("algorithms", "Stranger", "Stranger is not a subclass of hocket.Algorithm"),
        ("strategies", "Mine", "Mine is not a subclass of hocket.Strategy"),
        ("precisions", "Mine", "Mine is not a subclass of hocket.Precision"),
        ("devices", "Mine", "Mine is not a subclass of hocket.Device"),
        ("optimizers", "number", "it is a int and not a class"),
        ("datasets", "nothing", "it is None"),
        ("commands", "nothing", "it is None and not a hocket.hookspecs.command.Command"),
        ("commands", "function", "it is a function and not a hocket.hookspecs.command.Command"),
    ],
)
def test_entries_that_lead_to_no_plugin(install: Install, kind: str, attribute: str, said: str) -> None:
    install(f"[hocket.v1.{kind}]\nmine = acme_things:{attribute}\n", MINE)
    with pytest.raises(plugins.BrokenPluginError, match=rf"'mine' of acme-things 1\.0 cannot be used: .*{said}"):
        plugins.get(kind, "mine")


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit('bye')",
        "raise SystemExit(3)",
        "raise BaseException('odd')",
        "import not_there",
        "1 +",
        "raise GeneratorExit",
        "class Silent(Exception):\n    def __str__(self): raise ValueError\nraise Silent",
    ],
)
def test_imports_that_fail_in_any_way(install: Install, source: str) -> None:
    install(callback(), source)
    with pytest.raises(plugins.BrokenPluginError, match=r"'mine' of acme-things 1\.0 cannot be imported from"):
        build("callbacks", "mine")


def test_the_users_interrupt_passes(install: Install) -> None:
    install(callback(), "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        plugins.get("callbacks", "mine")


def test_a_class_declared_again_by_a_stranger_keeps_its_name(install: Install) -> None:
    install(
        callback("hocket_insight.callbacks.lr_monitor:LRMonitor", "aaa")
        + "[hocket.v1.optimizers]\naaa = torch.optim:SGD\n"
    )
    attachment = build("callbacks", plugins.get("callbacks", "lr-monitor")())
    assert (attachment.name, attachment.dist) == ("lr-monitor", "hocket-insight")
    assert registry.entry_of("optimizers", torch.optim.SGD).name == "sgd"  # type: ignore[union-attr]


def test_a_module_that_raises_when_it_is_asked(install: Install) -> None:
    install(callback(), "def __getattr__(name):\n    raise RuntimeError(name)\n")
    import acme_things  # noqa: F401  # type: ignore[import-not-found]

    assert build("callbacks", hocket.Callback()).name == "callback"


# --- names of core's


def test_a_stranger_cannot_take_names_of_core(install: Install) -> None:
    install(
        "[hocket.v1.precisions]\nfp32 = acme_things:Mine\n[hocket.v1.commands]\nplan = acme_things:Mine\n"
        "[hocket.v1.strategies]\nsingle = acme_things:Mine\n[hocket.v1.devices]\ncpu = acme_things:Mine\n"
        "[hocket.v1.actions]\ndefault = acme_things:Mine\n[hocket.v1.optimizers]\nsgd = acme_things:Mine\n",
        "raise RuntimeError('imported')",
    )  # fmt: skip
    train().fit("1ba")
    assert plugins.get("commands", "plan") is plugins.get("commands", "hocket/plan")
    with pytest.raises(plugins.BrokenPluginError, match="imported"):
        plugins.get("precisions", "acme-things/fp32")


def test_a_name_of_core_that_is_switched_off_is_not_a_strangers(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(callback(name="lr-monitor"), MINE)
    monkeypatch.setenv("HOCKET_DISABLE_PLUGINS", "dist:hocket-insight")
    with pytest.raises(plugins.UnknownPluginError, match="HOCKET_DISABLE_PLUGINS=dist:hocket-insight disables it"):
        plugins.get("callbacks", "lr-monitor")


# --- devices

DEVICE = """
import torch, hocket


class Mine(hocket.Device):
    priority = 99

    def available(self):
        {available}

    def torch_device(self, local_rank):
        return torch.device("cpu")
"""


@pytest.mark.parametrize(
    "source",
    [
        "import not_there", "import sys; sys.exit()", "Mine = None", DEVICE.format(available="raise RuntimeError('no driver')"),
        DEVICE.format(available="import sys; sys.exit('no driver')"),
        DEVICE.format(available="return True").replace("99", "'high'"),
        DEVICE.format(available="return True").replace("torch_device", "other_device"),
    ],
    ids=["not importable", "exits", "None", "raises", "exits when asked", "priority", "abstract"],
)  # fmt: skip
def test_a_broken_device_is_skipped(install: Install, source: str) -> None:
    expected = train().state.device
    install("[hocket.v1.devices]\nmine = acme_things:Mine\n", source)
    with pytest.warns(UserWarning, match=r"skips the device 'mine' of acme-things 1\.0: .*plugins doctor"):
        assert train().state.device == expected


def test_a_device_that_works_is_chosen(install: Install) -> None:
    install("[hocket.v1.devices]\nmine = acme_things:Mine\n", DEVICE.format(available="return True"))
    assert type(train().state.device_kind).__name__ == "Mine"


# --- commands


def test_help_imports_nothing_and_shows_every_command(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(
        "[hocket.v1.commands]\nmine = acme_things:command\ntrain = acme_things:command\n",
        "import os\nos._exit(7)\n\nfrom hocket.hookspecs.command import Command\n\n"
        "command = Command('Does something of mine', None, None)\n",
    )
    assert main(["--help"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    summaries = {line[0]: line[-1] for line in lines}
    assert summaries["mine"] == "Does something of mine"
    for name in registry.names("commands"):
        if name != "mine":
            assert summaries[name] == plugins.get("commands", name).summary
    assert main(["--help"]) == 0  # with every command imported


@pytest.mark.parametrize("source", ["import sys; sys.exit(0)", "command = None", "command = print"])
def test_a_broken_command_is_an_error_of_its_own(
    install: Install, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    install("[hocket.v1.commands]\nmine = acme_things:command\n", source)
    assert main(["mine"]) == 2
    assert "command 'mine' of acme-things 1.0 cannot be" in capsys.readouterr().err


@pytest.mark.long
def test_torch_that_cannot_be_imported_beside_it_names_it(install: Install, tmp_path: Path) -> None:
    """torch looks at all entry points itself; commands keep it from that, and a failing import says whose they are."""
    install(b"\xff")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    command = "import hocket_cli; hocket_cli.main(['--version']); import os; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split()[-1] == "0"
    assert "acme-things 1.0: its entry_points.txt cannot be read" in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", "import hocket; hocket.Trainer"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:  # torch may learn to pass it over
        assert "acme-things 1.0: its entry_points.txt cannot be read" in done.stderr


# --- reports

LOUD = """
import atexit
from hocket.hookspecs.command import Command

atexit.register(print, "\xff")
command = Command("Prints at its end", None, None)
"""


def test_the_doctor_reports_all_of_it(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def data(name: str) -> str:
        return f"[hocket.v1.commands]\n{name} = {{}}:command\n"

    install(data("none").format("a_none"), "command = None", name="a-none")
    install(data("exits").format("a_exits"), "import os; os._exit(0)", name="a-exits")
    install(data("loud").format("a_loud"), LOUD, name="a-loud")
    install(data("odd name").format("a_odd"), name="a-odd")
    install(b"\xff", name="a-bytes")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("HOCKET_DISABLE_PLUGINS", "checkpoint,evaluate,launch,plan,predict,train")  # faster
    assert main(["plugins", "doctor", "--kind", "commands", "--json"]) == 1
    said = {line["distribution"]: line["problems"] for line in json.loads(capsys.readouterr().out)}
    assert said["a-none"][0].startswith("command 'none' of a-none 1.0 cannot be used: ")
    assert "it is None and not a hocket.hookspecs.command.Command. Upgrade a-none, or" in said["a-none"][0]
    assert "HOCKET_DISABLE_PLUGINS=dist:a-none" in said["a-none"][0]
    assert "ended with exit code 0" in said["a-exits"][0]
    assert said["a-loud"] == []
    assert "is not a valid name" in said["a-odd"][0]
    assert "cannot be read: UnicodeDecodeError" in said["a-bytes"][0]
    assert main(["plugins", "list", "--kind", "commands"]) == 0
    assert "[cannot be used: 'odd name' is not a valid name" in capsys.readouterr().out


def test_an_algorithm_is_no_callback(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    source = "from hocket import Algorithm, Event\n\nclass Mine(Algorithm):\n    events = (Event.FIT_START,)\n"
    install(callback(), source)
    assert main(["plugins", "info", "mine"]) == 2
    assert "Mine is an algorithm, whose group is hocket.v1.algorithms" in capsys.readouterr().err


def test_many_neighbours_cost_little(install: Install, tmp_path: Path) -> None:
    """Beside 700 distributions that have nothing to do with hocket only the file of entry points is looked at."""
    for index in range(700):
        info = tmp_path / "site" / f"other_{index}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_bytes(b"\xff")  # reading it would be an error
        if index % 3 == 0:
            (info / "entry_points.txt").write_text("[console_scripts]\nother = other:main\n")
    install(callback(), MINE)
    assert "mine" in registry.names("callbacks")
    assert not problems()


# --- the parser

_words = st.from_regex(r"[a-z][a-z0-9-]{0,6}", fullmatch=True)
_groups = st.sampled_from(["hocket.v1.callbacks", "hocket.v2.loggers", "console_scripts", "hocketeers"])
_files = st.dictionaries(
    _groups, st.dictionaries(_words, _words.map(lambda word: f"m.{word}:C"), max_size=3), max_size=4
)


@given(
    _files,
    st.sampled_from(["\n", "\r\n", "\n\n", "\n# comment\n", "\n; comment\n"]),
    st.sampled_from(["=", " = ", "  ="]),
)
def test_what_configparser_reads(file: dict[str, dict[str, str]], newline: str, equals: str) -> None:
    text = newline.join(
        line
        for group, points in file.items()
        for line in [f"[{group}]", *(f"{k}{equals}{v}" for k, v in points.items())]
    )
    reference = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    reference.optionxform = str  # type: ignore[assignment,method-assign]
    reference.read_string(text.replace("\r\n", "\n"))
    expected = [(g, n, v) for g in reference.sections() if g.startswith("hocket.") for n, v in reference.items(g)]
    points, wrong = entry_points.parse(text)
    assert sorted(map(tuple, points)) == sorted(expected) and not wrong


@given(
    st.text(max_size=60)
    | st.text(alphabet="[]hocket.v1algrims=: \n#;", max_size=60).map("[hocket.v1.callbacks]\n".__add__)
)
def test_any_text_is_parsed(text: str) -> None:
    points, wrong = entry_points.parse(text)
    for point in points:
        assert point.group.startswith("hocket.") and point.name and point.value
    assert all(line.startswith("line ") for line in wrong)
    for entry in registry._entries_of(entry_points.Declared("acme", "1", points, "")):
        assert entry.problem or (":" in entry.target and "/" not in entry.name)

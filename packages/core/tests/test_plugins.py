"""Discovery, resolution, switches and specifications, on distributions that the tests install as metadata."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest
from hypothesis import given, strategies as st

from hocket import Callback, Precision, Strategy, plugins
from hocket.basics.specification import parse_spec
from hocket.hookspecs import PrecisionHooks, PrecisionLike, StrategyHooks, StrategyLike
from hocket.plugins import PluginConfigError, registry, switches
from hocket.plugins.building import build
from hocket.run import resolving
from hocket_cli import compatibility, main
from hocket_cli.plugin_summaries import summary


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a distribution: its entry points by kind, its module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("HOCKET_PLUGINS", raising=False)
    monkeypatch.delenv("HOCKET_DISABLE_PLUGINS", raising=False)
    installed = []

    def add(dist: str, entries: dict[str, str], source: str = "", version: str = "1.0", api: str = "v1") -> None:
        info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        lines = [
            f"[hocket.{api}.{key.partition('/')[0]}]\n{key.partition('/')[2]} = {value}\n"
            for key, value in entries.items()
        ]
        (info / "entry_points.txt").write_text("".join(lines))
        installed.append(dist.replace("-", "_"))
        (tmp_path / f"{installed[-1]}.py").write_text(source)
        plugins.refresh()

    yield add
    for name in installed:  # and nothing else that was imported meanwhile, which others may hold
        sys.modules.pop(name, None)
    plugins.refresh()


CALLBACK = '''
from hocket import Callback


class Mine(Callback):
    """Does something."""

    def __init__(self, size: int = 1):
        self.size = size
'''


def test_names_are_listed_without_importing(install) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, "raise RuntimeError('imported')")
    assert "mine" in plugins.names("callbacks")
    entry = next(entry for entry in plugins.entries("callbacks") if entry.name == "mine")
    assert (entry.dist, entry.version, entry.target, entry.api) == ("acme-things", "1.0", "acme_things:Mine", "v1")
    assert "acme_things" not in sys.modules


def test_a_name_is_imported_when_it_is_asked_for(install) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, CALLBACK)
    assert plugins.get("callbacks", "mine") is plugins.get("callbacks", "acme-things/mine")
    assert plugins.get("callbacks", "Acme_Things/mine").__doc__ == "Does something."


def test_a_constructor_that_fails_says_everything(install) -> None:
    source = CALLBACK + "\n    def __init__(self):\n        raise ImportError('Type: pip install x.')\n"
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, source)
    with pytest.raises(plugins.BrokenPluginError, match=r"ImportError: Type: pip install x\.$"):
        build("callbacks", "mine")


def test_an_import_that_fails_says_everything(install) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, "import not_there_at_all")
    with pytest.raises(
        plugins.BrokenPluginError, match=r"'mine' of acme-things 1\.0 .*acme_things:Mine.*not_there_at_all"
    ) as error:
        plugins.get("callbacks", "mine")
    assert isinstance(error.value.__cause__, ModuleNotFoundError)
    assert "lr-monitor" in plugins.names("callbacks")


def test_two_providers_of_one_name(install) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, CALLBACK)
    install("other-things", {"callbacks/mine": "other_things:Mine"}, CALLBACK)
    with pytest.raises(plugins.AmbiguousPluginError, match="'acme-things/mine' or 'other-things/mine'"):
        plugins.get("callbacks", "mine")
    assert plugins.get("callbacks", "other-things/mine").__module__ == "other_things"


def test_the_doctor_says_which_hocket_a_distribution_is_for(install, tmp_path: Path) -> None:
    for name, requires in (("acme-now", "hocket<0.2,>=0.1"), ("acme-later", "hocket>=7.1; python_version>'3'")):
        install(name, {f"callbacks/{name}": f"{name.replace('-', '_')}:Mine"}, CALLBACK)
        with next(tmp_path.glob(f"{name.replace('-', '_')}*/METADATA")).open("a") as file:
            file.write(f"Requires-Dist: hocket[nlp]<0; extra == 'x'\nRequires-Dist: {requires}\n")
    now, later = (
        compatibility.required(name) + "; " + compatibility.mismatch(name) for name in ("acme-now", "acme-later")
    )
    assert now == ">=0.1,<0.2; "
    version = importlib_metadata.version("hocket")
    assert later == (
        f">=7.1; requires hocket>=7.1, and {version} is installed; upgrade acme-later, or install hocket>=7.1"
    )


def test_another_version_of_the_contract(install) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, CALLBACK, api="v2")
    assert "mine" not in plugins.names("callbacks")
    with pytest.raises(plugins.UnknownPluginError, match=r"acme-things 1\.0 has plug-in API v2"):
        plugins.get("callbacks", "mine")


def test_plugins_of_two_contract_versions_beside_each_other(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-old", {"callbacks/old": "acme_old:Mine"}, CALLBACK)
    install("acme-new", {"callbacks/new": "acme_new:Mine"}, "raise SystemExit('imported')", api="v2")
    assert plugins.get("callbacks", "old").__module__ == "acme_old"
    with pytest.raises(
        plugins.UnknownPluginError, match=r"v2, later than v1 of this hocket; upgrade hocket, or install"
    ):
        plugins.get("callbacks", "new")
    monkeypatch.setattr(plugins.registry, "API", "v3")  # as a later core would see both
    for name in ("old", "new"):
        with pytest.raises(plugins.UnknownPluginError, match=f"earlier than v3 of this hocket; upgrade acme-{name}"):
            plugins.get("callbacks", name)


def test_a_plugin_for_two_contract_versions_is_one_plugin(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-both", {"callbacks/mine": "acme_both:Mine"}, CALLBACK + "\nclass Later(Mine):\n    pass\n")
    (points,) = (Path(each) for each in sys.path if (Path(each) / "acme_both.py").is_file())
    (file,) = points.glob("acme_both*.dist-info/entry_points.txt")
    file.write_text(file.read_text() + "[hocket.v2.callbacks]\nmine = acme_both:Later\n")
    for api, cls in (("v1", "Mine"), ("v2", "Later")):
        monkeypatch.setattr(plugins.registry, "API", api)
        plugins.refresh()
        (entry,) = (each for each in plugins.entries("callbacks") if each.name == "mine")
        assert entry.api == api and plugins.get("callbacks", "mine").__name__ == cls


def test_what_is_registered_here_comes_first(install) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, CALLBACK)

    class Here(Callback): ...

    plugins.register("callbacks", "mine", Here)
    try:
        assert plugins.get("callbacks", "mine") is Here
        assert plugins.get("callbacks", "acme-things/mine") is not Here
        with pytest.raises(plugins.PluginError, match="already registered"):
            plugins.register("callbacks", "mine", Here)
        assert build("callbacks", Here()).name == "mine"
    finally:
        plugins.unregister("callbacks", "mine")
    with pytest.raises(plugins.UnknownPluginError):
        plugins.unregister("callbacks", "mine")


def test_what_is_known_but_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_PLUGINS", "")
    installed = plugins.registry.installed()
    own = installed._replace(entries=tuple(e for e in installed.entries if e.dist == "hocket"))
    monkeypatch.setattr(plugins.registry, "installed", lambda: own)
    with pytest.raises(plugins.UnknownPluginError, match=r"Type: pip install (-e )?\S+/algorithms-vision"):
        plugins.get("algorithms", "blurpool")
    with pytest.raises(
        plugins.UnknownPluginError, match=r"Did you mean 'blurpool'\?.*pip install (-e )?\S+/algorithms-vision"
    ):
        plugins.get("algorithms", "blurpol")
    with pytest.raises(plugins.PluginError, match="'algorithm' is not a kind"):
        plugins.get("algorithm", "blurpool")


def test_the_table_of_known_names_is_that_of_the_repository() -> None:
    packages = Path(__file__).parents[2]
    if not (packages / "algorithms-vision" / "pyproject.toml").exists():
        pytest.skip("not in the repository")
    made = runpy.run_path(str(packages / "known.py"))
    assert made["FILE"].read_text() == made["table"](), "type: python packages/known.py"
    for kind, table in tomllib.loads(made["table"]()).items():
        for name, extra in table.items():
            assert plugins.registry.extra_of(kind, name) == extra


# --- what "auto" chooses for several processes

CLUSTER = """
from hocket import Strategy


class Cluster(Strategy):
    distributed, priority = True, {priority}
"""


def cluster(dist: str, name: str = "cluster") -> dict[str, str]:
    module = dist.replace("-", "_")
    return {f"strategies/{name}": f"{module}:Cluster", "defaults/distributed-strategy": f"{module}:Cluster"}


@pytest.fixture
def chosen(install, monkeypatch: pytest.MonkeyPatch):
    """The strategy that "auto" chooses for two processes, and why; without what else is installed."""
    monkeypatch.setenv("HOCKET_DISABLE_PLUGINS", "dist:hocket-strategies" if _there("hocket-strategies") else "")

    def choose() -> tuple[str, str]:
        found = resolving.resolve(strategy="auto", precision="fp32", device="cpu", devices=2)
        return type(found.strategy).__module__, found.reasons["strategy"]

    return choose


def _there(dist: str) -> bool:
    return any(entry.dist == dist for entry in plugins.registry.entries())


def test_auto_takes_what_is_declared_and_imports_nothing_else(install, chosen) -> None:
    install("acme-things", {"strategies/other": "acme_things:Other"}, "raise RuntimeError('imported')")
    with pytest.raises(plugins.PluginError, match=r"There are 2 processes, .*pip install (-e )?\S+/strategies"):
        chosen()
    install("acme-cluster", cluster("acme-cluster"), CLUSTER.format(priority=0))
    assert plugins.registry.defaults("distributed-strategy")[0].dist == "acme-cluster"
    assert "acme_cluster" not in sys.modules
    assert chosen() == ("acme_cluster", "cluster, because there are 2 processes")
    assert "acme_things" not in sys.modules
    assert all(entry.kind in plugins.KINDS for entry in plugins.registry.entries())  # a default is not one more plug-in


def test_of_several_defaults_the_highest_priority_counts(install, chosen) -> None:
    install("acme-cluster", cluster("acme-cluster", "a"), CLUSTER.format(priority=1))
    install("best-cluster", cluster("best-cluster", "b"), CLUSTER.format(priority=2))
    install("broken-cluster", cluster("broken-cluster", "c"), "raise RuntimeError('no')")
    with pytest.warns(UserWarning, match="skips the strategy 'c' of broken-cluster.*dist:broken-cluster to disable it"):
        assert chosen() == ("best_cluster", "b, because there are 2 processes")


def test_equal_defaults_are_an_error_that_names_both(install, chosen) -> None:
    for dist in ("acme-cluster", "best-cluster"):
        install(dist, cluster(dist), CLUSTER.format(priority=0))
    with pytest.raises(plugins.AmbiguousPluginError, match="'acme-cluster/cluster' or strategy='best-cluster/cluster'"):
        chosen()


def test_a_default_that_leads_nowhere_is_reported(install) -> None:
    install("acme-cluster", {"defaults/distributed-strategy": "acme_cluster:Cluster", "defaults/colour": "a:B"})
    said = [text for dist, _, text in plugins.registry.installed().problems if dist == "acme-cluster"]
    assert len(said) == 2 and "declares a default for 'colour'" in said[0] and "not one of its strategies" in said[1]
    assert not [entry for entry in plugins.registry.defaults("distributed-strategy") if entry.dist == "acme-cluster"]


# --- switches


def test_switches_from_the_environment(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine", "callbacks/yours": "acme_things:Mine"}, CALLBACK)

    def there() -> set[str]:
        return {"mine", "yours", "lr-monitor"} & set(plugins.names("callbacks"))

    monkeypatch.setenv("HOCKET_PLUGINS", "0")
    assert there() == {"lr-monitor"}
    with pytest.raises(plugins.UnknownPluginError, match="HOCKET_PLUGINS=0 disables it"):
        plugins.get("callbacks", "mine")
    monkeypatch.setenv("HOCKET_PLUGINS", "mine")
    assert there() == {"mine", "lr-monitor"}
    monkeypatch.delenv("HOCKET_PLUGINS")
    monkeypatch.setenv("HOCKET_DISABLE_PLUGINS", "yours,lr-monitor")
    assert there() == {"mine"}
    monkeypatch.setenv("HOCKET_DISABLE_PLUGINS", "dist:acme-things")
    assert there() == {"lr-monitor"}
    assert "acme_things" not in sys.modules


def test_a_name_that_matches_nothing_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_DISABLE_PLUGINS", "lr-monitr,dist:nobody")
    with pytest.warns(UserWarning) as warned:
        plugins.names("callbacks")
    assert {word for warning in warned for word in ("'lr-monitr'", "'dist:nobody'") if word in str(warning.message)} == {
        "'lr-monitr'", "'dist:nobody'",
    }  # fmt: skip
    assert "Did you mean 'lr-monitor'?" in "".join(str(warning.message) for warning in warned)


def test_switches_of_one_trainer(install) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, CALLBACK)
    with switches.use(False):
        assert "mine" not in plugins.names("callbacks")
        assert build("callbacks", Callback()).name == "callback", "an instance was given, not found"
    with switches.use(["mine"]):
        assert "mine" in plugins.names("callbacks")
    assert "mine" in plugins.names("callbacks")
    with pytest.raises(TypeError, match=r"plugins=\['mine'\]"), switches.use("mine"):
        pass


# --- specifications

_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_keys = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)


@given(st.from_regex(r"[a-z][a-z0-9-]{0,8}(/[a-z]{1,4})?", fullmatch=True), st.dictionaries(_keys, _values, max_size=4))
def test_literals_round_trip(name: str, config: dict[str, Any]) -> None:
    text = f"{name}({', '.join(f'{key}={value!r}' for key, value in config.items())})"
    assert parse_spec(text) == (name, config)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        name, config = parse_spec(text)
    except plugins.PluginConfigError:
        return
    assert name and all(key.isidentifier() for key in config)


def test_bare_words_are_texts() -> None:
    assert parse_spec("cosine(warmup=0.05dur, kind=abc, flag=true, none=null, xs=[1, 2])") == (
        "cosine", {"warmup": "0.05dur", "kind": "abc", "flag": True, "none": None, "xs": [1, 2]},
    )  # fmt: skip
    assert parse_spec("x(code=__import__('os').getcwd())")[1] == {"code": "__import__('os').getcwd()"}, "not evaluated"


def test_everything_that_a_specification_may_be(install) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, CALLBACK)
    cls = plugins.get("callbacks", "mine")
    for spec, size in (
        ("mine", 1),
        ("acme-things/mine", 1),
        ("mine(size=3)", 3),
        ({"mine": {"size": 4}}, 4),
        ({"mine": None}, 1),
        (cls, 1),
        (cls(7), 7),
    ):
        attachment = build("callbacks", spec)
        assert (attachment.name, attachment.dist, attachment.version, attachment.obj.size) == (
            "mine",
            "acme-things",
            "1.0",
            size,
        )
    assert build("callbacks", {"mine": {"size": 4}}).config == {"size": 4}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"mine": {"sise": 4}}, "no argument 'sise'.*Did you mean 'size'.*mine.size: int = 1"),
        ({"mine": {"size": "4"}}, r"size='4', which is str; it should be int\. Write size=4\. Its"),
        ({"mine": {"size": "4e0"}}, r"Write size=4\. Its"),
        ({"mine": {"size": 4.0}}, r"it should be int\. Write size=4\. Its"),
        ({"mine": {"size": "4.5"}}, r"it should be int\. Write size=1\. Its"),
        ({"mine": {"size": "four"}}, r"it should be int\. Write size=1\. Its"),
        ({"mine": {"size": True}}, "size=True"),
        ("mine(size)", "key=value"),
        ("mine(size=1, size=2)", "twice"),
        ("mine(size=1", "does not name a plug-in|do not match"),
        (None, "not one of the callbacks"),
    ],
)
def test_specifications_that_do_not_fit(install, spec, message) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, CALLBACK)
    with pytest.raises(plugins.PluginConfigError, match=message):
        build("callbacks", spec)


def test_a_choice_and_the_example_of_the_class_are_what_to_write(install) -> None:
    module = """
import typing
class Mine:
    '''Say something.

    Example:
        >>> Mine(stages=[{"at": 1}], how="loud")
    '''
    def __init__(self, stages: list[dict[str, int]] = (), how: typing.Literal["low", "loud"] = "low"): ...
    def batch_end(self): ...
"""
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, module)
    for config, words in (
        ({"how": "laud"}, r"it should be 'low' or 'loud'\. Write how='loud'\. Its"),
        ({"how": 3}, r"it should be 'low' or 'loud'\. Write how='low'\. Its"),
        ({"stages": "x"}, r"Write stages=\[{'at': 1}\]\. Its"),
    ):
        with pytest.raises(plugins.PluginConfigError, match=words):
            build("callbacks", {"mine": config})


def test_an_optimizer_among_the_algorithms_is_said() -> None:
    with pytest.raises(plugins.PluginError, match=r"one of the optimizers here: write optimizer='adamw'"):
        build("algorithms", "adamw")
    with pytest.raises(plugins.PluginError, match=r"one of the callbacks here: write callbacks=\['early-stopping'\]"):
        build("algorithms", "early-stopping")


# --- the command


def hocket(*arguments: str, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from hocket_cli import main; sys.exit(main())", *arguments],
        capture_output=True, text=True, timeout=200, check=False, env=os.environ | {"PYTHONPATH": path} | environment,
    )  # fmt: skip


def test_the_command_lists_and_explains(install, tmp_path) -> None:
    install("acme-things", {"callbacks/mine": "acme_things:Mine"}, CALLBACK)
    listed = hocket("plugins", "list", "--kind", "callbacks", path=str(tmp_path)).stdout
    assert any(
        line.split()[:4] == ["callbacks", "mine", "acme-things", "1.0"] and "Does something." in line
        for line in listed.splitlines()
    )
    info = hocket("plugins", "info", "mine", path=str(tmp_path)).stdout
    assert "mine(size: int = 1)" in info and "Does something." in info
    wrong = hocket("plugins", "info", "lr-monitr")
    assert wrong.returncode == 2 and "Did you mean 'lr-monitor'?" in wrong.stderr
    assert hocket("trian").returncode == 2


def test_every_plug_in_of_the_core_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for each in registry.entries():
        if each.dist == "hocket":
            assert main(["plugins", "info", each.name, "--kind", each.kind]) == 0
            assert each.name in capsys.readouterr().out


@pytest.mark.long
def test_the_doctor_finds_what_is_broken(install, tmp_path) -> None:
    install("acme-things", {"datasets/mine": "acme_things:Mine"}, "import not_there_at_all")
    install("other-things", {"datasets/mine": "other_things:Mine"}, CALLBACK)
    install("new-things", {"datasets/new": "new_things:Mine"}, CALLBACK, api="v2")
    done = hocket("plugins", "doctor", "--kind", "datasets", path=str(tmp_path), HOCKET_DISABLE_PLUGINS="digits")
    assert done.returncode == 1
    for words in ("not_there_at_all", "also provided by other-things", "plug-in API v2"):
        assert words in done.stdout
    assert hocket("plugins", "doctor", "--kind", "actions").returncode == 0


def test_hooks_are_printed_in_call_order() -> None:
    printed = hocket("plugins", "hooks").stdout
    places = [
        printed.index(f"\n  {name}(")
        for name in (
            "setup_environment",
            "convert_module",
            "init",
            "batch_start",
            "batch_end",
            "forward",
            "optimizer_step",
            "log_metrics",
        )
    ]
    assert places == sorted(places)
    assert "optimizer_step(state, closure)  [first result counts -> bool]" in printed


@pytest.mark.parametrize(
    "kind, base, contracts",
    [
        ("strategies", Strategy, (StrategyLike, StrategyHooks)),
        ("precisions", Precision, (PrecisionLike, PrecisionHooks)),
    ],
)
def test_an_instance_has_everything_that_its_contract_names(kind: str, base: type, contracts: tuple[type, ...]) -> None:
    """Inherited or not; what is missing is named before anything else happens."""
    names = {name for each in contracts for name in (*vars(each), *each.__annotations__) if not name.startswith("_")}
    assert len(names) > 12
    borrowed = {name: getattr(base, name) for name in names}
    assert build(kind, type("Mine", (), borrowed)()).name
    for name in names:
        lacking = {other: value for other, value in borrowed.items() if other != name}
        with pytest.raises(
            PluginConfigError, match=rf"Mine is not a .*: it has no (\w+, )*{name}\. Subclass hocket\.\w+,"
        ):
            build(kind, type("Mine", (), lacking)())


def test_summaries_are_plain_text_for_optimizers_and_commands_too() -> None:
    """Those of torch's optimizers, which torch assigns after the class, begin as their docstrings do."""
    for kind in ("commands", "optimizers", "actions", "algorithms", "loggers", "schedules"):
        for entry in registry.entries(kind):
            if entry.dist.startswith("hocket"):
                assert summary(entry) and "`" not in summary(entry) and ":mod:" not in summary(entry), entry.name
                if kind == "optimizers":
                    assert summary(entry) == entry.load().__doc__.strip().partition("\n")[0]


def test_what_is_no_plug_in_of_a_kind_is_not_registered():
    with pytest.raises(
        plugins.PluginError, match=r"5 cannot be registered as callback 'five': it is an? int and not a class"
    ):
        plugins.register("callbacks", "five", 5)

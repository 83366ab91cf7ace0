"""``hocket plugins check``: outcomes of a plug-in in a process of its own, tiers, and what is typed."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import hocket
from hocket_cli import main
from hocket_cli.check import _print
from hocket_testkit import AlgorithmConformance
from hocket_testkit.check import Check, Result, _Session, check
from hocket_testkit.examples import keywords, maker
from hocket_testkit.handlers import silent_handlers
from hocket_testkit.session import suite_of

DATA = '''
"""Three batches."""
import os, time
import torch


class Data:
    """Return three batches of one number."""

    def __call__(self, split="train"):
        if split == "no-such-split":
            time.sleep(600)
        return [torch.full((2, 1), 10.0 * (split == "test") + number) for number in range(3)]

    def __reduce__(self):
        print("not to be pickled")
        os._exit(7)


data = Data()
'''


def result(*failed: str) -> Result:
    checks = [Check("pickles", "passed"), Check("works in bf16", "passed"), Check("has a card", "passed")]
    return Result("algorithms", "x", "acme-x", "1", [*checks, *(Check(name, "failed", "why") for name in failed)])


@pytest.mark.parametrize(
    ("failed", "tier"),
    [
        ([], "gold"),
        (["has evidence"], "silver"),
        (["works on two ranks"], "bronze"),
        (["works on two ranks", "has a card"], "bronze"),
        (["resumes in the middle"], "none"),
        (["a check of the author"], "none"),
    ],
)
def test_the_tier_is_the_highest_below_which_nothing_failed(failed, tier):
    assert result(*failed).tier == tier


def test_gold_needs_its_checks_to_pass_and_silver_lets_exemptions_through():
    checks = [Check("works with microbatches", "skipped", "why"), Check("has a card", "passed")]
    assert Result("algorithms", "x", "acme-x", "1", checks).tier == "gold"
    for other in (Check("has evidence", "skipped", "why"), Check("has an effect", "skipped", "not tried: no block")):
        assert Result("algorithms", "x", "acme-x", "1", [*checks, other]).tier == "silver"


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """A distribution with a data set that hangs for an unknown split, and ends the process when it is pickled."""
    (tmp_path / "acme_data.py").write_text(DATA)
    folder = tmp_path / "acme_data-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-data\nVersion: 1.0\n\nacme-three: split.\n")
    (folder / "entry_points.txt").write_text("[hocket.v1.datasets]\nacme-three = acme_data:data\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hocket.plugins.refresh()
    yield
    monkeypatch.undo()
    hocket.plugins.refresh()


@pytest.mark.long
def test_a_hang_and_a_crash_are_failed_lines_and_the_other_checks_follow(acme, capsys):
    assert main(["plugins", "check", "acme-three", "--timeout", "20", "--json"]) == 1
    [plugin] = json.loads(capsys.readouterr().out)["plugins"]
    assert {key: plugin[key] for key in ("kind", "name", "distribution", "version", "tier")} == {
        "kind": "datasets", "name": "acme-three", "distribution": "acme-data", "version": "1.0", "tier": "none",
    }  # fmt: skip
    checks = {each["name"]: each for each in plugin["checks"]}
    assert len(checks) == len(plugin["checks"])
    failed = {name: each["message"] for name, each in checks.items() if each["outcome"] == "failed"}
    assert failed.keys() == {"pickles", "refuses other splits"}
    assert "exit code 7; the last output is: not to be pickled" in failed["pickles"]
    assert failed["refuses other splits"] == "It did not end within 20 s."
    assert checks["continues in the middle of an epoch"]["outcome"] == "passed"
    assert checks["has a card"]["outcome"] == "passed"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a callback named acme-odd, whose module is the text."""

    def install(text):
        (tmp_path / "acme_odd.py").write_text(text)
        folder = tmp_path / "acme_odd-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-odd\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("[hocket.v1.callbacks]\nacme-odd = acme_odd:Odd\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        hocket.plugins.refresh()

    yield install
    monkeypatch.undo()
    hocket.plugins.refresh()


@pytest.mark.long
def test_an_exception_of_the_constructor_is_said_once(installed, capsys):
    installed(
        "import hocket\nclass Odd(hocket.Callback):\n    def __init__(self):\n        raise OSError('no acme server')\n"
    )
    assert main(["plugins", "check", "acme-odd"]) == 1
    out = capsys.readouterr().out
    assert out.count("no acme server") == 1 and "OSError: no acme server" in out and "none: bronze needs" in out


def test_a_repeated_message_names_the_first_check(capsys):
    said = {}
    for number in range(3):
        _print(said, Check(f"check {number}", "failed" if number else "passed", "OSError: gone" if number else ""))
    assert [" ".join(each.split()) for each in capsys.readouterr().out.splitlines()] == [
        "passed check 0", "failed check 1: OSError: gone", "failed check 2: as 'check 1'"
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_processes_of_the_check(number, installed, tmp_path):
    """With a process that the plug-in has started, too."""
    file = tmp_path / "pids"
    installed(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(file)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} ')\n"
        "time.sleep(600)\n"
    )
    command = [
        sys.executable,
        "-c",
        "import sys, hocket_cli; sys.exit(hocket_cli.main())",
        "plugins",
        "check",
        "acme-odd",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (file.exists() and file.read_text().endswith(" ")):
            assert process.poll() is None
            time.sleep(0.05)
        pids = [int(each) for each in file.read_text().split()]
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        for pid in pids:
            assert ended(pid), pid
    finally:
        process.kill()


def ended(pid):
    """Whether a process is gone, or dead and not yet collected by its parent."""
    for _ in range(100):
        try:
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


PROCESS = """
import json, pathlib, sys, time
folder, *done = map(pathlib.Path, sys.argv[1:])
def write(**line):
    with (folder / "checks.jsonl").open("a") as file:
        file.write(json.dumps(line) + chr(10))
write(begin="test_can_be_made")
time.sleep(1)  # which is longer than a check may take
if len(done) == 2 and "dies" in sys.argv[1]:
    sys.exit("out of memory")
write(name="test_can_be_made", outcome="passed", message="")
if not done:
    write(begin="test_first")
    time.sleep(600)
write(name="test_second", outcome="passed", message="")
write(end="")
time.sleep(600)  # as with a thread that does not end
"""


DIED = "It ended the process, with exit code"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("starts", ("second", "passed", "")),
        ("dies", ("can be checked to the end", "failed", f"{DIED} 1; the last output is: out of memory")),
    ],
)
def test_the_start_of_a_process_takes_no_time_of_its_checks(name, last, tmp_path):
    (folder := tmp_path / name).mkdir()
    session = _Session("datasets", "x", folder, 0.5, lambda check: None)
    session._command = [sys.executable, "-c", PROCESS, str(folder)]
    while session.run():
        pass
    assert [(each.name, each.outcome, each.message) for each in session.checks] == [
        ("can be made", "passed", ""), ("first", "failed", "It did not end within 0.5 s."), last
    ]  # fmt: skip


#: Writes a line in two parts.
HALF = """
import json, sys, time
with open(sys.argv[1] + "/checks.jsonl", "a") as file:
    line = json.dumps({"name": "test_first", "outcome": "passed", "message": ""})
    for part in (line[:20], line[20:] + "\\n" + json.dumps({"end": ""}) + "\\n"):
        file.write(part)
        file.flush()
        time.sleep(0.3)
"""


def test_a_line_that_is_not_complete_is_read_later(tmp_path):
    session = _Session("datasets", "x", tmp_path, 60, lambda check: None)
    session._command = [sys.executable, "-c", HALF, str(tmp_path)]
    assert not session.run()
    assert [(each.name, each.outcome) for each in session.checks] == [("first", "passed")]


def test_a_check_needs_time():
    with pytest.raises(hocket.errors.WrongValue, match="timeout=0 leaves no time"):
        check("datasets", "digits", timeout=0)


def test_the_card_of_an_installed_plugin_is_not_looked_for_in_folders_of_others(tmp_path, monkeypatch):
    from hocket_testkit.session import Installed  # here: suites that are imported later are rewritten by pytest

    module = tmp_path / "src" / "acme" / "things.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("the card of a checkout")
    installed = Installed()
    installed.entry = hocket.plugins.Entry("schedules", "linear", "hocket", "0.1.0", "acme.things:Thing")
    monkeypatch.setitem(sys.modules, "acme.things", SimpleNamespace(__file__=str(module)))
    assert installed._card()[0] == "the README of hocket"
    (tmp_path / "pyproject.toml").write_text("")
    assert installed._card() == (str(tmp_path / "docs"), "the card of a checkout")


def test_a_module_that_cannot_be_imported_is_one_failed_check(acme, tmp_path, capsys):
    (tmp_path / "acme_data.py").write_text("import no_such_library")
    noted = []
    found = check("datasets", "acme-three", note=noted.append)
    assert noted == found.checks and [each.name for each in found.checks] == ["can be made"]
    assert found.tier == "none" and "no_such_library" in found.checks[0].message


def test_a_name_that_is_not_installed_is_a_mistake(capsys):
    assert main(["plugins", "check", "no-such-plugin"]) == 2
    assert "no plug-in 'no-such-plugin'" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["algorithms/mixup", "schedules/wsd", "devices/cpu", "actions/default", "commands/plugins", "datasets/digits"],
)
def test_plugins_of_this_repository_have_no_fault(name):
    found = check(*name.split("/"))
    assert [each for each in found.failed if each.tier != "gold"] == []
    assert len(found.checks) > 10


@pytest.mark.long
def test_an_effect_is_not_tried_on_a_model_that_the_plugin_says_does_not_suit_it(tmp_path):
    """But it is in a suite of the author's, who can choose the model; and one that says nothing has no effect."""
    suite = suite_of("algorithms", "stochastic-depth")()
    suite.folder = tmp_path
    with pytest.raises(
        pytest.skip.Exception, match=r"not tried: the example's model .*found nothing to change in Sequential"
    ):
        suite.test_has_an_effect()
    author = type("Suite", (AlgorithmConformance,), {"make": lambda self: suite.make()})()
    silent = suite_of("algorithms", "stochastic-depth")()
    silent.make = hocket.Algorithm
    for each in (author, silent):
        each.folder = tmp_path
        with pytest.raises(AssertionError, match="bitwise identical to training without it"):
            each.test_has_an_effect()


class Smoothing:
    """Smooth.

    Example:
        >>> strength = 0.25
        >>> for each in [Smoothing(strength, more=True)]:
        ...     print(each)
    """

    def __init__(self, strength, more=False):
        self.strength, self.more = strength, more


def test_a_plugin_is_made_as_in_its_example():
    make = maker(Smoothing)
    assert (make().strength, make().more) == (0.25, True) and make() is not make()
    assert keywords(Smoothing) == {"more": True}


def test_without_an_example_it_needs_no_arguments():
    class Plain:
        """Plain."""

    class Needy:
        """Needy."""

        def __init__(self, strength):
            pass

    assert isinstance(maker(Plain)(), Plain)
    with pytest.raises(RuntimeError, match=r"missing a required argument: 'strength'.*>>> Needy"):
        maker(Needy)


def test_handlers_that_drop_every_exception(tmp_path, monkeypatch):
    (tmp_path / "handlers_of_a_plugin.py").write_text(
        textwrap.dedent("""
        import contextlib, warnings
        class Plugin:
            def batch_end(self, state):
                try: state.x
                except Exception: return None     # 6: a hook hides an error
            def helper(self):
                try: return 1
                except Exception: return None     # a helper answers
            def other(self):
                for _ in range(3):
                    try: pass
                    except: continue              # 13
                try: pass
                except (ValueError, BaseException): pass   # 15
                try: pass
                except ValueError: pass
                try: pass
                except Exception as error: warnings.warn(str(error))
                with contextlib.suppress(Exception): pass  # 20
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import handlers_of_a_plugin

    assert silent_handlers(handlers_of_a_plugin.Plugin) == [6, 13, 15, 20]
    with contextlib.suppress(KeyError):
        import sys

        del sys.modules["handlers_of_a_plugin"]

"""What every test finds, whoever runs it and wherever: no launcher's variables, Control-C that interrupts, no deadlines."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

#: `support.py`, which tests of all packages share, and `packages.….tests`, from which spawned processes unpickle:
#: pytest's importlib mode finds neither by itself.
sys.path += [str(Path(__file__).parent / "tests"), str(Path(__file__).parent)]

#: Variables that hocket, torch, an MPI or rich would act upon, such as those of the job that the tests run in.
_FOREIGN = re.compile(
    r"(SLURM|OMPI|PMIX?|MPI|RAY|TORCHELASTIC|LOCAL|GROUP|ROLE|MASTER)_.*|RANK|WORLD_SIZE|HOCKET_(?!FAULTS_SEED$).*"
    r"|NO_COLOR|FORCE_COLOR|TTY_.*|COLUMNS|LINES"
)
_HYPOTHESIS = "HYPOTHESIS_STORAGE_DIRECTORY"
#: Of the plug-ins, the fifth whose long suites run: 0 to 4. All run without this variable.
_SUITES = "SUITES"
_FIFTHS = 5


def pytest_configure(config: pytest.Config) -> None:
    for name in [name for name in os.environ if _FOREIGN.fullmatch(name)]:
        del os.environ[name]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # under nohup and a script's `&`; children would inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if _HYPOTHESIS not in os.environ:  # workers of xdist find their parent's
        os.environ[_HYPOTHESIS] = folder = tempfile.mkdtemp(prefix="hypothesis-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # Whatever is timed fails on a busy machine; and without a database no run depends on the one before.
    hypothesis.settings.register_profile(
        "hocket", deadline=None, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("hocket")


#: Tests of suites that train in several ways, for every plug-in of the repository; and those that start ranks.
_LONG = {
    "test_keeps_no_tensors", "test_closes_files_threads_and_processes", "test_removes_its_hooks", "test_does_not_grow",
    "test_returns_what_it_wraps", "test_leaves_global_generators_alone", "test_keeps_no_state_in_the_class",
    "test_counts_what_the_data_hold", "test_records_and_previews_surgery", "test_works_in_bf16",
    "test_does_not_depend_on_the_rank", "test_does_not_swallow_exceptions", "test_leaves_the_process_as_it_was",
    "test_importing_it_brings_nothing_heavy", "test_importing_it_changes_nothing",
    "test_writes_into_the_run_folder_only", "test_does_not_print_in_every_batch", "test_does_not_sleep_in_every_batch",
    "test_an_exception_leaves_nothing_behind", "test_trains_a_task_of_two_steps", "test_two_trainers_in_turns",
    "test_two_trainers_do_not_notice_each_other", "test_changes_nothing_unless_attached", "test_is_deterministic",
    "test_trains_the_same_when_pickled", "test_an_evaluation_leaves_the_weights_alone", "test_leaves_the_data_alone",
    "test_logs_the_same_in_turns", "test_works_with_microbatches", "test_refuses_a_state_that_is_not_its_own",
}  # fmt: skip
_LONGER = {"test_works_on_two_ranks", "test_works_in_every_combination"}
#: Folders of tests that start processes or servers for each of their cases: the first case is short, the others are long.
_FIRST_CASE = {("strategies", "tests"), ("tests", "faults")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = set[str]()
    for item in items:
        test, is_case, _ = item.nodeid.partition("[")
        if is_case and item.path.parts[-3:-1] in _FIRST_CASE and item.get_closest_marker("long") is None:
            if test in tests:
                item.add_marker(pytest.mark.long)
            tests.add(test)
        name, quick = getattr(item, "originalname", ""), item.path.parts[-3:-1] == ("algorithms-general", "tests")
        if name in _LONGER or (name in _LONG and not (quick and item.path.name == "test_conformance.py")):
            item.add_marker(pytest.mark.long)
            fifth = zlib.crc32(item.nodeid.rpartition("::")[0].encode()) % _FIFTHS
            if os.environ.get(_SUITES, str(fifth)) != str(fifth):
                item.add_marker(pytest.mark.skip(reason=f"of another fifth: {_SUITES}={fifth}"))


def pytest_collection() -> None:
    gc.disable()  # of thousands of tests none is garbage, and looking for it takes a third of the time


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _younger_garbage() -> None:
    """Leave what was imported and kept before a file's tests, millions of objects, out of their garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def in_an_empty_folder(tmp_path: Path) -> Iterator[None]:
    """The working directory of a test that leaves files there."""
    with contextlib.chdir(tmp_path):
        yield

"""Who started this process: the variables of launchers, and ``devices=`` beside them."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, strategies as st

import hocket
from hocket.basics.launch_environment import Environment, environment, hint
from hocket_testkit import run_ranks

# --- the environment; what follows was printed by real launchers, except for SLURM's and Ray's, which are from their manuals
# (MPIs and job steps of SLURM: packages/strategies/tests/test_jobs.py)

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODELIST": "a",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ("torchrun", 5, 8, 1, 4, "node0", 29400)),
        ({**TORCHRUN, "HOCKET_LAUNCHED": "1"}, ("hocket", 5, 8, 1, 4, "node0", 29400)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("plain", 0, 2, None, None, None, None)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "RAY_RAYLET_PID": "7"}, ("ray", 0, 2, 0, None, None, None)),
    ],
)  # fmt: skip
def test_launchers(variables, expected):
    assert environment({"PATH": "/bin", **variables}) == Environment(*expected)


@pytest.mark.parametrize("variables", [{}, {"HOME": "/"}, BATCH_SCRIPT, {"RAY_RAYLET_PID": "7"}, {"PMIX_RANK": "0"}])
def test_alone(variables):
    assert environment(variables) is None


def test_a_batch_script_without_srun_is_told():
    assert "7 tasks" in hint(BATCH_SCRIPT) and "srun" in hint(BATCH_SCRIPT)
    assert hint({}) == hint({**BATCH_SCRIPT, "SLURM_NTASKS": "1"}) == ""


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8, counted from 0: RANK=8, WORLD_SIZE=8"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' should be an integer"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' should be an integer"),
        ({**TORCHRUN, "WORLD_SIZE": "0", "RANK": "0"}, "rank 0 of 0"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "process 4 of 4 on this machine"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "one of 9 processes on this machine, of 8"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
    ],
)
def test_inconsistent_variables(variables, message):
    with pytest.raises(ValueError, match=message):
        environment(variables)


@given(
    st.integers(1, 6).flatmap(lambda world: st.tuples(st.just(world), st.integers(0, world - 1))),
)
def test_every_rank_of_every_world(size):
    world, rank = size
    found = environment({"RANK": str(rank), "WORLD_SIZE": str(world)})
    assert (found.rank, found.world_size) == (rank, world)


# --- Trainer(devices=…)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices=0 is not a number of devices"),
        ({"devices": True}, "devices=True is not"),
        ({"devices": "2"}, "devices='2' is not"),
        ({"devices": 2, "strategy": "single"}, "strategy='single' trains in one process"),
    ],
)
def test_devices_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        hocket.Trainer(model=torch.nn.Linear(1, 1), device="cpu", **options)


@pytest.mark.parametrize("devices", [None, 1])
def test_one_device_is_as_before(devices):
    with hocket.Trainer(model=torch.nn.Linear(1, 1), device="cpu", devices=devices) as trainer:
        assert trainer.state.strategy.world_size == 1 and "single" in str(trainer.plan())


def test_auto_names_a_forgotten_srun(monkeypatch):
    for name, value in BATCH_SCRIPT.items():
        monkeypatch.setenv(name, value)
    with hocket.Trainer(model=torch.nn.Linear(1, 1), device="cpu") as trainer:
        assert "srun" in str(trainer.plan())


def test_another_number_than_the_launchers_is_refused(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"devices=3, but the launcher \(torchrun\) has started 4"):
        hocket.basics.launch_environment.start(3)
    hocket.basics.launch_environment.start(4)  # they are there


# --- without hocket-strategies


class NoStrategies:
    """A finder by which hocket_strategies is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name == "hocket_strategies":
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


@pytest.fixture
def without_strategies(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "hocket_strategies"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoStrategies(), *sys.meta_path])
    monkeypatch.delitem(vars(hocket), "launch", raising=False)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (lambda: hocket.launch, "hocket-strategies is"),
        (lambda: hocket.basics.launch_environment.start(2), "devices=2 needs hocket-strategies, which is"),
        (lambda: run_ranks(print, 2), "run_ranks needs hocket-strategies, which is"),
    ],
)
def test_what_starts_processes_says_in_one_line_what_to_install(start, said, without_strategies):
    with pytest.raises(
        (ImportError, AttributeError), match=rf"^{said} not installed\. Type: pip install .*strategies$"
    ):
        start()


@pytest.mark.parametrize("size", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_job_of_several_processes_says_what_to_install_and_one_process_trains(size, without_strategies):
    with pytest.raises(ImportError, match=r"^A job of several processes needs hocket-strategies, .* pip install "):
        environment({size: "2"})
    assert environment({size: "1"}) is None


def test_an_absent_name_is_no_attribute_and_its_import_says_what_to_install(without_strategies) -> None:
    """As ``help``, ``hasattr`` and completion expect."""
    assert not hasattr(hocket, "launch") and "launch" in dir(hocket)
    with pytest.raises(ImportError, match=r"^hocket-strategies is not installed\. Type: pip install "):
        from hocket import launch  # noqa: F401


def test_a_strategy_of_others_trains_with_the_ranks_of_a_launcher(without_strategies, monkeypatch):
    """``devices=`` then starts nothing, so nothing needs to be installed for it."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)

    class Cluster(hocket.Strategy):
        distributed = True

    with hocket.Trainer(model=torch.nn.Linear(1, 1), device="cpu", strategy=Cluster(), devices=4) as trainer:
        assert hocket.basics.launch_environment.current().rank == 5 and trainer.state.strategy.distributed

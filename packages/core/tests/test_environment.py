"""Who started this process: the variables of launchers, SLURM's short forms, and ``devices=`` beside them."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, strategies as st

import hocket
from hocket.basics.launching import Environment, environment, expand_hosts, hint
from hocket_testkit import run_ranks

# --- the environment; what follows was printed by real launchers, except for SLURM's and Ray's, which are from their manuals

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node-23896@1",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "HYDI_CONTROL_FD": "7"}
INTEL = {**MPICH, "I_MPI_HYDRA_UUID": "e35e0000-592a-8d28-cf60-0600ae8d362f"}
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_STEP_NODELIST": "gpu[08-10]",
    "SLURM_NODELIST": "gpu[07-10]",
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
        ({**OPEN_MPI, "MASTER_PORT": "7"}, ("open-mpi", 1, 2, 1, 2, "127.0.0.1", 7)),
        (MPICH, ("mpich", 1, 2, 1, 2, "127.0.0.1", 29500)),
        ({**INTEL, "MASTER_PORT": "7"}, ("intel-mpi", 1, 2, 1, 2, "127.0.0.1", 7)),
        ({**MPICH, "PMI_SIZE": "4"}, ("mpich", 1, 4, 1, 2, None, 29500)),
        ({**MPICH, "PMI_SIZE": "4", "MASTER_ADDR": "node0"}, ("mpich", 1, 4, 1, 2, "node0", 29500)),
        ({**SLURM, "MASTER_PORT": "7"}, ("slurm", 5, 7, 2, 3, "gpu08", 7)),
        # One launcher inside another's task: the inner one counts.
        ({**SLURM, **TORCHRUN}, ("torchrun", 5, 8, 1, 4, "node0", 29400)),
        ({**SLURM, **MPICH}, ("mpich", 1, 2, 1, 2, "127.0.0.1", 29500)),
        # srun --mpi=pmi2 sets these two as well
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7", "MASTER_PORT": "7"}, ("slurm", 5, 7, 2, 3, "gpu08", 7)),
    ],
)  # fmt: skip
def test_launchers(variables, expected):
    assert environment({"PATH": "/bin", **variables}) == Environment(*expected)


@pytest.mark.parametrize("variables", [{}, {"HOME": "/"}, BATCH_SCRIPT, {"RAY_RAYLET_PID": "7"}, {"PMIX_RANK": "0"}])
def test_alone(variables):
    assert environment(variables) is None


def test_a_batch_script_without_srun_is_told():
    assert "7 tasks" in hint(BATCH_SCRIPT) and "srun" in hint(BATCH_SCRIPT)
    assert hint(SLURM) == hint({}) == hint({**BATCH_SCRIPT, "SLURM_NTASKS": "1"}) == ""


def test_all_ranks_of_a_job_find_the_same_port_and_other_jobs_probably_another():
    def port(**changes):
        return environment({**SLURM, **changes}).master_port

    assert port() == port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    ports = {port(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job in range(20) for step in range(5)}
    assert len(ports) > 90 and all(20000 <= each < 32000 for each in ports)
    assert environment(OPEN_MPI).master_port != environment({**OPEN_MPI, "PMIX_NAMESPACE": "other"}).master_port


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
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=1"),
        ({**MPICH, "MPI_LOCALRANKID": "3"}, "MPI_LOCALRANKID=3"),
        ({**SLURM, "SLURM_PROCID": "7"}, "rank 7 of 7.*SLURM_PROCID=7"),
        ({**SLURM, "SLURM_NODEID": "3"}, "do not include node 3"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[08-"}, "not a list of hosts"),
    ],
)
def test_inconsistent_variables(variables, message):
    with pytest.raises(ValueError, match=message):
        environment(variables)


@given(
    st.integers(1, 6).flatmap(lambda world: st.tuples(st.just(world), st.integers(0, world - 1))),
    st.sampled_from(["RANK WORLD_SIZE", "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE", "SLURM_PROCID SLURM_NTASKS"]),
)
def test_every_rank_of_every_world(size, names):
    world, rank = size
    name_of_rank, name_of_size = names.split()
    found = environment({name_of_rank: str(rank), name_of_size: str(world), "SLURM_STEP_ID": "0"})
    assert (found.rank, found.world_size) == (rank, world)


# --- SLURM's short forms

TEXT = st.text("abcxyz-.", min_size=1, max_size=4)


@st.composite
def groups(draw):
    """A name with brackets and what it stands for, put together by loops of our own."""
    text, names = draw(TEXT), None
    names = [text]
    for _ in range(draw(st.integers(0, 2))):
        written, numbers = [], []
        for _ in range(draw(st.integers(1, 3))):
            low, more, width = draw(st.integers(0, 120)), draw(st.integers(0, 4)), draw(st.integers(1, 4))
            begin = str(low).zfill(width)
            last = str(low + more).zfill(len(begin))
            written.append(begin if more == 0 and draw(st.booleans()) else f"{begin}-{last}")
            numbers += [str(number).zfill(len(begin)) for number in range(low, low + more + 1)]
        tail = draw(st.one_of(st.just(""), TEXT))
        text += f"[{','.join(written)}]{tail}"
        names = [name + number + tail for name in names for number in numbers]
    return text, names


@given(st.lists(groups(), min_size=1, max_size=4))
def test_lists_of_hosts(parts):
    hosts = ",".join(text for text, _ in parts)
    assert list(expand_hosts(hosts)) == [name for _, names in parts for name in names]


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("node1", "node1"),
        ("gpu[08-10,12],login", "gpu08 gpu09 gpu10 gpu12 login"),
        ("a[9-11]", "a9 a10 a11"),
        ("rack[1-2]n[01-02].x", "rack1n01.x rack1n02.x rack2n01.x rack2n02.x"),
        ("a, b", "a b"),
    ],
)
def test_lists_of_hosts_as_they_are_seen(hosts, names):
    assert list(expand_hosts(hosts)) == names.split()


@pytest.mark.parametrize("hosts", ["", "a,,b", "a[1", "a]1", "a[[1]]", "a[]", "a[x]", "a[3-1]", "a[1-2-3]", "a[-1]"])
def test_what_is_no_list_of_hosts(hosts):
    with pytest.raises(ValueError, match="list of hosts"):
        list(expand_hosts(hosts))


def test_the_first_of_very_many_costs_nothing():
    assert next(expand_hosts("n[000000001-999999999]")) == "n000000001"


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_tasks_per_node(runs):
    written = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    each = [tasks for tasks, nodes in runs for _ in range(nodes)]
    for node, tasks in enumerate(each):
        variables = {**SLURM, "SLURM_NTASKS": str(sum(each)), "SLURM_PROCID": str(sum(each) - 1), "SLURM_LOCALID": "0"}
        found = environment({**variables, "SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": written})
        assert found.local_world_size == tasks


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
        hocket.basics.launching.start(3)
    hocket.basics.launching.start(4)  # they are there


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
        (lambda: hocket.basics.launching.start(2), "devices=2 needs hocket-strategies, which is"),
        (lambda: run_ranks(print, 2), "run_ranks needs hocket-strategies, which is"),
    ],
)
def test_what_starts_processes_says_in_one_line_what_to_install(start, said, without_strategies):
    with pytest.raises(
        (ImportError, AttributeError), match=rf"^{said} not installed\. Type: pip install .*strategies$"
    ):
        start()


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
        assert hocket.basics.launching.current().rank == 5 and trainer.state.strategy.distributed

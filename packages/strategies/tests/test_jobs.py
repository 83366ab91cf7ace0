"""Ranks of jobs that an MPI or SLURM has started: their variables, and SLURM's short forms."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hocket.basics.launch_environment import Environment, environment, hint
from hocket_strategies.launching.jobs import expand_hosts

# --- the environment; what follows was printed by real launchers, except for SLURM's, which is from its manual

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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
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


def test_a_job_step_needs_no_hint():
    assert hint(SLURM) == ""


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
    st.sampled_from(["OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE", "SLURM_PROCID SLURM_NTASKS"]),
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

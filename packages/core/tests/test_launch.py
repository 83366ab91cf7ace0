"""Who started this process, how to start it again, what a worker leaves behind. Whole trainings: tests/test_launching.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hocket
from hocket.launching import Environment, WorkerError, environment, expand_hosts, hint
from hocket.launching.errors import Failure, first, read_failure
from hocket.launching.script import split
from hocket_cli import main

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


# --- the command line, again


@pytest.fixture
def script(tmp_path):
    def write(code):
        (tmp_path / "script.py").write_text(code)
        return tmp_path / "script.py"

    return write


OPTIONS = st.lists(
    st.sampled_from([["-u"], ["-O"], ["-Bs"], ["-X", "dev"], ["-Xutf8"], ["-W", "error"], ["-uWdefault"],
                     ["--check-hash-based-pycs", "always"]]), max_size=3,
)  # fmt: skip
WORDS = st.lists(st.sampled_from(["-m", "-c", "x", "--lr=1", "-", "train.py"]), max_size=3)


@given(
    OPTIONS,
    st.sampled_from([["train.py"], ["-m", "pkg.mod"], ["-mpkg.mod"], ["-um", "pkg.mod"], ["-c", "print(1)"]]),
    WORDS,
)
def test_command_lines_are_taken_apart(options, what, arguments):
    flat = [word for option in options for word in option]
    found, kind, target, rest = split(["python", *flat, *what, *arguments])
    assert rest == arguments
    assert target == what[-1].removeprefix("-m") and kind == (
        "" if what == ["train.py"] else "-c" if "-c" in what else "-m"
    )
    joined = "".join(flat) + ("-u" if what[0] == "-um" else "")
    assert "".join(found) == joined


@pytest.mark.parametrize("argv", [["python"], ["python", "-"], ["python", "-u", "-"]])
def test_the_standard_input_is_no_script(argv):
    assert split(argv)[2] == ""


def test_python_takes_its_command_line_apart_likewise():
    """What python itself makes of a command line: sys.argv[1:] are the arguments."""
    code = "import sys, json; print(json.dumps([sys.orig_argv, sys.argv]))"
    done = subprocess.check_output([sys.executable, "-Xutf8", "-W", "error", "-uc", code, "-m", "a"], text=True)
    original, seen = json.loads(done)
    assert split(original) == (["-Xutf8", "-Werror", "-u"], "-c", code, seen[1:])


@pytest.mark.parametrize("command", [["-m", "pytest"], [sysconfig.get_path("scripts") + "/pytest"]])
def test_pytest_is_not_started_again(command, tmp_path):
    """In a process of its own: this one may be a worker of pytest-xdist's, which is not started as pytest."""
    test = tmp_path / "test_again.py"
    test.write_text("from hocket.launching.script import command_again\ndef test_again(): command_again(3)\n")
    done = subprocess.run([sys.executable, *command, str(test)], capture_output=True, text=True, check=False)
    assert re.search(r"under pytest.*hocket\.launch\(function, 3\)", done.stdout)


@pytest.mark.parametrize("way", ["-i", "-c", "-", "IPython"])
def test_where_there_is_no_script(way, script):
    code = "from hocket.launching.script import command_again; command_again(2)"
    file = script(f"import builtins; builtins.get_ipython = 1; {code}" if way == "IPython" else code)
    command = {"-i": ["-i", file], "-c": ["-c", code], "-": ["-"], "IPython": [file]}[way]
    done = subprocess.run([sys.executable, *command], input=code, capture_output=True, text=True, check=False)
    assert "runs the script again for every other rank" in done.stderr
    assert "hocket.launch(function, 2)" in done.stderr


# --- workers


def worker(*command, error=None, **options):
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(error or "")}
    words = [sys.executable, "-P", "-m", "hocket.launching.worker", *map(str, command)]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


REPORT = """
import json, sys
def here(): pass
print(json.dumps([__name__, here.__module__, sys.argv, sys.path[0], sys.modules["__main__"].here is here,
                  globals().get("__file__"), sys.path]))
"""


def test_a_worker_runs_what_python_would(tmp_path):
    """Script, module and folder see themselves as they do when python runs them."""
    (tmp_path / "mod.py").write_text(REPORT)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text(REPORT)
    for command in (["mod.py", "-x", "1"], ["-m", "mod", "a"], ["pack", "b"], ["-m", "pack"]):
        out, err = worker(*command, cwd=tmp_path).communicate()
        assert not err
        expected = subprocess.check_output([sys.executable, *command], text=True, cwd=tmp_path)
        mine, pythons = json.loads(out), json.loads(expected)
        mine[2][0] = pythons[2][0] = os.path.abspath(tmp_path / mine[2][0])
        assert mine == pythons, command


def test_nothing_in_the_working_directory_is_taken_for_hocket(tmp_path):
    (tmp_path / "hocket").mkdir()
    (tmp_path / "hocket" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "fine.py").write_text("print('fine')")
    assert worker("elsewhere/fine.py", cwd=tmp_path).communicate() == ("fine\n", "")


def test_an_error_is_written_down(script, tmp_path):
    file = script("def inner():\n    raise LookupError('not here')\n\ninner()\n")
    process = worker(file, error=tmp_path / "error.json")
    _, err = process.communicate()
    assert process.returncode == 1 and "LookupError: not here" in err
    failure = read_failure(3, 1, tmp_path / "error.json")
    plain = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False).stderr
    assert failure.traceback == plain  # without the frames of the launcher
    assert abs(failure.time - time.time()) < 60
    assert "Rank 3 raised (exit code 1)" in str(failure) and "LookupError: not here" in str(failure)


def test_torch_reads_the_file_too(script, tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    worker(script("raise LookupError('not here')"), error=tmp_path / "error.json").communicate()
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))
    assert "LookupError: not here" in failure.message["extraInfo"]["py_callstack"]
    assert abs(failure.timestamp - time.time()) < 60


@pytest.mark.parametrize(
    ("end", "code", "written"), [("0", 0, False), ("", 0, False), ("4", 4, True), ("'why'", 1, True)]
)
def test_exit_codes_stay(script, tmp_path, end, code, written):
    process = worker(script(f"import sys; sys.exit({end})"), error=tmp_path / "error.json")
    _, err = process.communicate()
    assert process.returncode == code and (tmp_path / "error.json").exists() == written
    assert err == ("why\n" if end == "'why'" else "")


def test_a_worker_that_raised_ends_though_threads_go_on(script):
    """Else the other ranks would wait for it for ever."""
    code = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); raise LookupError"
    shortly = "from hocket.launching import worker; worker.GRACE = 0.5; worker.main()"
    done = subprocess.run(
        [sys.executable, "-c", shortly, script(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "LookupError" in done.stderr


def gone(pid):
    """Whether a process ends within some seconds; one that nobody has waited for yet has."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


LAUNCHER = """
import os, subprocess, sys, threading, time
from hocket.launching.parent import variable
def start(wrapper=()):
    command = [*wrapper, sys.executable, "-P", "-m", "hocket.launching.worker", sys.argv[2]]
    subprocess.Popen(command, env={**os.environ, **variable()})
if sys.argv[1] == "thread":  # Linux takes its end for that of the launcher
    each = threading.Thread(target=start); each.start(); each.join()
else:
    start(["sh", "-c", '"$@"; true', "sh"] if sys.argv[1] == "wrapper" else ())
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["main", "thread", "wrapper", "late"])
def test_a_worker_ends_with_its_launcher_and_not_before(way, script, tmp_path):
    """Also one that has not begun to watch when the launcher is killed, and one that a wrapper of the interpreter starts."""
    late = "import site, time; time.sleep(1.5)" if way == "late" else ""
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\nif 'hocket.launching.worker' in sys.orig_argv:\n"
        f"    open({str(tmp_path / 'begun')!r}, 'w').write(str(os.getpid()))\n    {late or 'pass'}\n")  # fmt: skip
    up = tmp_path / "up"
    file = script(f"import os, time; open({str(up)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, way, str(file)], env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    known = tmp_path / "begun" if way == "late" else up
    while not (known.exists() and known.read_text()):
        time.sleep(0.05)
        assert launcher.poll() is None
    pid = int(known.read_text())
    if way == "thread":
        time.sleep(1.0)
        assert launcher.poll() is None and not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" Z")
    launcher.kill()
    launcher.wait()
    assert gone(pid)
    assert way != "late" or not up.exists()


def listening(pids):
    """Return the addresses, in hexadecimal, on which processes listen."""
    inodes = set()
    for pid in pids:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(each).removeprefix("socket:[").removesuffix("]"))
    tables = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in tables if row[3] == "0A" and row[9] in inodes}


RANKS = """
import os, sys, time
def rank():
    import hocket
    runtime = hocket.Runtime(device="cpu", strategy="ddp")
    runtime.all_reduce(__import__("torch").ones(1), "sum")
    open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(f"{os.getpid()} {os.environ.get('GLOO_SOCKET_IFNAME')}")
    time.sleep(600)
if "RANK" in os.environ:
    rank()
import hocket
hocket.launch(rank, 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("way", ["hocket.launch", "hocket launch", pytest.param("torchrun", marks=pytest.mark.long)])
def test_ranks_of_one_machine_listen_there_only_and_end_with_their_launcher(way, script, tmp_path):
    launchers = {
        "hocket launch": ["hocket", "launch", "-n", "2"],
        "torchrun": ["torch.distributed.run", "--nproc-per-node", "2"],
    }
    before = ["-m", *launchers[way]] if way in launchers else []
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    launcher = subprocess.Popen([sys.executable, *before, str(script(RANKS)), str(tmp_path)], env=clean)
    files = [tmp_path / "0", tmp_path / "1"]
    while not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.1)
        assert launcher.poll() is None
    pids, interfaces = zip(*(file.read_text().split() for file in files), strict=True)
    if way != "torchrun":
        assert listening([launcher.pid, *pids]) == {"0100007F"} and set(interfaces) == {"lo"}
    launcher.kill()
    launcher.wait()
    assert all(gone(int(pid)) for pid in pids)


def test_which_failed_first():
    raised = Failure(2, 1, "Traceback …", 100.5)
    later = Failure(0, 1, "Traceback …", 100.6)
    killed, ended, silent = (
        Failure(3, -9, time=100.9),
        Failure(1, -signal.SIGTERM, time=99.0),
        Failure(4, 1, time=101.0),
    )
    assert first([later, raised, ended]) is raised
    assert first([later, ended, killed]) is killed
    assert first([silent, ended, later]) is later
    for number, seconds in ((signal.SIGKILL, 131), (signal.SIGABRT, 104), (signal.SIGSEGV, 104)):  # by or after SIGTERM
        stopped = Failure(0, -number, time=seconds)
        assert first([stopped, raised]) is raised and first([stopped, silent]) is silent
    assert first([ended]) is ended
    assert killed.shell_code == 137 and raised.shell_code == 1
    assert "killed by SIGKILL" in str(killed) and "out of memory" in str(killed)
    assert "left no traceback" in str(silent)


def test_a_file_that_somebody_else_wrote(tmp_path):
    for text in ("", "{}", '{"message": "short"}', "[1]"):
        (tmp_path / "error.json").write_text(text)
        assert read_failure(0, 7, tmp_path / "error.json", 3.0) == Failure(0, 7, time=3.0)


# --- hocket launch


def test_help_needs_no_torch():
    code = "import sys; from hocket_cli import main; main({}); assert 'torch' not in sys.modules"
    for arguments in (["--help"], ["plugins", "list"]):
        subprocess.run([sys.executable, "-c", code.format(arguments)], check=True, capture_output=True)
    command = [sys.executable, "-X", "importtime", "-m", "hocket.launching.worker", "-m", "this"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " torch" not in done.stderr and " hocket.launching" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2", "/bin/sh", "x"], "/bin/sh is not a Python script"),
        (["-n", "2", "absent.py"], "no file absent.py.*write -m absent"),
        (["-n", "2", "."], "no __main__.py"),
        (["-n", "2", "-m", "absent.module"], "no module absent"),
        (["-n", "0", "script.py"], "-n 0 is not a positive integer, or auto"),
        (["-n", "many", "script.py"], "-n many is not"),
        (["--nnodes", "2:1", "script.py"], "the minimum comes first, as in 1:2"),
        (["--nnodes", "2", "script.py"], "--rdzv-endpoint node1:29400"),
        (["--nnodes", "1:2", "--node-rank", "0", "script.py"], "Remove --node-rank"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1", "script.py"], "counted from 0"),
        (["--nnodes", "2", "--node-rank", "1", "script.py"], "--rdzv-endpoint node1:29400"),
        (["--node-rank", "0", "--rdzv-backend", "c10d", "script.py"], "assigns the numbers itself"),
        (["--rdzv-backend", "static", "script.py"], "--node-rank 0"),
        (["--rdzv-conf", "timeout", "script.py"], "'timeout' has no value"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    before = dict(os.environ)
    assert main(["launch", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err) and dict(os.environ) == before


# --- hocket.launch


def test_forks_can_train_together_and_answer_in_order():
    """torch's own way of joining uses the port that `launch` holds ready for rank 0."""
    import torch._dynamo  # sets a variable of its own

    factor = 10

    def function(offset):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        dist.barrier()
        dist.destroy_process_group()
        return offset + factor * int(os.environ["RANK"]), total.item(), environment(os.environ)

    before = dict(os.environ)
    results = hocket.launch(function, 3, 5)
    assert [result[:2] for result in results] == [(5, 3.0), (15, 3.0), (25, 3.0)]
    for rank, (_, _, found) in enumerate(results):
        assert (found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size) == (
            "hocket", rank, 3, rank, 3,
        )  # fmt: skip
    assert dict(os.environ) == before
    with socket.socket() as again:  # nothing listens any more
        assert again.connect_ex(("127.0.0.1", results[0][2].master_port)) != 0


def test_a_fork_that_raises_ends_the_others():
    def function():
        if os.environ["RANK"] == "1":
            raise LookupError("not here")
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)Rank 1 of 2 raised:.*in function.*LookupError: not here") as error:
        hocket.launch(function, 2)
    assert error.value.rank == 1 and time.monotonic() - begin < 30


def test_a_fork_that_is_killed_ends_the_others():
    def function():
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(WorkerError, match=r"Rank 0 of 2 died without an exception.*killed by SIGKILL"):
        hocket.launch(function, 2)


def test_a_process_that_has_used_a_gpu_is_not_forked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"used a GPU cannot be forked.*restart the kernel"):
        hocket.launch(int, 2)


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
        hocket.launching.start(3)
    hocket.launching.start(4)  # they are there

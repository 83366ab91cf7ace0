"""What MLflow's client finds: in a folder, in a database, and on a server on this machine."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request

import numpy
import pytest
import torch
from PIL import Image

from hocket_loggers import MLflowLogger
from hocket_testkit import LoggerConformance

mlflow = pytest.importorskip("mlflow")

pytestmark = [
    pytest.mark.usefixtures("in_an_empty_folder"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for reading; see the last test


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of `mlflow server`, on a database."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.fixture(params=["file", "sqlite", "server"])
def uri(request, tmp_path):
    if request.param == "server":
        return request.getfixturevalue("server")
    return f"sqlite:///{tmp_path}/mlflow.db" if request.param == "sqlite" else (tmp_path / "mlruns").as_uri()


def the_run(uri, run):
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("hocket").experiment_id
    (found,) = client.search_runs([experiment], f"tags.`hocket.run` = '{run}'")
    return client, found


def values(client, run, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def test_every_record(uri, state_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts beside a database
    identity = os.urandom(16).hex()

    def at(batch):
        return state_in(tmp_path, batch, run=identity)

    logger = MLflowLogger(uri, tags={"team": "vision"})
    parameters = {"lr": 0.1, "algorithms": {"ema": {"half_life": "50ba"}}, "none": None, "long": "x" * 7000}
    logger.log_hyperparameters(at(0), parameters)
    logger.log_metrics(at(1), {"train/loss": 0.1 + 0.2, "100% odd": 1, "epoch": 5})
    logger.log_rows([(at(batch), {"train/loss": 1 / batch}) for batch in range(2, 300)])
    logger.log_metrics(at(300), {"train/loss": math.nan})
    images = [torch.randint(256, (3, 4, 5), dtype=torch.uint8), torch.rand(1, 2, 2).bfloat16()]
    logger.log_images(at(2), "samples", images)
    logger.log_table(at(2), "tables/generated", ["text", "score"], [["a|b", 0.5], [None, 1]])
    logger.log_text(at(2), "texts/first", "# A title")
    logger.log_histogram(at(2), "weights", [1, 0, 2.5], [-1.0, 0.0, 0.5, 2.0])
    (tmp_path / "file.txt").write_text("content")
    logger.log_artifact(at(2), "files", tmp_path / "file.txt")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "leaf").write_text("green")
    logger.log_artifact(at(2), "trees", tmp_path / "tree")
    logger.close(at(2))

    client, run = the_run(uri, identity)
    assert run.info.status == "FINISHED" and run.info.run_name == "run" and run.data.tags["team"] == "vision"
    assert run.data.params["lr"] == "0.1" and run.data.params["algorithms/ema/half_life"] == "50ba"
    losses = values(client, run, "train/loss")
    assert losses[:-1] == [(1, 0.1 + 0.2), *((batch, 1 / batch) for batch in range(2, 300))]
    assert losses[-1][0] == 300 and math.isnan(losses[-1][1])
    assert values(client, run, "100_ odd") == [(1, 1.0)] and values(client, run, "metric/epoch") == [(1, 5.0)]
    assert values(client, run, "sample")[:2] == [(1, 4), (2, 8)] and values(client, run, "epoch")[9] == (10, 1)

    def file(path):
        return client.download_artifacts(run.info.run_id, path, str(tmp_path))

    def content(path):
        with open(file(path)) as opened:
            return opened.read()

    assert json.loads(content("hyperparameters.json")) == parameters
    assert torch.equal(torch.from_numpy(numpy.array(Image.open(file("samples/2-0.png")))).permute(2, 0, 1), images[0])
    grey = torch.from_numpy(numpy.array(Image.open(file("samples/2-1.png")).convert("L"))).float() / 255
    assert (grey - images[1][0].float()).abs().max() < 1 / 255
    assert json.loads(content("tables/generated/2.json")) == {
        "columns": ["text", "score"],
        "data": [["a|b", 0.5], [None, 1]],
    }
    assert content("texts/first/2.md") == "# A title"
    assert json.loads(content("weights/2.json")) == {"counts": [1, 0, 2.5], "edges": [-1.0, 0.0, 0.5, 2.0]}
    assert content("files/file.txt") == "content" and content("trees/leaf") == "green"


def test_a_killed_run_continues_and_has_each_value_once(uri, killed_and_resumed, tmp_path, monkeypatch):
    losses = killed_and_resumed({"mlflow": {"tracking_uri": uri}}, patience=0.0)
    identity = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["run"]
    client, run = the_run(uri, identity)
    assert values(client, run, "train/loss") == losses and run.info.status == "FINISHED"
    assert [step for step, _ in values(client, run, "sample")] == sorted(
        {step for step, _ in values(client, run, "sample")}
    )


def test_the_process_ends_though_the_server_never_answers(silent_server, run_against):
    run_against({"mlflow": {"tracking_uri": silent_server}}, {})


def test_waiting_rows_arrive_in_few_requests(server, tmp_path, monkeypatch):
    """A client that takes a tenth of a second for a request, as one on the other side of the world."""
    import hocket

    requests = []
    log_batch = mlflow.MlflowClient.log_batch

    def slow(self, *arguments, **keywords):
        requests.append(len(keywords.get("metrics", ())))
        time.sleep(0.1)
        return log_batch(self, *arguments, **keywords)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", slow)
    data = [(torch.ones(1, 1), torch.ones(1, 1))] * 500
    with hocket.Trainer(
        model=torch.nn.Linear(1, 1),
        loss=torch.nn.MSELoss(),
        optimizer="sgd(lr=0.1)",
        train_data=data,
        device="cpu",
        duration="1ep",
        log_every="1ba",
        loggers=[MLflowLogger(server)],
        folder=tmp_path,
    ) as trainer:
        trainer.fit()
    client, run = the_run(server, trainer.state.run.id)
    assert [step for step, _ in values(client, run, "train/loss")] == list(range(1, 501))
    assert sum(map(bool, requests)) < 50


def test_two_side_by_side(tmp_path):
    import hocket

    places = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
    data = [(torch.ones(1, 1), torch.ones(1, 1))] * 4
    with hocket.Trainer(
        model=torch.nn.Linear(1, 1),
        loss=torch.nn.MSELoss(),
        optimizer="sgd(lr=0.1)",
        train_data=data,
        device="cpu",
        duration="1ep",
        log_every="1ba",
        loggers=[{"mlflow": {"tracking_uri": place}} for place in places],
    ) as trainer:
        trainer.fit()
    histories = [values(*the_run(place, trainer.state.run.id), "train/loss") for place in places]
    assert histories[0] == histories[1] and len(histories[0]) == 4


class TestMLflow(LoggerConformance):
    @pytest.fixture(autouse=True)
    def _elsewhere(self, tmp_path_factory, monkeypatch):
        self._uri = (tmp_path_factory.mktemp("mlruns") / "runs").as_uri()

    def make(self):
        return MLflowLogger(self._uri)

    def written(self, logger, folder):
        client = mlflow.MlflowClient(tracking_uri=self._uri)
        (run,) = [
            run
            for run in client.search_runs([client.get_experiment_by_name("hocket").experiment_id])
            if run.info.run_name == folder.name
        ]
        names = run.data.metrics.keys() - {"epoch", "sample", "token", "seconds"}
        return {name: [value for _, value in values(client, run, name)] for name in names}


def test_a_folder_is_written_without_its_environment_variable(state_in, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    logger = MLflowLogger(f"file:{tmp_path}/mlruns")
    logger.log_metrics(state_in(tmp_path), {"loss": 0.5})
    assert [file.read_text().split()[1] for file in tmp_path.glob("mlruns/*/*/metrics/loss")] == ["0.5"]

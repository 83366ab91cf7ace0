"""Loggers that raise, hang or are slow: training goes on, and what they did not write is counted."""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.plugins import delivery
from hocket.plugins.delivery import LoggerWarning


def make(folder: Path, *loggers: Any, **changes: Any) -> hocket.Trainer:
    batches = [(torch.full((4, 3), float(number)), torch.zeros(4, 1)) for number in range(5)]
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"duration": "2ep", "log_every": "1ba", "run_name": "run", "device": "cpu", **changes}
    return hocket.Trainer(
        model=nn.Linear(3, 1), loss=F.mse_loss, train_data=batches, optimizer="sgd(lr=0.001)", folder=folder,
        loggers=list(loggers), **arguments,
    )  # fmt: skip


class Keep(hocket.Logger):
    """In a thread: it only writes down."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.threads: set[threading.Thread] = set()
        self.states: list[hocket.State] = []

    def log_metrics(self, state: hocket.State, metrics: dict[str, float]) -> None:
        self.threads.add(threading.current_thread())
        self.states.append(state)
        self.rows.append((state.timestamp.batch, dict(metrics)))


class InPlace(Keep):
    synchronous = True


def weights(trainer: hocket.Trainer) -> list[float]:
    return [value for each in trainer.model_state_dict().values() for value in each.flatten().tolist()]


# --- what arrives


def test_a_thread_hears_the_same_in_the_same_order(tmp_path: Path) -> None:
    threaded, placed = Keep(), InPlace()
    make(tmp_path, threaded, placed).fit()
    assert threaded.rows == placed.rows and [batch for batch, _ in placed.rows] == list(range(1, 11))
    assert placed.threads == {threading.main_thread()} and threading.main_thread() not in threaded.threads
    last = threaded.states[-1]
    assert last.batch is last.loss is last.outputs is None, "a copy holds no batch"


def test_hooks_keep_their_order(tmp_path: Path) -> None:
    heard: list[str] = []

    class All(hocket.Logger):
        def log_hyperparameters(self, state: Any) -> None:
            heard.append("hyperparameters")

        def fit_start(self, state: Any) -> None:
            heard.append("fit_start")

        def log_metrics(self, state: Any) -> None:
            heard.append("metrics")

        def fit_end(self, state: Any) -> None:
            heard.append("fit_end")

        def flush(self, state: Any) -> None:
            heard.append("flush")

        def close(self, state: Any) -> None:
            heard.append("close")

    trainer = make(tmp_path, All(), duration="2ba")
    trainer.fit()
    assert heard == ["hyperparameters", "fit_start", "metrics", "metrics", "fit_end", "flush"]
    trainer.close()
    assert heard[-1] == "close"


@pytest.mark.parametrize("declared, expected", [(None, True), (False, False)])
def test_who_takes_part_in_batches_is_called_in_place(tmp_path: Path, declared: Any, expected: bool) -> None:
    seen = []

    class Reads(hocket.Logger):
        synchronous = declared

        def batch_end(self, state: Any) -> None:
            seen.append((threading.current_thread() is threading.main_thread(), state.batch is not None))

    make(tmp_path, Reads()).fit()
    assert seen == [(expected, expected)] * 10


def test_what_is_logged_may_be_written_into_afterwards(tmp_path: Path) -> None:
    values = []

    class Late(hocket.Logger):
        def log_images(self, images: Any) -> None:
            go.wait()
            kept.extend(images)

        def log_table(self, rows: Any) -> None:
            values.extend(rows)

    go, kept = threading.Event(), []  # type: ignore[var-annotated]
    trainer = make(tmp_path, Late())
    images, rows = [torch.zeros(1, 2, 2)], [["a", 1]]
    trainer.state.bus.log_images(trainer.state, "images", images)
    trainer.state.bus.log_table(trainer.state, "table", ["name", "value"], rows)
    images[0].fill_(7)
    rows[0][1] = 2
    go.set()
    trainer.close()
    assert kept[0].sum() == 0 and values == [["a", 1]]


def test_no_thread_is_left_when_it_is_closed(tmp_path: Path) -> None:
    logger = Keep()
    trainer = make(tmp_path, logger)
    trainer.fit()
    trainer.close()
    assert not any(thread.is_alive() for thread in logger.threads)
    trainer.fit("1ba")
    trainer.close()
    assert logger.rows[-1][0] == 11, "and another begins when there is more"


def test_a_fork_has_a_thread_of_its_own(tmp_path: Path) -> None:
    logger = Keep()
    trainer = make(tmp_path, logger)
    trainer.fit()  # its thread is there, and will not be in the fork

    def child() -> None:
        trainer.fit("2ba")
        (tmp_path / "rows").write_text(json.dumps([batch for batch, _ in logger.rows]))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "rows").read_text()) == list(range(1, 13))


class Together(Keep):
    """Takes several rows in one call, the first only once `go` is set."""

    deadline = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def log_rows(self, rows: Any) -> None:
        self.calls.append([state.timestamp.batch for state, _ in rows])
        self.entered.set()
        self.go.wait()
        if self.calls[-1][0] > 1:
            raise ConnectionError("no answer")


def test_waiting_rows_are_passed_together_and_counted_one_by_one(tmp_path: Path) -> None:
    class WaitForIt(hocket.Callback):
        def batch_end(self, state: Any) -> None:
            if state.timestamp.batch == 2:
                assert logger.entered.wait(60)

        def fit_end(self, state: Any) -> None:
            logger.go.set()

    logger = Together()
    with pytest.warns(LoggerWarning, match=r"raised ConnectionError in log_rows\(\)") as told:
        make(tmp_path, logger, callbacks=[WaitForIt()]).fit()
    assert logger.calls == [[1], list(range(2, 11))] and not logger.rows
    assert "9 rows dropped." in str(told[-1].message)


def test_rows_in_a_call_that_does_not_return_are_told(tmp_path: Path) -> None:
    logger = Together()
    trainer = make(tmp_path, logger)
    with pytest.warns(LoggerWarning) as told:
        trainer.state.bus.log_metrics(trainer.state, {"a": 1.0})
        assert logger.entered.wait(60)
        for value in (2.0, 3.0):
            trainer.state.bus.log_metrics(trainer.state, {"a": value})
        trainer.close()
    logger.go.set()
    assert "2 rows dropped, and 1 more may not have arrived." in str(told[-1].message)


# --- what goes wrong


class Raises(hocket.Logger):
    """A full disk."""

    def log_metrics(self, state: Any, metrics: Any) -> None:
        raise OSError(28, "No space left on device")


class RaisesInPlace(Raises):
    synchronous = True


@pytest.mark.parametrize("kind", [Raises, RaisesInPlace])
def test_a_logger_that_raises_warns_once_and_counts(tmp_path: Path, kind: type[hocket.Logger]) -> None:
    without = make(tmp_path)
    without.fit()
    good = Keep()
    trainer = make(tmp_path, kind(), good)
    with pytest.warns(LoggerWarning) as told:
        trainer.fit()
    first, last = (str(warning.message) for warning in (told[0], told[-1]))
    assert "raised OSError in log_metrics(): [Errno 28] No space left" in first and "test_delivery.py:" in first
    assert "10 rows dropped" in last and sum("raised" in str(each.message) for each in told) == 1
    assert weights(trainer) == weights(without) and len(good.rows) == 10, "nobody else notices"


def test_one_that_recovers_has_the_rest(tmp_path: Path) -> None:
    class Sometimes(InPlace):
        def log_metrics(self, state: Any, metrics: Any) -> None:
            if state.timestamp.batch <= 3:
                raise ConnectionError("not yet")
            super().log_metrics(state, metrics)

    logger = Sometimes()
    with pytest.warns(LoggerWarning, match="3 rows dropped"):
        make(tmp_path, logger).fit()
    assert [batch for batch, _ in logger.rows] == list(range(4, 11))


@pytest.mark.parametrize("hook", ["log_hyperparameters", "log_metrics", "fit_start", "flush", "close"])
def test_a_logger_that_hangs_holds_nobody_up(tmp_path: Path, hook: str) -> None:
    """Whatever it hangs in, a fit and a close together wait for its deadline once."""
    go = threading.Event()

    def hang(self: Any, state: Any) -> None:
        go.wait()

    logger = type("Hangs", (hocket.Logger,), {hook: hang, "deadline": 0.2, "log_table": lambda self: None})()
    trainer = make(tmp_path, logger)
    try:
        with pytest.warns(LoggerWarning) as told:
            trainer.fit()
            began = time.monotonic()
            trainer.close()
            trainer.close()
            waited = time.monotonic() - began
        assert sum(f"is still in {hook}() after 0.2 s" in str(each.message) for each in told) == 1
        assert trainer.state.timestamp.batch == 10
        assert waited < 5, "once is enough"
    finally:
        go.set()


def test_events_are_counted_beside_rows_and_a_failing_flush_is_not(tmp_path: Path) -> None:
    class Full(Raises):
        def fit_end(self, state: Any) -> None:
            raise OSError("No space left on device")

        flush = close = fit_end

    class Flushes(hocket.Logger):
        def flush(self, state: Any) -> None:
            raise OSError("No space left on device")

    with pytest.warns(LoggerWarning) as told:
        make(tmp_path, Full(), Flushes()).fit()
    texts = [str(each.message) for each in told]
    assert [text.partition("is incomplete: ")[2] for text in texts if "incomplete" in text] == [
        "10 rows and 1 event dropped."
    ]


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_MAX_QUEUED", 4)
    go = threading.Event()

    class Stuck(Keep):
        def log_metrics(self, state: Any, metrics: Any) -> None:
            go.wait()
            super().log_metrics(state, metrics)

    class Release(hocket.Callback):
        def fit_end(self, state: Any) -> None:
            go.set()

    logger = Stuck()
    with pytest.warns(LoggerWarning) as told:
        make(tmp_path, logger, callbacks=[Release()]).fit()
    batches = [batch for batch, _ in logger.rows]
    assert len(batches) in (4, 5), "four wait, and one may be under way"
    assert batches[:4] == [1, 2, 3, 4] and batches == sorted(batches)
    assert "is slower than training: 4 calls are queued for it" in str(told[0].message)
    assert f"{10 - len(logger.rows)} rows dropped" in str(told[-1].message)


def test_what_was_dropped_when_it_was_closed_is_not_written_later(tmp_path: Path) -> None:
    go, entered = threading.Event(), threading.Event()

    class Stuck(Keep):
        deadline = 0.05

        def log_metrics(self, state: Any, metrics: Any) -> None:
            entered.set()
            go.wait()
            super().log_metrics(state, metrics)

    class UnderWay(hocket.Callback):
        def fit_end(self, state: Any) -> None:
            assert entered.wait(60)

    logger = Stuck()
    trainer = make(tmp_path, logger, callbacks=[UnderWay()])
    with pytest.warns(LoggerWarning) as told:
        trainer.fit()
        trainer.close()
    (thread,) = [each for each in threading.enumerate() if "'Stuck'" in each.name or "'stuck'" in each.name]
    go.set()
    thread.join(60)
    assert [batch for batch, _ in logger.rows] == [1] and "9 rows dropped" in str(told[-1].message)


@pytest.mark.parametrize(
    ("placed", "error"),
    [(True, SystemExit(3)), (True, KeyboardInterrupt()), (False, KeyboardInterrupt())],
    ids=["exit", "Ctrl-C", "Ctrl-C in a thread"],
)
def test_who_wants_to_end_the_run_does(tmp_path: Path, placed: bool, error: BaseException) -> None:
    class Ends(hocket.Logger):
        synchronous = placed

        def log_metrics(self, state: Any) -> None:
            raise error

    with pytest.raises(type(error)):
        make(tmp_path, Ends()).fit()


def test_a_client_that_exits_in_its_thread(tmp_path: Path) -> None:
    """Signals arrive in the main thread only, so it is not the run that shall end."""

    class Exits(hocket.Logger):
        def log_metrics(self, state: Any) -> None:
            sys.exit(3)

    with pytest.warns(LoggerWarning, match=r"raised SystemExit in log_metrics\(\): 3"):
        assert make(tmp_path, Exits()).fit().timestamp.batch == 10


def test_a_thread_calls_no_collectives(tmp_path: Path) -> None:
    class Asks(hocket.Logger):
        def log_metrics(self, state: Any) -> None:
            state.bus.all_reduce(torch.ones(()), "sum")

    with pytest.warns(LoggerWarning, match="all_reduce is a collective that all ranks have to call.*all_ranks = True"):
        make(tmp_path, Asks()).fit()


# --- on which rank


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_write_nothing_unless_the_logger_says_so(tmp_path: Path, rank: int) -> None:
    class Everywhere(Keep):
        all_ranks = True

    one, all_ = Keep(), Everywhere()
    trainer = make(tmp_path, one, all_)
    trainer.state.bus.on_rank(rank)
    trainer.fit()
    assert len(one.rows) == (0 if rank else 10) and len(all_.rows) == 10
    assert all_.threads == {threading.main_thread()}, "it may call collectives"

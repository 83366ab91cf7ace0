"""Each kind of bad format fails the check of the suite that is there for it, with a message that names the fault."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from hocket.testkit import ShardsConformance
from hocket_streaming.formats.lines import Text
from hocket_streaming.formats.rows import Npy
from hocket_streaming.shards import Chunk, Part
from hocket_streaming.store.files import Files


class Views(Npy):
    def get(self, opened, row):
        return opened[row]


class Lenient(Npy):
    def open(self, chunk, data):
        return np.frombuffer(bytes(data).ljust(chunk.size, b"\0"), "<f8").reshape(chunk.samples, -1)


class Pickles(Npy):
    def get(self, opened, row):
        return pickle.loads(pickle.dumps(super().get(opened, row)))


class Beyond(Npy):
    def chunks(self):
        return [Chunk((Part("a.npy", 10**6),), 1)]


class Nothing(Npy):
    def chunks(self):
        return []


class Changing(Npy):
    def chunks(self):
        return [Chunk(chunk.parts, chunk.samples, extra=time.perf_counter()) for chunk in super().chunks()]


class Twice(Npy):
    def chunks(self):
        return super().chunks()[:1] * 2


class Hidden(Npy):
    def __init__(self, files, *, secret=3):
        super().__init__(files)


class Greedy(Npy):
    @classmethod
    def serves(cls, files):
        return True


class Backwards(Npy):
    def get(self, opened, row):
        return super().get(opened, len(opened) - 1 - row)


class Counting(Npy):
    calls = 0

    def get(self, opened, row):
        type(self).calls += 1
        return super().get(opened, row) + type(self).calls


@pytest.mark.parametrize(
    ("bad", "check", "message"),
    [
        (Views, "samples_keep_no_views", "changed with its chunk"),
        (Lenient, "truncated_data_are_an_error", "With 0 of 96 bytes"),
        (Pickles, "nothing_is_unpickled", "It unpickles data"),
        (Beyond, "chunks_are_of_the_files", "not within its file"),
        (Nothing, "chunks_are_of_the_files", "returned none"),
        (Changing, "chunks_are_the_same_each_time", "lists other chunks"),
        (Twice, "chunks_are_the_same_each_time", "the same bytes and samples"),
        (Hidden, "options_are_plain_data", "secret is no attribute"),
        (Greedy, "serves_its_own_files_only", "says yes to a file notes.unknown"),
        (Text, "serves_its_own_files_only", "says no to the files that it reads"),
        (Backwards, "samples_are_those_of_the_source", "not those that were written"),
        pytest.param(Counting, "reads_backwards_in_a_spawned_process", "samples differ", marks=pytest.mark.long),
    ],
)
def test_a_bad_format_fails_its_check(bad, check, message, tmp_path, monkeypatch):
    rows = np.arange(12.0).reshape(4, 3)
    np.save(tmp_path / "a.npy", rows)
    suite = type("Suite", (ShardsConformance,), {"make": lambda self: bad(Files(str(tmp_path)))})()
    (tmp_path / "own").mkdir()
    suite.folder, suite.expected = tmp_path / "own", [("array", "<f8", (3,), row.tobytes()) for row in rows]
    arguments = (monkeypatch,) if check == "nothing_is_unpickled" else ()
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        getattr(suite, f"test_{check}")(*arguments)

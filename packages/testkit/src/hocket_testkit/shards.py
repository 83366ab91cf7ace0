"""The suite for formats of data sets in chunks."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket_testkit import chunks
from hocket_testkit.compare import difference
from hocket_testkit.conformance import Conformance


class ShardsConformance(Conformance):
    """The tests that every format of hocket-streaming must pass. Define ``write`` and ``make``, with a few small chunks.

    Example:
        >>> import hocket
        >>> from hocket_streaming.formats.lines import Text
        >>> from hocket_streaming.store.files import Files
        >>> class TestText(hocket.testkit.ShardsConformance):
        ...     def write(self, folder):
        ...         (folder / "notes.txt").write_text("do\\nre\\nmi\\n")
        ...         return ["do", "re", "mi"]
        ...     def make(self):
        ...         return Text(Files(str(self.source)), chunk_bytes=4)
    """

    kind = "shards"
    #: The folder into which `write` wrote a data set.
    source: Path
    #: The samples that `write` returned, in their order; None if the suite has no `write`.
    expected: list[Any] | None
    test_implements_known_hooks_only = None  # type: ignore[assignment]  # it has no hooks

    def write(self, folder: Path) -> list[Any] | None:
        """Write a small data set into a folder, with another library if there is one, and return its samples in their order."""
        return None

    @pytest.fixture(autouse=True)
    def _written(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.source = tmp_path_factory.mktemp("data")
        self.expected = chunks.plain(self.write(self.source))

    def test_chunks_are_of_the_files(self) -> None:
        """Chunks have samples, and lie within their files."""
        shards = self.make()
        listed, files = list(shards.chunks()), shards.files.names()
        assert listed, "chunks() returned none."
        for chunk in listed:
            assert chunk.samples > 0 and chunk.parts, f"{chunk} has no samples, or no parts. Leave it out."
            for part in chunk.parts:
                assert part.start >= 0 and part.start + part.size <= files.get(part.file, -1), (
                    f"{part} is not within its file, which has {files.get(part.file, 'no')} bytes."
                )

    def test_chunks_are_the_same_each_time(self) -> None:
        """Every process lists the same chunks, in the same order, and none twice."""
        shards = self.make()
        listed = list(shards.chunks())
        copy = pickle.loads(pickle.dumps(shards))
        assert list(copy.chunks()) == listed, "A copy lists other chunks. Depend on the files and the options alone."
        assert len({chunk.identity() for chunk in listed}) == len(listed), "Two chunks have the same bytes and samples."
        json.dumps([chunk.extra for chunk in listed])

    def test_samples_are_those_of_the_source(self) -> None:
        """Reading every chunk in order gives what was written."""
        if self.expected is None:
            pytest.skip("the suite has no write(), so nothing says which samples there should be")
        shards = self.make()
        found = difference(chunks.samples(shards, shards.chunks()), self.expected, at="samples")
        assert found is None, f"The samples are not those that were written: {found}."

    def test_reads_backwards_in_a_spawned_process(self) -> None:
        """A pickled copy reads the same samples in a process that imports nothing else, and in another order."""
        shards = self.make()
        given = pickle.dumps((sys.path, pickle.dumps(shards)))
        done = subprocess.run([sys.executable, "-m", chunks.__name__], input=given, capture_output=True, check=False)
        assert done.returncode == 0, f"In a spawned process it raised:\n{done.stderr.decode(errors='replace')[-2000:]}"
        found = difference(pickle.loads(done.stdout), chunks.samples(shards, shards.chunks()), at="samples")
        assert found is None, f"Read backwards by a copy in a spawned process, samples differ: {found}."

    def test_samples_keep_no_views(self) -> None:
        """Samples stay as they are when the chunk is evicted: `get` copies."""
        shards = self.make()
        chunk = next(iter(shards.chunks()))
        data = bytearray(shards.unpack(chunk, chunks.fetched(shards, chunk)))
        inside = shards.open(chunk, memoryview(data).toreadonly())
        before = chunks.plain(sample := shards.get(inside, 0))
        data[:] = bytes(len(data))
        found = difference(chunks.plain(sample), before, at="the sample")
        assert found is None, f"A sample changed with its chunk: {found}. Copy in get(), as by bytes(view)."

    def test_options_are_plain_data(self) -> None:
        """Options are arguments by keyword, attributes of the same names, and what JSON can hold: they are in indexes."""
        shards = self.make()
        for name in [name for name in inspect.signature(type(shards)).parameters if name != "files"]:
            assert hasattr(shards, name), f"The option {name} is no attribute: write self.{name} = {name} in __init__."
            json.dumps(getattr(shards, name))

    def test_truncated_data_are_an_error(self) -> None:
        """A chunk that lacks bytes is an error, in unpack, open or get; it does not hang, and gives no wrong sample."""
        shards = self.make()
        chunk = next(iter(shards.chunks()))
        data = chunks.fetched(shards, chunk)
        for size in {0, len(data) // 2, len(data) - 1}:
            try:
                chunks.of_chunk(shards, chunk, data[:size])
            except Exception:
                continue
            pytest.fail(f"With {size} of {len(data)} bytes of a chunk, all samples are read. Check sizes in open().")

    def test_nothing_is_unpickled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Data sets are from anywhere, and a pickle can run code."""
        shards = self.make()

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("It unpickles data. Write them in a form that runs no code, such as JSON or arrays.")

        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(pickle, name, refuse)
        chunks.samples(shards, shards.chunks())

    def test_serves_its_own_files_only(self) -> None:
        """``serves`` says yes to files of the format, and no to others."""
        shards = self.make()
        assert type(shards).serves(shards.files), "serves() says no to the files that it reads."
        (self.folder / "notes.unknown").write_bytes(b"\x00\x01\x02")
        served = type(shards).serves(type(shards.files)(str(self.folder)))
        assert not served, "serves() says yes to a file notes.unknown of three bytes."

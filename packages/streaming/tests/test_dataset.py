"""The data set as torch reads it: damage is named or left out, and mistakes are explained."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import data_sets
import numpy as np
import pytest
from stand_in import Rule, StandIn, serving

import hocket_streaming
from hocket.errors import WrongType, WrongValue
from hocket_streaming import StreamDataset, mix, stream
from hocket_streaming.errors import DamagedData, StreamError
from hocket_streaming.formats.arrow import Arrow
from hocket_streaming.store import fetching


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """32 chunks of 6 samples, of which the second is damaged."""
    path, _ = data_sets.write("mds", tmp_path / "data")
    second = sorted(Path(path).glob("*.mds"))[1]
    data = bytearray(second.read_bytes())
    data[-1] ^= 255
    second.write_bytes(data)
    return path


def test_a_damaged_chunk_is_an_error_that_names_it(damaged: str) -> None:
    dataset = StreamDataset(damaged)
    assert data_sets.numbers(dataset[5]) == 5
    with pytest.raises(DamagedData, match=r"shard.00001.mds.*its checksum is xxh64:"):
        dataset[6]


def test_a_chunk_that_a_worker_verified_is_not_verified_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = data_sets.write("mds", tmp_path / "data")
    loader = stream(path, batch_size=12, num_workers=2)
    assert len(list(loader)) == 16
    monkeypatch.setattr(fetching, "damage", lambda chunk, data: "verified again")
    assert data_sets.numbers(loader.dataset[0]) == 0
    with pytest.raises(DamagedData, match="verified again"):  # who gets a pickled one verifies for himself
        pickle.loads(pickle.dumps(loader.dataset))[0]


def test_local_chunks_are_requested_once_and_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = data_sets.write("mds", tmp_path / "data")
    asked: list[tuple[str, set[Any]]] = []
    monkeypatch.setattr(
        fetching, "begin_to_read", lambda path, part: asked.append((path, set(multiprocessing.active_children())))
    )
    before = set(multiprocessing.active_children())
    batches = iter(stream(path, batch_size=12, num_workers=2, seed=17))
    assert len({path for path, _ in asked}) == len(asked) == 32
    assert all(workers <= before for _, workers in asked)
    next(batches)


def test_samples_of_a_damaged_chunk_can_be_left_out(damaged: str) -> None:
    with pytest.warns(UserWarning, match="samples of chunk 1, 6 of 192, are left out: "):
        dataset = StreamDataset(damaged, on_error="skip")
        read = [
            data_sets.numbers(sample) for at in range(0, 192, 12) for sample in dataset.__getitems__(range(at, at + 12))
        ]
    assert read == [number for number in range(192) if number // 6 != 1]
    assert dataset.counters.read()["skipped"] == 1
    with pytest.raises(StreamError, match="All 3 samples of a batch"):
        dataset.__getitems__([6, 7, 8])


def test_a_sample_that_cannot_be_decoded_is_named_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"number": 0}\n{"number": \n{"number": 2}\n')
    with pytest.raises(DamagedData, match=r"a.jsonl is damaged.*sample 1 "):
        StreamDataset(str(tmp_path))[1]
    with pytest.warns(UserWarning, match="Sample 1 is left out: "):
        assert StreamDataset(str(tmp_path), on_error="skip").read(range(3)) == [{"number": 0}, {"number": 2}]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_absent_chunks_of_a_batch_are_fetched_at_the_same_time(tmp_path: Path, on_error: str) -> None:
    path, _ = data_sets.write("mds", tmp_path / "data")
    with serving(latency=0.2) as server:
        server.files = {f"bucket/{file.name}": file.read_bytes() for file in Path(path).iterdir()}
        dataset = StreamDataset(
            "s3://bucket", cache=str(tmp_path / "cache"), storage_options=server.options(), on_error=on_error
        )
        assert sum("list-type" in path for _, path, _, _ in server.log) <= 3  # once for all formats
        began = time.perf_counter()
        batch = dataset.__getitems__(range(0, 96, 6))
        assert time.perf_counter() - began < 2.5  # one after the other they take 3.2 s
        assert [data_sets.numbers(sample) for sample in batch] == list(range(0, 96, 6))
        assert dataset.counters.read()["chunks_fetched"] == server.gets("shard") == 16
        server.rules.append(Rule("00020", 404))
        if on_error == "raise":
            with pytest.raises(StreamError, match=r"Chunk 20 of 32.*does not exist"):
                dataset.__getitems__(range(114, 132, 6))
        else:
            with pytest.warns(UserWarning, match="samples of chunk 20, 6 of 192, are left out"):
                assert list(map(data_sets.numbers, dataset.__getitems__(range(114, 132, 6)))) == [114, 126]
            assert server.gets("00020") == 1


class Broken(Arrow):
    """A format whose decoder fails."""

    def get(self, opened: Any, row: int) -> Any:
        raise KeyError(row)


def test_a_decoder_that_fails_is_named_with_the_sample(tmp_path: Path) -> None:
    path, _ = data_sets.write("arrow", tmp_path / "data")
    with pytest.raises(
        DamagedData, match=r"Sample 7, number 1 of chunk 1 in .*data.arrow, cannot be decoded: KeyError: 1"
    ):
        StreamDataset(path, format=Broken)[7]


def test_samples_are_numbered_as_in_a_list(tmp_path: Path) -> None:
    path, options = data_sets.write("npy", tmp_path / "data")
    dataset = StreamDataset(path, options=options)
    assert data_sets.numbers(dataset[-1]) == 191
    for index in (192, -193):
        with pytest.raises(IndexError, match="of 192"):
            dataset[index]


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "on_error": ({"on_error": "ignore"}, WrongValue, "'raise', 'skip'"),
    "format": ({"format": "mdz"}, Exception, "mds"),
    "option": ({"options": {"lenght": 3}}, WrongType, "length"),
    "sampler": ({"sampler": [1]}, WrongType, "sampler= has no meaning"),
    "window": ({"window": 0}, WrongValue, "window=0 is not a number of chunks"),
    "limit": ({"cache_limit": "much"}, WrongValue, "'much' is not a size"),
    "options": ({"options": ["a"]}, WrongType, r"options=\['a'\] is not a dict"),
    "storage": ({"storage_options": "anon=true"}, WrongType, "storage_options='anon=true' is not a dict"),
    "transform": ({"transform": "pair"}, WrongType, "transform='pair' cannot be called"),
    "loader": ({"num_worker": 2}, WrongType, r"Did you mean num_workers=\?"),
    "shuffle": ({"shuffle": "no"}, WrongType, "shuffle='no' is not a bool"),
    "seed": ({"seed": "a"}, WrongType, "seed='a' is text"),
    "bool": ({"seeded": "yes"}, WrongType, "seeded='yes' is not a bool"),
    "seeded": ({"seeded": True, "on_error": "skip"}, WrongValue, "sample by sample"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained(name: str, tmp_path: Path) -> None:
    path, options = data_sets.write("npy", tmp_path / "data")
    arguments, kind, said = MISTAKES[name]
    with pytest.raises(kind, match=said):
        stream(path, **{"options": options, **arguments})


@pytest.mark.parametrize("path", [3, None, np.zeros(3)])
def test_a_path_is_text(path: Any) -> None:
    with pytest.raises(WrongType, match="is not a path"):
        stream(path)


def test_weights_name_every_stream(tmp_path: Path) -> None:
    path, options = data_sets.write("npy", tmp_path / "data")
    streams = {"web": stream(path, options=options), "code": stream(path, options=options)}
    for how, said in (
        ({}, "neither is given"),
        ({"weights": {"web": 1}, "repeats": {"web": 1}}, "both is given"),
        ({"weights": {"web": 1}}, r"the streams are \['web', 'code'\]"),
        ({"weights": {"web": 1, "code": -1}}, "-1"),
        ({"weights": {"web": 0, "code": 0}}, "All weights are 0"),
        ({"weights": {5: {"web": 1, "code": 1}}}, "The first weights hold from sample 5"),
        ({"repeats": {"web": 1, "code": 0.5}}, "Write an int"),
        ({"repeats": {"web": 1, "code": 1}, "epoch_size": 4}, "decides how many samples"),
    ):
        with pytest.raises(WrongValue, match=said):
            mix(streams, **how)
    with pytest.raises(WrongType, match="mix takes streams by name"):
        mix([streams["web"]], weights={"web": 1})
    with pytest.raises(WrongType, match="Stream 'web' is list"):
        mix({"web": [1]}, weights={"web": 1})


def test_a_cache_that_is_too_small_is_said_with_the_number(tmp_path: Path) -> None:
    path, _ = data_sets.write("mds:zstd", tmp_path / "data")
    loader = hocket_streaming.stream(
        path, batch_size=16, lanes=4, window=2, cache=str(tmp_path / "cache"), cache_limit=100
    )
    with pytest.warns(UserWarning, match=r"2 × 8 chunks \(lanes × window\)"):
        assert sum(len(batch["number"]) for batch in loader) == 192


def fail(sample: Any) -> Any:
    raise ValueError("boom")


def test_a_transform_that_raises_is_named_with_the_sample(tmp_path: Path) -> None:
    path, options = data_sets.write("npy", tmp_path / "data")
    with pytest.raises(ValueError, match="boom") as caught:
        StreamDataset(path, options=options, transform=fail).read([3])
    assert caught.value.__notes__ == [f"transform= raised this for sample 3 of {path}."]


def test_files_that_were_replaced_are_not_read_from_the_cache(tmp_path: Path) -> None:
    """The same names and sizes, without checksums, and a cache that has the earlier contents."""
    server = StandIn()
    try:
        for number in (1, 2):
            np.save(tmp_path / "x.npy", np.full((4, 2), number))
            server.files["bucket/x.npy"] = (tmp_path / "x.npy").read_bytes()
            dataset = StreamDataset(
                "s3://bucket/x.npy", cache=str(tmp_path / "cache"), storage_options=server.options()
            )
            assert [int(dataset[row][0]) for row in range(4)] == [number] * 4
    finally:
        server.close()


def test_lines_that_were_replaced_are_indexed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    file = tmp_path / "data" / "a.jsonl"
    file.parent.mkdir()
    for number in (1, 2):
        file.write_text(json.dumps({"number": number}) + "\n")
        os.utime(file, ns=(number, number))
        assert StreamDataset(str(file.parent))[0] == {"number": number}


def test_every_iteration_is_another_epoch_until_one_is_set(tmp_path: Path) -> None:
    path, options = data_sets.write("npy", tmp_path / "data")
    loader = stream(path, options=options, batch_size=192, seed=1)
    first, second = (next(iter(loader)).tolist() for _ in range(2))
    assert first != second and sorted(first) == sorted(second)
    loader.batch_sampler.set_epoch(0)
    assert next(iter(loader)).tolist() == first == next(iter(loader)).tolist()

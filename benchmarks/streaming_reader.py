"""Read a data set for some epochs, in a process and an environment of its own: ``streaming_reader.py QUESTION``, in JSON.

The answer is a line of JSON: the samples of each epoch, its seconds, and those until its first batch, counted from before the
data set is made. It imports nothing of hocket's but where hocket is asked for.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

BATCH = 64
Question = dict[str, Any]
#: Seconds after which an epoch is given up.
LIMIT = 25.0


class Rows(Dataset[Any]):
    """Rows of a memory map."""

    def __init__(self, path: str) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return np.array(self.rows[index])


class From:
    """The lists of an order from one of them on, or all: as a resumed run reads them."""

    def __init__(self, order: Any, skip: int) -> None:
        self.order, self.skip = order, skip

    def __iter__(self) -> Iterator[Any]:
        return self.order.after(self.skip)[0]

    def __len__(self) -> int:
        return len(self.order) - self.skip


def memory_map(ask: Question) -> tuple[Any, list[str]]:
    """A memory map with a full shuffle."""
    return DataLoader(Rows(ask["path"]), BATCH, shuffle=True, **_workers()), ["numpy"]


def decoded(sample: Any) -> Any:
    """A sample of Parquet, whose column has bytes, as an array."""
    return {"data": np.frombuffer(bytearray(sample["data"]), np.uint8)}


def hocket(ask: Question) -> tuple[Any, list[str]]:
    """A stream of hocket; with ``ranks``, the part of one of them."""
    import hocket_streaming

    given = {name: ask[name] for name in ("lanes", "window", "cache_limit") if name in ask}
    loader = hocket_streaming.stream(
        ask["path"], batch_size=BATCH, seed=17, cache=ask["cache"], storage_options=ask.get("options"),
        format=(form := ask["path"].rpartition("/")[2]), transform=decoded if form == "parquet" else None, **given,
        **_workers()
    )  # fmt: skip
    if "rank" in ask or "skip" in ask:
        order = hocket_streaming.RankSlice(loader.batch_sampler, ask.get("rank", 0), ask.get("ranks", 1))
        loader = DataLoader(loader.dataset, batch_sampler=From(order, ask.get("skip", 0)), **_workers())
    return loader, ["hocket-streaming"]


def litdata(ask: Question) -> tuple[Any, list[str]]:
    """litdata's loader over its own chunks, or Parquet."""
    import litdata.streaming.downloader
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.item_loader import ParquetLoader

    # Plain http is refused, and no argument allows it.
    litdata.streaming.downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    remote = {"cache_dir": ask["cache"], "storage_options": _boto(ask)} if "options" in ask else {}
    started = _workers()
    if ask["path"].endswith("parquet"):
        remote |= {"item_loader": ParquetLoader(), "transform": decoded}
        started["multiprocessing_context"] = "spawn"  # with Parquet it refuses forked workers
    data = StreamingDataset(ask["path"], shuffle=True, drop_last=False, **remote)
    return StreamingDataLoader(data, batch_size=BATCH, **started), ["litdata"]


def mosaic(ask: Question) -> tuple[Any, list[str]]:
    """mosaicml-streaming's data set over MDS."""
    from streaming import StreamingDataset

    where = {"local": ask["path"]}
    if "options" in ask:
        where = {"remote": ask["path"], "local": ask["cache"]}
        boto = _boto(ask)
        os.environ |= {
            "S3_ENDPOINT_URL": boto["endpoint_url"], "AWS_ACCESS_KEY_ID": boto["aws_access_key_id"],
            "AWS_SECRET_ACCESS_KEY": boto["aws_secret_access_key"], "AWS_DEFAULT_REGION": boto["region_name"],
        }  # fmt: skip
    data = StreamingDataset(**where, shuffle=True, batch_size=BATCH)
    return DataLoader(data, BATCH, **_workers()), ["mosaicml-streaming"]


READERS: dict[str, Callable[[Question], tuple[Any, list[str]]]] = {
    "memory map": memory_map,
    "hocket": hocket,
    "litdata": litdata,
    "mosaic": mosaic,
}


def _workers() -> dict[str, Any]:
    return {"num_workers": 2, "persistent_workers": True}


def _boto(ask: Question) -> dict[str, Any]:
    options = ask["options"]
    return {
        "endpoint_url": options["endpoint_url"], "aws_access_key_id": options["key"],
        "aws_secret_access_key": options["secret"], **options["client_kwargs"],
    }  # fmt: skip


def main() -> None:
    """Answer a question."""
    # Libraries print to stdout; the answer goes to where it was.
    answer, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    del sys.path[0]  # the folder of this file, whose streaming.py has the name of mosaicml-streaming's package
    ask: Question = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if ask["reader"] == "hocket":
        import pyarrow.parquet  # noqa: F401
        import s3fs  # noqa: F401

        import hocket_streaming
        from hocket.plugins import registry

        assert hocket_streaming.stream  # imported when it is first used
        assert registry.choices("shards")  # looked up once in a process
    elif ask["reader"] == "litdata":
        import boto3
        import litdata  # noqa: F401
        import obstore.store  # noqa: F401
    elif ask["reader"] == "mosaic":
        import boto3  # noqa: F401
        import streaming  # noqa: F401
    begin = time.perf_counter()
    loader, names = READERS[ask["reader"]](ask)
    epochs = []
    for epoch in range(ask.get("epochs", 1)):
        start, first, numbers = time.perf_counter() if epoch else begin, 0.0, []
        for batch in loader:
            data = batch["data"] if isinstance(batch, dict) else batch
            first = first or time.perf_counter() - start
            numbers.append(data[:, :8].clone())
            if len(numbers) == ask.get("batches") or time.perf_counter() - start > LIMIT:
                break
        seconds = time.perf_counter() - start
        seen = torch.cat(numbers).contiguous().view(torch.int64).flatten()
        epochs.append({"first": first, "seconds": seconds, "samples": len(seen), "distinct": len(seen.unique())})
    versions = {name: importlib.metadata.version(name) for name in ("torch", *names)}
    answer.write(json.dumps({"epochs": epochs, "versions": versions}) + "\n")
    answer.flush()
    os._exit(0)  # some libraries end slowly


if __name__ == "__main__":
    main()

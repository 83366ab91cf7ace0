"""The arguments of ``hocket data``."""

from __future__ import annotations

import argparse
import os


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a sub-parser for each of the five actions. Paths may be URLs that fsspec knows."""
    actions = parser.add_subparsers(dest="action", required=True)
    index = actions.add_parser("index", help="read data once, and store an index of its chunks beside it")
    check = actions.add_parser("check", help="read, verify and decode every chunk; exit code 1 if any is damaged")
    check.add_argument("--share", type=float, default=1.0, help="check a part of the chunks, such as 0.01; default: 1")
    check.add_argument("--threads", type=int, default=8, help="chunks that are read at the same time; default: 8")
    plan = actions.add_parser("plan", help="print bytes, cache and rates of a run before it is launched")
    _plan(plan)
    for action in (index, check, plan):
        action.add_argument("paths", nargs="+", metavar="PATH", help="a folder, file or URL of a data set")
        _data(action)
    write = actions.add_parser("write", help="write a data set in chunks, shuffled; continues where it was killed")
    write.add_argument("source", help="module:function that yields dicts, or a folder, file or URL")
    convert = actions.add_parser("convert", help="write a data set of any format that is read in another one, shuffled")
    convert.add_argument("source", metavar="PATH", help="a folder, file or URL of a data set")
    for action in (write, convert):
        action.add_argument("target", help="a folder or URL that has no data set")
        _write(action)
        _data(action)
    write.add_argument(
        "--parts", type=int, default=0, help="parts of a function with the arguments part and parts; default: 64"
    )


def _data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source-format", default="", metavar="NAME", help="the format, if several would serve")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the format, such as length=2048"
    )
    parser.add_argument(
        "--storage-option", action="append", default=[], metavar="NAME=VALUE", help="of fsspec, such as anon=true"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machines", type=int, default=1, help="default: 1")
    parser.add_argument("--ranks", type=int, help="ranks of all machines; their number does not change what is fetched")
    parser.add_argument("--global-batch", type=int, default=64, metavar="SAMPLES", help="default: 64")
    parser.add_argument("--lanes", type=int, help="default: as hocket_streaming.stream")
    parser.add_argument("--window", type=int, default=4, metavar="CHUNKS", help="default: 4")
    parser.add_argument("--cache-limit", default="20GB", metavar="SIZE", help="of a machine; default: 20GB")
    parser.add_argument(
        "--bandwidth",
        default="1.25GB/s",
        metavar="RATE",
        help="bytes or bits (10Gbit/s) of a machine; default: 1.25GB/s",
    )
    parser.add_argument("--latency", type=float, default=0.03, metavar="SECONDS", help="of a request; default: 0.03")
    parser.add_argument("--requests", type=int, default=16, help="requests that a machine makes at a time; default: 16")


def _write(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="mds", choices=("mds", "parquet", "tokens"), help="default: mds")
    parser.add_argument(
        "--columns", action="append", default=[], metavar="NAME=ENCODING", help="encodings of MDS, such as image=jpeg"
    )
    parser.add_argument("--no-shuffle", action="store_true", help="keep the order of the source")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle; default: 0")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; default: one for each CPU")
    parser.add_argument("--memory", default="1GiB", metavar="SIZE", help="of all processes, about; default: 1GiB")
    parser.add_argument(
        "--size-limit", metavar="SIZE", help="of a file; default: 64MiB for MDS, 256MiB for other formats"
    )
    parser.add_argument("--group", default="8MiB", metavar="SIZE", help="of a row group of Parquet; default: 8MiB")
    parser.add_argument("--compression", default="", help="zstd, or zstd:7 with a level; default: none")
    parser.add_argument("--hashes", default="xxh64", help="checksums of MDS: xxh64,sha1,sha256; default: xxh64")
    parser.add_argument(
        "--tokenizer", default="", help="of tokens: a tokenizer.json of the library tokenizers, or byte"
    )
    parser.add_argument("--length", type=int, default=0, metavar="TOKENS", help="of a row of tokens")
    parser.add_argument("--work", metavar="FOLDER", help="a local folder for the runs that are sorted")

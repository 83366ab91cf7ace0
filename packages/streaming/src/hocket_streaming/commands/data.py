"""``hocket data index | check | plan | write | convert``: data sets in chunks, before they are trained on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hocket.basics.safe_files import printable
from hocket.errors import Mistake, Setting, WrongFile, WrongValue, rendered
from hocket.hookspecs.command import Command
from hocket_cli.exit_codes import ExitCode
from hocket_streaming.commands.data_arguments import add_arguments

if TYPE_CHECKING:
    from hocket_streaming.shards import Shards
    from hocket_streaming.writing.checking import Checked
    from hocket_streaming.writing.planning import Plan


def run(args: argparse.Namespace) -> int:
    """Run the action; 1 if `check` found damage. Errors name settings as they are typed."""
    try:
        return _run(args)
    except Mistake as error:
        error.args = (rendered(error.marked or str(error), _typed),)
        raise
    except OSError as error:
        raise WrongFile(f"{error}. Check the path, its rights and the disk.") from error


def _typed(setting: Setting) -> str:
    return f"--{setting.name.replace('_', '-')} {setting.value}" if setting.name else setting.value


def _run(args: argparse.Namespace) -> int:
    if args.action in ("write", "convert"):
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, *_: print(f"hocket data: {message}", file=sys.stderr)
            return _write(args)
    reports = []
    action = {"index": _index, "check": _check, "plan": _plan}[args.action]
    for path in args.paths:
        reports.append(report := {"path": path, **action(path, args)})
        if not args.json:
            print(printable(report.pop("text")), flush=True)
    if args.json:
        print(json.dumps([{key: value for key, value in each.items() if key != "text"} for each in reports], indent=1))
    return ExitCode.FAILED if any(each.get("damages") for each in reports) else ExitCode.DONE


def _shards(path: str, args: argparse.Namespace) -> Shards:
    from hocket_streaming import formats
    from hocket_streaming.store.files import Files

    return formats.find(Files(path, _pairs(args.storage_option)), args.source_format or None, **_pairs(args.option))


def _index(path: str, args: argparse.Namespace) -> dict[str, Any]:
    from hocket_streaming import indexes
    from hocket_streaming.sizes import counted, shown

    shards = _shards(path, args)
    if list(shards.files.names()) == [os.path.basename(shards.files.path)]:
        raise WrongValue(f"{path} is one file, and an index is stored beside files. Give the folder of this file.")
    chunks = indexes.indexed(shards, checksums=True)
    samples, size = (sum(getattr(chunk, name) for chunk in chunks) for name in ("samples", "size"))
    report = {"index": indexes.store(shards, chunks), "chunks": len(chunks), "samples": samples, "bytes": size}
    text = f"{report['index']}: {counted(len(chunks), 'chunk')}, {counted(samples, 'sample')}, {shown(size)}"
    return {**report, "text": text}


def _check(path: str, args: argparse.Namespace) -> dict[str, Any]:
    from hocket_streaming import indexes
    from hocket_streaming.writing.checking import check
    from hocket_streaming.writing.progress import Progress

    shards = _shards(path, args)
    found = check(shards, indexes.indexed(shards), args.share, args.threads, Progress(not args.json))
    report = {**dataclasses.asdict(found), "damages": [each._asdict() for each in found.damages]}
    return {**report, "text": _checked(path, found)}


def _checked(path: str, found: Checked) -> str:
    from hocket_streaming.sizes import counted, shown

    read = f"{counted(found.chunks, 'chunk')}, {counted(found.samples, 'sample')}, {shown(found.bytes)}"
    lines = [f"{path}: {read}: {len(found.damages) or 'none'} damaged"]
    for each in found.damages:
        lines.append(f"  chunk {each.chunk} (samples {each.first} to {each.last}) of {each.url}: {each.cause}")
    if found.unverified:
        lines.append(
            f"  without a checksum: {found.unverified:,}, in which wrong bytes may go unseen. hocket data index adds checksums."
        )
    return "\n".join(lines)


def _plan(path: str, args: argparse.Namespace) -> dict[str, Any]:
    from hocket_streaming import indexes
    from hocket_streaming.sizes import bandwidth_of, size_of
    from hocket_streaming.writing.planning import Network, Sized, plan

    if args.ranks is not None and (args.machines < 1 or args.ranks < 1 or args.ranks % args.machines):
        raise WrongValue(f"--ranks {args.ranks} is not a multiple of --machines {args.machines}. Write one that is.")
    chunks = indexes.indexed(_shards(path, args))
    samples, fetched, kept = ([getattr(chunk, name) for chunk in chunks] for name in ("samples", "size", "kept"))
    found = plan(
        Sized(samples, fetched, kept),
        machines=args.machines,
        global_batch=args.global_batch,
        lanes=args.lanes,
        window=args.window,
        cache_limit=size_of(args.cache_limit),
        network=Network(bandwidth_of(args.bandwidth), args.latency, args.requests),
    )
    traffic = {key: getattr(found, key)._asdict() for key in ("machine", "all", "restart")}
    return {**dataclasses.asdict(found), **traffic, "text": f"{path}\n{_planned(found)}"}


def _planned(found: Plan) -> str:
    from hocket_streaming.sizes import shown

    rows = {
        "data": f"{found.samples:,} samples, {found.chunks:,} chunks, {shown(found.bytes)}; the largest {shown(found.largest)}",
        "order": f"global batches of {found.global_batch:,}, {found.lanes:,} lanes × a window of {found.window}",
        "fetched in an epoch": f"{shown(found.machine.bytes)} in {found.machine.gets:,} requests by a machine; by all "
        f"{found.machines:,}: {shown(found.all.bytes)}, {found.all.bytes / found.bytes:.2f} × the data",
        "cache of a machine": f"{shown(found.cache)}: 2 × {found.lanes_of_machine} lanes × {found.window} × the largest chunk",
        "limit of the network": f"{found.samples_per_second:,.0f} samples/s by all machines",
        "shuffle": f"χ² per degree of freedom {found.quality:.2f} for data sorted by class; 1 if the writer shuffled them",
        "restart": f"{shown(found.restart.bytes)} by a machine until the first batch: {found.seconds_to_restart:.1f} s",
    }
    if not found.cache_suffices:
        rows["warning"] = (
            "the limit of the cache is less than that: chunks are fetched again and again. Raise --cache-limit."
        )
    return "\n".join(f"  {name:<21} {text}" for name, text in rows.items())


def _write(args: argparse.Namespace) -> int:
    from hocket_streaming.sizes import counted, shown, size_of
    from hocket_streaming.writing.progress import Progress
    from hocket_streaming.writing.write import write

    try:
        done = write(
            args.source,
            args.target,
            format=args.format,
            columns=_texts(args.columns),
            shuffle=not args.no_shuffle,
            seed=args.seed,
            workers=args.workers,
            memory=size_of(args.memory),
            size_limit=None if args.size_limit is None else size_of(args.size_limit),
            group=size_of(args.group),
            compression=args.compression,
            hashes=[name for name in args.hashes.split(",") if name],
            tokenizer=args.tokenizer,
            length=args.length,
            parts=getattr(args, "parts", 0),
            source_format=args.source_format,
            source_options=_pairs(args.option),
            work=args.work,
            storage_options=_pairs(args.storage_option),
            progress=Progress(not args.json),
        )
    except KeyboardInterrupt as error:
        print(printable(" ".join(["hocket data: interrupted.", *getattr(error, "__notes__", ())])), file=sys.stderr)
        raise KeyboardInterrupt("interrupted") from None
    if args.json:
        print(json.dumps(dataclasses.asdict(done), indent=1))
    else:
        text = f"{counted(done.samples, 'sample')} in {counted(done.files, 'file')}, {shown(done.bytes)}, {done.seconds:.1f} s"
        print(printable(f"{done.path}: {text}"))
    return ExitCode.DONE


def _texts(pairs: Iterable[str]) -> dict[str, str]:
    texts = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise WrongValue(f"{pair!r} is not NAME=VALUE. Write such as length=2048.")
        texts[name] = value
    return texts


def _pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """Return values by name, read as JSON where they are."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {name: value(text) for name, text in _texts(pairs).items()}


command = Command("Data sets in chunks: index, check, plan, write, convert", add_arguments, run)

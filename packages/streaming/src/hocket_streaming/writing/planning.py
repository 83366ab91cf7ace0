"""What a run will fetch, by the same code that orders its samples: bytes, requests, cache, rates, and what a restart costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.errors import WrongValue
from hocket_streaming.order.lanes import Block, Pass, Passes
from hocket_streaming.order.sampler import GlobalOrder


class Sized(NamedTuple):
    """A data set of which only its chunks are known.

    Attributes:
        sizes: samples of each chunk.
        fetched: bytes of each chunk as it is stored.
        kept: bytes that it takes in the cache.
        identity: of the data set; the order depends on it.
    """

    sizes: Sequence[int]
    fetched: Sequence[int]
    kept: Sequence[int]
    identity: str = ""

    def ahead(self, chunks: Sequence[int], at_once: int) -> None:
        """Fetch nothing."""


@dataclass(frozen=True, slots=True)
class Network:
    """What lies between a machine and a store.

    Attributes:
        bandwidth: bytes a second of a machine.
        latency: seconds until the first byte of a request.
        requests: how many a machine has under way.
    """

    bandwidth: float = 1.25e9
    latency: float = 0.03
    requests: int = 16

    def seconds(self, gets: int, size: float) -> float:
        """Return how long requests take: their latencies in turns, and all bytes over the one line."""
        return -(-gets // self.requests) * self.latency + size / self.bandwidth


class Traffic(NamedTuple):
    """Requests for chunks, and the bytes of them."""

    gets: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What `plan` computes for an epoch; machines are compared, and the one with the most counts.

    Attributes:
        samples, chunks, bytes: of the data set; bytes as they are stored.
        largest: bytes of the largest chunk in the cache.
        lanes, window, global_batch, machines: of the order.
        lanes_of_machine: most lanes of a machine.
        machine: most requests and bytes of a machine.
        all: requests and bytes of all machines.
        cache: bytes of cache that a machine needs: 2 × its lanes × window × the largest chunk, at most the data.
        cache_suffices: whether the limit is as large. If not, more is fetched than is counted here.
        samples_per_second: the limit of the network for all machines together.
        quality: χ² per degree of freedom of the classes in a global batch of data sorted by class, 1 for a full shuffle.
        restart: most requests and bytes of a machine until the first batch after a restart in mid-epoch, with empty caches.
        seconds_to_restart: of these.
    """

    samples: int
    chunks: int
    bytes: int
    largest: int
    lanes: int
    window: int
    global_batch: int
    machines: int
    lanes_of_machine: int
    machine: Traffic
    all: Traffic
    cache: int
    cache_suffices: bool
    samples_per_second: float
    quality: float
    restart: Traffic
    seconds_to_restart: float


def plan(
    data: Sized,
    *,
    machines: int = 1,
    global_batch: int = 64,
    lanes: int | None = None,
    window: int = 4,
    cache_limit: int = 20_000_000_000,
    network: Network | None = None,
    seed: int = 0,
) -> Plan:
    """Return what an epoch fetches on each machine, and what a restart in its middle costs.

    Args:
        data: the data set.
        machines: with as many ranks each, in the order of their ranks.
        global_batch: samples.
        lanes, window: as of `hocket_streaming.stream`.
        cache_limit: bytes of the cache of a machine.
        network: between a machine and the store.
        seed: of the order.

    Raises:
        WrongValue: a number is not possible.

    Example:
        >>> from hocket_streaming.writing.planning import Sized, plan
        >>> found = plan(Sized([500] * 40, [10**6] * 40, [10**6] * 40), machines=2, global_batch=64, lanes=8, window=2)
        >>> found.lanes_of_machine, found.cache, found.quality, found.machine.gets
        (4, 16000000, 5.0, 20)
    """
    network = network or Network()
    least = {"machines": (machines, 1), "cache_limit": (cache_limit, 0), "bandwidth": (network.bandwidth, 1)}
    least |= {"global_batch": (global_batch, 1), "latency": (network.latency, 0), "requests": (network.requests, 1)}
    for name, (value, lowest) in least.items():
        if value < lowest:
            raise WrongValue(f"«{name}={value}» is too small. Write at least {lowest}.")
    order = GlobalOrder([data], global_batch, seed=seed, lanes=lanes, window=window)
    passes = Passes(data.sizes, seed, data.identity, order.lanes, window)
    one = passes.number(0)
    fetched, kept, largest = np.asarray(data.fetched), np.asarray(data.kept), max(data.kept)
    of_machines = [order.of_rank(machine, machines).lanes_of_rank() for machine in range(machines)]
    most = max(map(len, of_machines))
    needed = min(2 * most * window * largest, sum(data.kept))
    traffic = [_epoch(one, each, fetched, kept, max(cache_limit, needed)) for each in of_machines]
    worst = max(traffic, key=lambda each: each.bytes)
    middle = len(order) // 2 * global_batch
    restart = max(first_batch(passes, of_machines, fetched, middle, global_batch), key=lambda each: each.bytes)
    total = Traffic(sum(each.gets for each in traffic), sum(each.bytes for each in traffic))
    return Plan(
        samples=one.samples,
        chunks=len(data.sizes),
        bytes=int(fetched.sum()),
        largest=largest,
        lanes=order.lanes,
        window=window,
        global_batch=global_batch,
        machines=machines,
        lanes_of_machine=most,
        machine=worst,
        all=total,
        cache=needed,
        cache_suffices=cache_limit >= needed,
        samples_per_second=one.samples / network.seconds(*worst),
        quality=1 + global_batch / (order.lanes * window),
        restart=restart,
        seconds_to_restart=network.seconds(*restart),
    )


def _epoch(one: Pass, lanes: range, fetched: NDArray[np.int64], kept: NDArray[np.int64], limit: int) -> Traffic:
    """Return what a machine fetches in an epoch.

    Two lanes share the chunk at their border: one begins with it and the other ends with it, so it is fetched twice unless the
    cache holds all that the machine reads.
    """
    chunks: list[int] = []
    for lane in range(lanes.start, min(lanes.stop, one.lanes)):
        first, last = one.block(lane, 0), one.block(lane, one.length(lane) - 1)
        chunks += one.chunks(Block(0, 0, one.length(lane), range(first.places.start, last.places.stop)))
    distinct = list(dict.fromkeys(chunks))
    read = distinct if kept[distinct].sum() <= limit else chunks
    return Traffic(len(read), int(fetched[read].sum()))


def first_batch(
    passes: Passes, of_machines: Sequence[range], fetched: NDArray[np.int64], position: int, global_batch: int
) -> list[Traffic]:
    """Return what each machine fetches, with an empty cache, for the global batch at a position."""
    starts = np.concatenate([[0], np.cumsum(np.asarray(passes.sizes, dtype=np.int64))])
    stop = min(position + global_batch, passes.samples * (position // passes.samples + 1))
    of_lanes = [
        set((np.searchsorted(starts, np.concatenate(pieces), "right") - 1).tolist()) if pieces else set()
        for pieces in passes.between(position, stop)
    ]
    wanted = [set().union(*(of_lanes[lane] for lane in lanes if lane < len(of_lanes))) for lanes in of_machines]
    return [Traffic(len(each), int(fetched[sorted(each)].sum())) for each in wanted]

"""Simulate 1,000 machines that train on 100 TB, with the code that orders samples.

``python benchmarks/streaming_simulation.py`` prints the tables of docs/explanation/streaming.md. It takes a minute or two
and 2 GB of memory.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from hocket_streaming.order.lanes import Passes
from hocket_streaming.order.sampler import GlobalOrder
from hocket_streaming.sizes import shown
from hocket_streaming.writing.planning import Network, Plan, Sized, Traffic, first_batch, plan

MACHINES, BATCH = 1000, 16_000
AFTER = [500, 750, 999, 2000]
ORDERS = ((None, 4), (1000, 4), (4000, 1), (4000, 4), (8000, 2))


@dataclass(frozen=True, slots=True)
class Restart:
    """What a restart in mid-epoch costs.

    Attributes:
        machines: after it.
        first: most requests and bytes of a machine until the first batch, with empty caches.
        seconds: of these: the time that is lost.
        again: bytes that all machines fetch again for the chunks that were in use, with empty caches.
        extra: bytes of an epoch beyond one copy of the data, as a part of the data.
    """

    machines: int
    first: Traffic
    seconds: float
    again: int
    extra: float


def simulated(size: int, chunk: int, samples: int) -> Sized:
    """Return a data set of ``size`` bytes in chunks of ``chunk`` bytes with ``samples`` samples each."""
    count = -(-size // chunk)
    return Sized([samples] * count, [chunk] * count, [chunk] * count, "simulated")


def simulate(
    data: Sized,
    machines: int,
    after: list[int],
    *,
    global_batch: int,
    lanes: int | None,
    window: int,
    network: Network | None = None,
    seed: int = 0,
) -> tuple[Plan, list[Restart]]:
    """Return the plan for a number of machines, and what restarts in mid-epoch with other numbers of them cost.

    Args:
        data: the data set.
        machines: before the restart.
        after: numbers of machines after it.
        global_batch, lanes, window, network, seed: as of `plan`.

    Raises:
        WrongValue: a number is not possible.
    """
    network = network or Network()
    options = {"global_batch": global_batch, "lanes": lanes, "window": window, "network": network, "seed": seed}
    found = plan(data, machines=machines, **options)  # type: ignore[arg-type]
    order = GlobalOrder([data], global_batch, seed=seed, lanes=lanes, window=window)
    passes = Passes(data.sizes, seed, data.identity, order.lanes, window)
    position = len(order) // 2 * global_batch
    fetched = np.asarray(data.fetched)
    restarts = []
    for number in after:
        of_machines = [order.of_rank(machine, number).lanes_of_rank() for machine in range(number)]
        first = max(
            first_batch(passes, of_machines, fetched, position, global_batch), key=lambda each: network.seconds(*each)
        )
        again = sum(int(fetched[passes.chunks_after(position, each, 1)].sum()) for each in of_machines)
        later = plan(data, machines=number, **options)  # type: ignore[arg-type]
        restarts.append(Restart(number, first, network.seconds(*first), again, later.all.bytes / later.bytes - 1))
    return found, restarts


def table(rows: list[list[str]]) -> str:
    """Return rows as a table of Markdown; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--terabytes", type=float, default=100.0)
    size = parser.parse_args().terabytes * 1e12
    data = simulated(int(size), 64_000_000, 640)
    network = Network(bandwidth=1.25e9, latency=0.03, requests=16)
    epochs = [["lanes × window", "fetched ÷ data", "requests of a machine", "its cache", "χ² if sorted", "order, s"]]
    restarts = [["lanes × window", *(f"{number:,} machines" for number in (MACHINES, *AFTER))]]
    for lanes, window in ORDERS:
        order = GlobalOrder([data], BATCH, seed=0, lanes=lanes, window=window)
        began = time.perf_counter()
        passes = Passes(data.sizes, 0, data.identity, order.lanes, window)
        position = len(order) // 2 * BATCH
        passes.between(position, position + BATCH)
        seconds = time.perf_counter() - began
        found, after = simulate(data, MACHINES, AFTER, global_batch=BATCH, lanes=lanes, window=window, network=network)
        name = f"{found.lanes:,} × {window}" + (" (default)" if lanes is None else "")
        epochs.append(
            [
                name,
                f"{found.all.bytes / found.bytes:.3f}",
                f"{found.machine.gets:,}",
                shown(found.cache),
                f"{found.quality:.1f}",
                f"{seconds:.1f}",
            ]
        )
        same = f"{found.seconds_to_restart:.1f} s, {found.all.bytes / found.bytes:.2f} ×"
        restarts.append([name, same, *(f"{each.seconds:.1f} s, {1 + each.extra:.2f} ×" for each in after)])
    print(table(epochs), table(restarts), sep="\n\n")


if __name__ == "__main__":
    main()

"""Simulate 1,000 machines that train on 100 TB, with the code that orders samples.

``python benchmarks/streaming_simulation.py`` prints the tables of docs/explanation/streaming.md. It takes a minute or two
and 2 GB of memory.
"""

from __future__ import annotations

import argparse
import time

from hocket_streaming.order.lanes import Passes
from hocket_streaming.order.sampler import GlobalOrder
from hocket_streaming.writing.planning import Network
from hocket_streaming.writing.simulate import simulate, simulated
from hocket_streaming.writing.sizes import shown

MACHINES, BATCH = 1000, 16_000
AFTER = [500, 750, 999, 2000]
ORDERS = ((None, 4), (1000, 4), (4000, 1), (4000, 4), (8000, 2))


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

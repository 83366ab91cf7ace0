"""A simulation of large runs with the code that orders samples: traffic, cache, and restarts with other numbers of machines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket_streaming.order.lanes import Passes
from hocket_streaming.order.sampler import GlobalOrder
from hocket_streaming.writing.planning import Network, Plan, Sized, Traffic, first_batch, plan


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
    """Return a data set of ``size`` bytes in chunks of ``chunk`` bytes with ``samples`` samples each.

    Example:
        >>> from hocket_streaming.writing.simulate import simulated
        >>> len(simulated(10**9, 10**6, 50).sizes)
        1000
    """
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

    Example:
        >>> from hocket_streaming.writing.simulate import simulate, simulated
        >>> data = simulated(10**9, 10**6, 50)
        >>> found, (restart,) = simulate(data, 8, [4], global_batch=64, lanes=16, window=4)
        >>> found.all.bytes / found.bytes, restart.first.gets
        (1.0, 13)
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

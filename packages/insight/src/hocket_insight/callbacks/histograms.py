"""Histograms that are counted on the device and passed to the loggers when a logging interval ends."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.basics.dtensors import local, sum_over_shards
from hocket.state.state import State

#: Powers of two at the edges of the bins: magnitudes from 2**-24 to 2**16, twice, for negative and positive values. Bins that
#: depend on no value can be added up over microbatches and ranks, and show magnitudes that vanish or explode.
_LOW, _HIGH = -24, 16
_SIDE = _HIGH - _LOW
EDGES = [-(2.0**k) for k in range(_HIGH, _LOW - 1, -1)] + [2.0**k for k in range(_LOW, _HIGH + 1)]


@torch.no_grad()
def histogram(tensor: Tensor) -> Tensor:
    """Count the elements between each two of :data:`EDGES`, as int64 on the tensor's device; nothing waits for it.

    A bin of positive values includes its lower edge, one of negative values its upper edge. The bin in the middle holds zeros
    and magnitudes below 2**-24; the outer ones hold all larger magnitudes. NaN is not counted. Of a sparse tensor the stored
    elements are counted. Of a DTensor, the elements of
    all shards are counted, by a reduction in which all ranks of its mesh take part.
    """
    values = local(tensor).detach()
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    values = values.reshape(-1)
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    exponent = torch.frexp(values).exponent  # 2**(exponent - 1) <= |value| < 2**exponent
    side = torch.where(values.isinf(), _SIDE, (exponent - _LOW).clamp(0, _SIDE))
    # Zeros have exponent 0.
    side = torch.where(values.abs() < 2.0**_LOW, 0, side)
    index = _SIDE + torch.where(values < 0, -side, side)
    counts = torch.zeros(2 * _SIDE + 1, dtype=torch.int64, device=values.device)
    counts.scatter_add_(0, index.long().clamp(0, 2 * _SIDE), (~values.isnan()).long())
    return sum_over_shards(counts, tensor)


class Histograms:
    """Counts by name that wait on their device until :meth:`flush`, in the hook ``log_metrics``."""

    def __init__(self) -> None:
        self._counts: dict[str, Tensor] = {}

    def replace(self, name: str, counts: Tensor) -> None:
        """Set the counts of a name; of several within a logging interval the last ones are logged."""
        self._counts[name] = counts

    def flush(self, state: State) -> None:
        """Pass all to the loggers, with one transfer per device."""
        waiting, self._counts = self._counts, {}
        for device in {counts.device for counts in waiting.values()}:
            here = {name: counts for name, counts in waiting.items() if counts.device == device}
            for name, counts in zip(here, torch.stack(list(here.values())).tolist(), strict=True):
                first = next(i for i, each in enumerate(counts) if each) if any(counts) else _SIDE
                last = len(counts) - next((i for i, each in enumerate(reversed(counts)) if each), _SIDE)
                state.bus.log_histogram(state, name, counts[first:last], EDGES[first : last + 1])

"""Several streams as one, by weights or repeats: `mix`."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from hocket.errors import WrongType, WrongValue
from hocket_streaming.dataset import StreamDataset
from hocket_streaming.loader import StreamLoader
from hocket_streaming.order.mixing import Mixing, Stage
from hocket_streaming.order.sampler import GlobalOrder


def mix(
    streams: Mapping[str, StreamLoader],
    *,
    weights: Mapping[str, float] | Mapping[int, Mapping[str, float]] | None = None,
    repeats: Mapping[str, int] | None = None,
    batch_size: int = 1,
    epoch_size: int | None = None,
    seed: int | None = None,
    lanes: int | None = None,
    window: int = 4,
    drop_last: bool = False,
    **loader: Any,
) -> StreamLoader:
    """Return a loader over several streams, whose samples are mixed in each global batch.

    Of the first t samples of a run each stream has its share, rounded by the method of Webster and Sainte-Laguë. A stream that
    ends begins another pass, shuffled anew.

    Args:
        streams: by name; of each its data is used, not its order or its loader's arguments.
        weights: of each name; only their ratios count. Or, for a curriculum, weights by the number of samples of the run from
            which they hold, the first of which is 0.
        repeats: instead of weights, how often each stream is read in an epoch, which has as many samples.
        epoch_size: samples in an epoch with weights; None for as many as all streams have.
        batch_size, seed, lanes, window, drop_last, loader: as of `stream`.

    Raises:
        ValueError: weights and repeats are both given or both missing, or their names or numbers are not possible.

    Example:
        >>> import numpy, tempfile
        >>> import hocket_streaming
        >>> numpy.save(web := tempfile.mkdtemp() + "/x.npy", numpy.zeros((8, 2)))
        >>> numpy.save(code := tempfile.mkdtemp() + "/x.npy", numpy.ones((4, 2)))
        >>> streams = {"web": hocket_streaming.stream(web), "code": hocket_streaming.stream(code)}
        >>> loader = hocket_streaming.mix(streams, weights={"web": 3, "code": 1}, batch_size=4, seed=17)
        >>> [batch[:, 0].mean().item() for batch in loader]
        [0.25, 0.25, 0.25]
    """
    if (weights is None) == (repeats is None):
        given = "neither" if weights is None else "both"
        raise WrongValue(
            f"Of «weights=» and «repeats=» {given} is given. Write one, such as weights={{'web': 3, 'code': 1}}."
        )
    if not isinstance(streams, Mapping) or not streams:
        raise WrongType("mix takes streams by name. Write mix({'web': stream(…), 'code': stream(…)}, weights={…}).")
    datasets = [_only(name, given) for name, given in streams.items()]
    if repeats is not None:
        stages, epoch_size = _of_repeats(repeats, streams, datasets, epoch_size)
    else:
        stages = _of_weights(weights, streams)
    order = GlobalOrder(
        datasets, batch_size, seed=seed, lanes=lanes, window=window, drop_last=drop_last, mixing=Mixing(stages),
        samples=epoch_size,
    )  # fmt: skip
    return StreamLoader(datasets, order, **loader)


def _of_repeats(
    repeats: Any, streams: Mapping[str, Any], datasets: list[StreamDataset], epoch_size: int | None
) -> tuple[list[Stage], int]:
    """Return the only stage, and the samples of an epoch."""
    if epoch_size is not None:
        raise WrongValue("«repeats=» decides how many samples an epoch has. Omit «epoch_size=», or write weights=.")
    shares = _shares(repeats, streams, "repeats", whole=True)
    counts = [int(share) * len(dataset) for share, dataset in zip(shares, datasets, strict=True)]
    return [Stage(0, tuple(map(Fraction, counts)))], sum(counts)


def _of_weights(weights: Any, streams: Mapping[str, Any]) -> list[Stage]:
    by_position = dict(weights) if isinstance(next(iter(weights), ""), int) else {0: weights}
    stages = [Stage(_position(at), _shares(now, streams, "weights")) for at, now in sorted(by_position.items())]
    if stages[0].begin:
        raise WrongValue(
            f"The first weights hold from sample {stages[0].begin}, so those before it are missing. Add 0: {{…}}."
        )
    return stages


def _only(name: str, given: object) -> StreamDataset:
    if not isinstance(given, StreamLoader) or len(given.streams) != 1:
        raise WrongType(f"Stream {name!r} is {type(given).__name__}. Give what hocket_streaming.stream(…) returns.")
    return given.streams[0]


def _position(at: object) -> int:
    if isinstance(at, bool) or not isinstance(at, int) or at < 0:
        raise WrongValue(
            f"Weights hold from a number of samples on, but {at!r} is none. Write such as 1_000_000: {{…}}."
        )
    return at


def _shares(given: Any, streams: Mapping[str, Any], what: str, whole: bool = False) -> tuple[Fraction, ...]:
    """Return the weight of each stream. Raises ValueError, which names what is missing, unknown or not a number."""
    if not isinstance(given, Mapping) or given.keys() != streams.keys():
        names = list(given) if isinstance(given, Mapping) else given
        raise WrongValue(
            f"«{what}=» names {names!r}, but the streams are {list(streams)}. Give a number for each stream."
        )
    shares = []
    for name in streams:
        value = given[name]
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < float("inf")
            or (whole and value % 1)
        ):
            raise WrongValue(
                f"«{what}={{{name!r}: {value!r}}}» is not possible. Write {'an int' if whole else 'a number'} of 0 or more."
            )
        shares.append(Fraction(str(value)))
    if not any(shares):
        raise WrongValue(f"All {what} are 0, so there is no sample. Give one stream more.")
    return tuple(shares)

"""The position of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from hocket.basics.time import FIELDS, Time, TimeError, Unit
from hocket.errors import WrongValue


@dataclass(slots=True)
class Timestamp:
    """The completed part of training. The loop updates it in place; :meth:`copy` it to keep a value.

    Counts are over all ranks and are Python integers, so they cannot overflow. Seconds are wall-clock seconds spent on
    training batches: in total, within the epoch, and of the latest batch.

    Example:
        >>> import hocket
        >>> timestamp = hocket.Timestamp()
        >>> timestamp.next_batch(samples=32, tokens=0, seconds=0.5)
        >>> timestamp.batch, timestamp.sample, timestamp.get("sp")
        (1, 32, Time(32, 'sp'))
    """

    epoch: int = 0
    batch: int = 0
    sample: int = 0
    token: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    batch_seconds: float = 0.0

    def next_batch(self, samples: int, tokens: int, seconds: float) -> None:
        """Count one batch of ``samples`` and ``tokens`` over all ranks that took ``seconds``."""
        self.batch += 1
        self.sample += samples
        self.token += tokens
        self.batch_in_epoch += 1
        self.sample_in_epoch += samples
        self.token_in_epoch += tokens
        self.seconds += seconds
        self.epoch_seconds += seconds
        self.batch_seconds = seconds

    def next_epoch(self) -> None:
        """Count one epoch, and reset the counts within the epoch."""
        self.epoch += 1
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Reset the counts within the epoch, without counting an epoch."""
        self.batch_in_epoch = self.sample_in_epoch = self.token_in_epoch = 0
        self.epoch_seconds = 0.0

    def become(self, other: Timestamp) -> None:
        """Copy all values of ``other`` into this timestamp."""
        self.epoch = other.epoch
        self.batch = other.batch
        self.sample = other.sample
        self.token = other.token
        self.batch_in_epoch = other.batch_in_epoch
        self.sample_in_epoch = other.sample_in_epoch
        self.token_in_epoch = other.token_in_epoch
        self.seconds = other.seconds
        self.epoch_seconds = other.epoch_seconds
        self.batch_seconds = other.batch_seconds

    def copy(self) -> Timestamp:
        """Return a new timestamp with the same values."""
        copied = Timestamp()
        copied.become(self)
        return copied

    def count(self, unit: Unit) -> int | float:
        """Return the number of completed epochs, batches, samples or tokens, or the seconds, as a plain number.

        Raises TimeError for ``dur``, because a timestamp does not know the duration of the run.
        """
        field = FIELDS.get(unit)
        if field is None:
            raise TimeError(
                "A timestamp does not know the completed fraction of the run; call State.elapsed() instead."
            )
        value: int | float = getattr(self, field)
        return value

    def get(self, unit: Unit) -> Time:
        """Return :meth:`count` as a Time.

        Example:
            >>> import hocket
            >>> str(hocket.Timestamp(batch=120).get("ba"))
            '120ba'
        """
        return Time(self.count(Unit(unit)), Unit(unit))

    def state_dict(self) -> dict[str, int | float]:
        """Return all values by name."""
        return {name: getattr(self, name) for name in _TIMESTAMP}

    def load_state_dict(self, state_dict: Mapping[str, int | float]) -> None:
        """Restore the values of :meth:`state_dict`. Raises ValueError, without changes, if keys or types differ."""
        if state_dict.keys() != _TIMESTAMP.keys():
            missing, unknown = _TIMESTAMP.keys() - state_dict.keys(), state_dict.keys() - _TIMESTAMP.keys()
            raise WrongValue(
                f"This is not the state of a Timestamp: missing {sorted(missing)}, unknown {sorted(unknown)}. It holds "
                f"exactly {', '.join(_TIMESTAMP)}."
            )
        for name, kind in _TIMESTAMP.items():
            value = state_dict[name]
            if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float) or value < 0:
                raise WrongValue(
                    f"The state of a Timestamp has {name}={value!r}; that should be {kind.__name__} and not negative."
                )
        for name, kind in _TIMESTAMP.items():
            setattr(self, name, kind(state_dict[name]))


_TIMESTAMP: dict[str, type[int] | type[float]] = {
    field.name: float if field.name.endswith("seconds") else int for field in fields(Timestamp)
}

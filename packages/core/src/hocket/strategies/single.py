"""One process, one device."""

from hocket.strategies.base import Strategy


class SingleDevice(Strategy):
    """Trains in this process, on one device."""

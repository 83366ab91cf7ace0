"""Training in one process, on one device."""

from hocket.strategies.base import Strategy


class SingleDevice(Strategy):
    """Train in this process, on one device."""

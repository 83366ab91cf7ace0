"""The built-in strategies."""

from hocket.strategies.base import Strategy

__all__ = ["Strategy"]

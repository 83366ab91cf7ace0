"""Strategies that core brings along."""

from hocket.strategies.base import Strategy

__all__ = ["Strategy"]

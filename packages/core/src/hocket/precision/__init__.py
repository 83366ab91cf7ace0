"""Precisions that core brings along."""

from hocket.precision.base import Precision

__all__ = ["Precision"]

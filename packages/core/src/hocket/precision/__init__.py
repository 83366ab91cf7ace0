"""The built-in precisions."""

from hocket.precision.base import Precision

__all__ = ["Precision"]

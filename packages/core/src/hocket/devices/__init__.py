"""The built-in devices."""

from hocket.devices.base import Device

__all__ = ["Device"]

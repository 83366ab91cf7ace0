"""Devices that core brings along."""

from hocket.devices.base import Device

__all__ = ["Device"]

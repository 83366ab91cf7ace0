"""Checkpoints, which are a distribution of their own: their public names."""

from hocket.elsewhere import names

__getattr__, __dir__ = names("hocket_checkpoints")

"""Checkpoints, which are a distribution of their own: their public names."""

from hocket.help.optional_packages import names

__getattr__, __dir__ = names("hocket_checkpoints")
#: Import statements look here for names that the distribution does not have, or is absent for: `elsewhere` explains.
__path__: list[str] = []

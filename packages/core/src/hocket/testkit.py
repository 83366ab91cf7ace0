"""The kit for authors of plug-ins, which is a distribution of its own: its public names."""

from hocket.help.optional_packages import names

__getattr__, __dir__ = names("hocket_testkit")
#: Import statements look here for names that the distribution does not have, or is absent for: `elsewhere` explains.
__path__: list[str] = []

"""The kit for authors of plug-ins, which is a distribution of its own: its public names."""

from hocket.elsewhere import names

__getattr__, __dir__ = names("hocket_testkit")

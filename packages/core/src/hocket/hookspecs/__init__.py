"""The contract: every hook of the system, in five short files.

* :mod:`.events`      what happened: all listeners run, nothing is returned.
* :mod:`.actions`     what is done: the first answer counts, core's default answers last, anyone may wrap.
* :mod:`.strategies`  where it runs: processes, devices, collectives, full weights; what strategies have to be.
* :mod:`.precision`   in which numbers: conversion, autocast, loss scaling; what precisions have to be.
* :mod:`.loggers`     where it is written down.

A plug-in implements a hook by defining a method of its name and asks only for the arguments that it uses. A method that
is not a hook but looks like one is an error when the plug-in is attached, never a hook that silently does not run.
"""

from hocket.hookspecs.actions import Actions
from hocket.hookspecs.events import Event, Events
from hocket.hookspecs.loggers import Loggers
from hocket.hookspecs.markers import hookimpl, hookspec
from hocket.hookspecs.precision import PrecisionHooks, PrecisionLike
from hocket.hookspecs.strategies import StrategyHooks, StrategyLike

#: The specifications, in the order in which a run meets them.
SPECS: tuple[type, ...] = (StrategyHooks, PrecisionHooks, Events, Actions, Loggers)

__all__ = [
    "SPECS",
    "Actions",
    "Event",
    "Events",
    "Loggers",
    "PrecisionHooks",
    "PrecisionLike",
    "StrategyHooks",
    "StrategyLike",
    "hookimpl",
    "hookspec",
]

"""The contract: every hook of the system, in the five files below, and beside them what plug-ins inherit or are passed.

* :mod:`.events`      notifications: all listeners run, and their return values are ignored.
* :mod:`.actions`     the steps of training: the first result counts, core's default runs last, any plug-in may wrap.
* :mod:`.strategies`  processes, devices, collectives and full weights; the interface of strategies.
* :mod:`.precision`   conversion, autocast and loss scaling; the interface of precisions.
* :mod:`.loggers`     metrics, images, tables and artifacts to log.

Beside them are the base classes of plug-ins (`algorithm`, `callback`, `logger`, `command`) and what their hooks are given: the
`bus`, an `attachment`, the `steps` of a task, the `needs` of algorithms, and a thread for monitors (`ticking`).

A plug-in implements a hook by defining a method of that name, with only the arguments that it uses. A method that is not
a hook but looks like one raises an error when the plug-in is attached, instead of silently never running.
"""

from hocket.hookspecs.actions import Actions
from hocket.hookspecs.events import Event, Events
from hocket.hookspecs.loggers import Loggers
from hocket.hookspecs.markers import hookimpl, hookspec
from hocket.hookspecs.precision import PrecisionHooks, PrecisionLike
from hocket.hookspecs.strategies import StrategyHooks, StrategyLike

#: The specifications, in the order in which a run uses them.
SPECS: tuple[type, ...] = (StrategyHooks, PrecisionHooks, Events, Actions, Loggers)
#: The names of all hooks.
HOOKS = frozenset(name for spec in SPECS for name in vars(spec) if not name.startswith("_"))

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

"""The two pluggy markers of the project."""

import pluggy

#: Marks a specification. Only the files of this folder use it.
hookspec = pluggy.HookspecMarker("hocket")

#: Marks an implementation that needs options: ``@hookimpl(wrapper=True)`` surrounds an action (``result = yield``), and
#: ``@hookimpl(trylast=True)`` answers after everyone else. A plain implementation needs no mark.
hookimpl = pluggy.HookimplMarker("hocket")

"""The two pluggy markers of hocket."""

import pluggy

#: Marks a specification. Used in this package only.
hookspec = pluggy.HookspecMarker("hocket")

#: Marks an implementation that needs options: ``@hookimpl(wrapper=True)`` wraps an action (``result = yield``), and
#: ``@hookimpl(trylast=True)`` runs after all others. A plain implementation needs no marker.
hookimpl = pluggy.HookimplMarker("hocket")

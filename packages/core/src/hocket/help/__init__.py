"""Help for mistakes: names of other libraries, parts of hocket that are not installed, and warnings at the user's line.

Nothing here runs in a step. `attributes` knows what other libraries call a method, `names` what they call an argument or a
plug-in; `optional_packages` imports other parts of hocket, `installing` says how to install them, and `failures` asks
hocket-insight to explain an exception of the user's model or loss, and to check a fit.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from hocket.errors import HocketDeprecationWarning, rendered
from hocket.help.ours import is_ours

#: Libraries whose frames, like hocket's, lie between the user's line and the warning.
_LIBRARIES = re.compile(r"(torch|pluggy|contextlib|functools|threading)(\.|$)")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: the latest one called from outside hocket, its packages and torch.

    Filters know the warning by the module that calls this: ``warnings.filterwarnings("ignore", module="hocket")``. Marks in
    the message are those of `hocket.errors`.
    """
    user = own = sys._getframe(1)
    while user.f_back is not None and _is_between(user.f_globals):
        user = user.f_back
    if _is_between(user.f_globals):  # in a thread of hocket's
        user = own
    registry = user.f_globals.setdefault("__warningregistry__", {})
    module = own.f_globals["__name__"]
    warning = category(rendered(message))
    warning.marked = message  # type: ignore[attr-defined]
    warnings.warn_explicit(warning, None, user.f_code.co_filename, user.f_lineno, module, registry)


def deprecated(name: str, replacement: str, since: str) -> None:
    """Warn at the user's line that a public name works for two minor versions only: ``since``, such as "0.1", and the next.

    Example:
        >>> import warnings
        >>> from hocket.help import deprecated
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     deprecated("Trainer(clip_norm=1.0)", "Trainer(clip=1.0)", since="0.1")
        >>> print(caught[0].message)
        Trainer(clip_norm=1.0) is deprecated since hocket 0.1 and is removed in 0.3. Write Trainer(clip=1.0).
    """
    text = f"{name} is deprecated since hocket {since} and is removed in {removal(since)}. Write {replacement}."
    warn(text, HocketDeprecationWarning)


def removal(since: str) -> str:
    """Return the minor version that removes what is deprecated since another, two before it."""
    major, minor = since.split(".")
    return f"{major}.{int(minor) + 2}"


def _is_between(scope: Mapping[str, Any]) -> bool:
    name = str(scope.get("__name__"))
    return is_ours(name) or _LIBRARIES.match(name) is not None

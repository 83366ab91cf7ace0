"""``hocket plugins new``: write the distribution of a new plug-in.

The files beside this module are templates of `string.Template`: those in ``common`` are for every kind, those in
``kinds/<kind>`` for one, whose ``card.md`` becomes part of the README. In their paths PACKAGE and MODULE are replaced, and
the ending ``.txt`` is removed.
"""

from __future__ import annotations

#: The licences that a new plug-in may have, by their SPDX identifiers; the first is the default.
LICENSES = ("MIT", "Apache-2.0", "BSD-3-Clause")

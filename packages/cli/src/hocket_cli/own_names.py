"""Names of distributions that are kept for hocket: its own, and names that users would take for one of them."""

from __future__ import annotations

from packaging.utils import canonicalize_name

from hocket.help.ours import PACKAGES

#: What people may type for a distribution of hocket's: its name, its import package, and what the name of core suggests.
_SPELLINGS = (
    {name: name for name in PACKAGES.values()}
    | {package.replace("_", "-"): name for package, name in PACKAGES.items()}
    | dict.fromkeys(("hocket-core", "hocket-standard", "hocket-all"), "hocket")
)
_FAMILY = "hocket-algorithms-"
#: Words of fewer letters are one letter away from too many others: `hocket-clip` is no misspelling of `hocket-cli`.
_SHORTEST = 5


def meant(name: str) -> str:
    """Return the distribution of hocket's that a name is or reads like; empty for other names.

    A name reads like one of hocket's if it is its import package, differs in hyphens only, or in one letter of a longer word.

    Example:
        >>> from hocket_cli.own_names import meant
        >>> meant("hocket-vision"), meant("hocket_testkti"), meant("hocket-gradient-noise")
        ('hocket-algorithms-vision', 'hocket-testkit', '')
    """
    name = canonicalize_name(name)
    if not name.startswith("hocket"):
        return ""
    for spelling, own in _SPELLINGS.items():
        if name.replace("-", "") == spelling.replace("-", ""):
            return own
    for spelling, own in _SPELLINGS.items():
        if len(spelling.removeprefix("hocket-")) >= _SHORTEST and _shorter(name) & _shorter(spelling):
            return own
    return ""


def _shorter(name: str) -> set[str]:
    """Return a name, and what is left of it without one letter: of two names that differ in one, some are the same."""
    return {name, *(name[:place] + name[place + 1 :] for place in range(len(name)))}


def reserved(name: str) -> str:
    """Return why only hocket may have a distribution of this name, as the end of a sentence; empty for other names."""
    name = canonicalize_name(name)
    if own := meant(name):
        return (
            "is a distribution of hocket's own" if own == name else f"reads like {own}, a distribution of hocket's own"
        )
    if name.startswith(_FAMILY):
        return f"begins with {_FAMILY}, as distributions of hocket's own do"
    if name.startswith("hocket") and not name.startswith("hocket-"):
        return "begins with hocket and without a hyphen, and plug-ins are named hocket-NAME"
    return ""

"""The names of a new plug-in, and which are refused."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from keyword import iskeyword

import importlib_metadata
from packaging.utils import canonicalize_name

from hocket.basics.kinds import HEAVY, singular
from hocket.errors import WrongValue
from hocket.help import names as others
from hocket.plugins import registry
from hocket.plugins.entry_points import normal
from hocket_cli import own_names

#: Longer names would not fit into the lines of the generated code.
_LONGEST = 30


@dataclass(frozen=True, slots=True)
class Names:
    """What a new plug-in, and its distribution, are called.

    Example:
        >>> from hocket_cli.scaffold.names import Names
        >>> names = Names("algorithms", "soft-noise")
        >>> names.distribution, names.package, names.attribute
        ('hocket-soft-noise', 'hocket_soft_noise', 'SoftNoise')
    """

    kind: str
    name: str

    @property
    def distribution(self) -> str:
        return f"hocket-{self.name}"

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def package(self) -> str:
        return f"hocket_{self.module}"

    @property
    def class_name(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("-"))

    @property
    def attribute(self) -> str:
        """What the entry point names within the module."""
        return {"commands": "command", "datasets": "load"}.get(self.kind, self.class_name)


def check(names: Names) -> None:
    """Raise WrongValue for a name that a new plug-in cannot have, or that already means something to users."""
    kind, name = names.kind, names.name
    what = f"'{name}' cannot be the name of a new plug-in"
    if name.startswith("hocket-"):
        raise WrongValue(f"{what}: the distribution gets 'hocket-' by itself. Write '{name.removeprefix('hocket-')}'.")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) > _LONGEST:
        near = "-".join(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()))[:_LONGEST]
        suggestion = near.strip("-") if name.isascii() and near[:1].isalpha() else "gradient-noise"
        raise WrongValue(
            f"{what}: a name has at most {_LONGEST} characters, lower-case letters and digits in words with hyphens "
            f"between them, and begins with a letter, such as '{suggestion}'."
        )
    if reason := _taken(names):
        longer = Names(kind, f"{name}-{singular(kind)}")
        write = "Choose another." if _taken(longer) else f"Add a word to it, such as '{longer.name}'."
        raise WrongValue(f"{what}: {reason}. {write}")
    if provider := next((entry for entry in registry.entries(kind) if entry.name == name), None):
        raise WrongValue(
            f"{what}: {provider.dist} {provider.version} has the {singular(kind)} of this name. Choose another."
        )
    if extra := registry.extra_of(kind, name):
        raise WrongValue(f"{what}: hocket[{extra}] has the {singular(kind)} of this name. Choose another.")
    if owner := next((each for each in registry.entries() if normal(each.dist) == names.distribution), None):
        raise WrongValue(
            f"{what}: the distribution {owner.dist} {owner.version} is installed, with the {singular(owner.kind)} "
            f"'{owner.name}'. Choose another, or uninstall it."
        )
    if ours := others.alias(kind, name, registry.names(kind)):
        raise WrongValue(f"{what}: users of other libraries look for '{ours}' under this name. Choose another.")
    if where := others.elsewhere(kind, name):
        raise WrongValue(f"{what}: users of other libraries look for something else under it: {where}. Choose another.")


def _taken(names: Names) -> str:
    """Return why the module or distribution could not be imported or tested, or be told from another; empty if it could."""
    module = names.module
    if iskeyword(module):
        return "it is a keyword of Python, so its module could not be imported"
    if re.fullmatch(r"con|prn|aux|nul|(com|lpt)[0-9]", module):
        return "Windows has no files of this name"
    if re.fullmatch(r"conftest|tests?|test_\w+", module):
        return "pytest would take its module for tests"
    if module in sys.stdlib_module_names:
        return "Python has a module of this name"
    installed = {canonicalize_name(each.name) for each in importlib_metadata.distributions() if each.name}
    if names.name in installed.union(map(canonicalize_name, HEAVY), ["numpy", "yaml"]):
        return "a library has this name, and users would take one for the other"
    reason = own_names.reserved(names.distribution)
    return reason and f"{names.distribution} {reason}"

"""Whether an installed distribution was made for the installed hocket."""

from __future__ import annotations

import functools

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name


@functools.cache
def required(dist: str) -> str:
    """Return the versions of hocket that an installed distribution requires, such as ``>=0.1,<0.2``; empty for any."""
    try:
        texts = importlib_metadata.distribution(dist).requires or []
    except importlib_metadata.PackageNotFoundError:  # registered in this process, or its metadata is damaged
        return ""
    return of_core(texts)


def of_core(requirements: list[str]) -> str:
    """Return the versions of hocket among requirements that apply here, without those of extras."""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # of another package's; installers refuse it
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) == "hocket" and applies:
            return ",".join(sorted(map(str, requirement.specifier), reverse=True))
    return ""


def mismatch(dist: str) -> str:
    """Return that a distribution is for another version of hocket, with what to do; empty if it is not."""
    versions, installed = required(dist), importlib_metadata.version("hocket")
    if Requirement(f"hocket{versions}").specifier.contains(installed, prereleases=True):
        return ""
    return f"requires hocket{versions}, and {installed} is installed; upgrade {dist}, or install hocket{versions}"

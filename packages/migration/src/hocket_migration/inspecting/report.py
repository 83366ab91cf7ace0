"""What `hocket migrate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket_migration.inspecting.project import Finding, Inspection

if TYPE_CHECKING:
    from hocket_migration.inspecting.converting import Conversion


#: The mark of findings that the drop-in namespace does not have, or refuses.
_BREAKS = "[breaks in the drop-in]"


def of_inspection(found: Inspection) -> str:
    """Return the findings, one a line, the files that could not be read, and the counts."""
    lines = [_line(each) for each in found.findings]
    lines += _problems(found)
    counts = found.counts()
    uses = sum(counts.values())
    if not uses and found.files:
        lines.append("Nothing here uses Lightning, Composer, the Trainer of transformers, or Accelerate.")
    places = len({each.place for each in found.findings})
    lines.append(
        f"{_count(uses, 'use')} in {_count(places, 'line')} of {_count(found.files, 'file')}: "
        f"{counts['maps']} map, {counts['changes']} change, {counts['no counterpart']} have no counterpart, "
        f"{counts['not readable']} are not readable."
    )
    if broken := len({each.place for each in found.findings if each.breaks}):
        lines.append(f"The drop-in namespace refuses {_count(broken, 'line')}, marked {_BREAKS}.")
    return "\n".join(lines)


def of_conversion(converted: Conversion, folder: str | None, in_place: bool) -> str:
    """Return the changes as a diff, the lines that are left, and where the files are."""
    lines = [converted.diff().rstrip()] if converted.changed else ["No import has to move."]
    if converted.left:
        lines += ["", "Left for you:", *(_line(each) for each in converted.left)]
    lines += _problems(converted.inspection)
    if folder is not None:
        copied = "" if converted.root.is_file() else ", without caches, hidden folders and virtual environments"
        lines.append(f"{_count(len(converted.changed), 'file')} changed; the project is in {folder}{copied}.")
    elif in_place:
        lines.append(f"{_count(len(converted.changed), 'file')} changed in place.")
    elif converted.changed:
        lines.append("Nothing was written. Add --out FOLDER or --in-place.")
    return "\n".join(lines)


def status(found: Inspection, left: Sequence[Finding] | None = None) -> int:
    """Return the exit status: 2 if nothing was read, 1 if there is work left, else 0."""
    if not found.files:
        return 2
    open_ones = [each for each in found.findings if each.verdict in ("no counterpart", "not readable")]
    return 1 if (open_ones if left is None else left) or found.problems else 0


def _line(finding: Finding) -> str:
    mark = f" {_BREAKS}" if finding.breaks else ""
    return f"{finding.place}: {finding.verdict}: {finding.name}: {finding.text}{mark}"


def _problems(found: Inspection) -> list[str]:
    return [
        ":".join([each.file, *([f"cell {each.cell}"] if each.cell else []), *([str(each.line)] if each.line else [])])
        + f": not read: {each.text}."
        for each in found.problems
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

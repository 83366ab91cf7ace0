"""Write the pages of the reference, from the installed packages: ``python docs/_generate FOLDER``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What is asked of the repository itself: the public interface, what algorithms were tested with, and what they gave.
FOLDERS = ("docs/_generate", "tests/golden", "tests/matrix", "benchmarks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write the pages, such as docs/reference/generated")
    folder: Path = parser.parse_args().folder.resolve()
    for name, text in generate(folder).items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.strip() + "\n", encoding="utf-8")


def generate(folder: Path) -> dict[str, str]:
    """Return the pages by name, with the addresses that they have in a folder."""
    sys.path += [str(ROOT / each) for each in FOLDERS]
    import api
    import commands
    import configuration
    import environment
    import failures
    import hooks
    import index
    import plugin_pages

    parts = (api, commands, hooks, plugin_pages, configuration, environment, failures)
    families = [family.pages(folder) for family in parts]
    return {name: text for family in (*families, index.pages(families)) for name, text in family.items()}


if __name__ == "__main__":
    main()

"""Run the README's program in a terminal, and write what it shows as readme.svg: ``python docs/images/render.py``.

Needs pyte, besides what the program needs.
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))
WIDTH = 96


def main() -> None:
    from pages import ROOT, blocks

    program = next(block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    screen = pyte.Screen(WIDTH, 40)
    pyte.ByteStream(screen).feed(_run(program))
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text("$ python train.py", style="bold"))
    lines = [line.rstrip() for line in screen.display]
    for row in range(max(number for number, line in enumerate(lines) if line) + 1):
        text = Text()
        for column in range(WIDTH):
            character = screen.buffer[row][column]
            colour = character.fg if character.fg != "default" else ""
            text.append(character.data, style=f"#{colour}" if len(colour) == 6 else colour)
        text.rstrip()
        console.print(text)
    svg = re.sub(
        r"@font-face \{.*?\}\n", "", console.export_svg(title="train.py"), flags=re.DOTALL
    )  # fonts of another host
    (HERE / "readme.svg").write_text(svg, encoding="utf-8")


def _run(program: str) -> bytes:
    """Return what a program writes to a terminal."""
    shown = bytearray()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(program, encoding="utf-8")
        process, terminal = pty.fork()
        if not process:
            os.chdir(folder)
            os.environ.update(COLUMNS=str(WIDTH), LINES="40", TERM="xterm-256color", COLORTERM="truecolor")
            os.execv(sys.executable, [sys.executable, "train.py"])
        while True:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the program has ended
                break
        os.waitpid(process, 0)
    return bytes(shown)


if __name__ == "__main__":
    main()

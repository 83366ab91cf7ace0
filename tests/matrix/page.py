"""The page docs/algorithms/matrix.md, from the registry and the reasons: ``python tests/matrix/page.py`` writes it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/algorithms/matrix.md"
#: Algorithm -> column -> why the cell does not hold; the tests check that it does not.
REASONS: dict[str, dict[str, str]] = tomllib.loads((HERE / "reasons.toml").read_text())
HEADS = {
    "microbatches": "microbatches",
    "bf16": "bf16",
    "compile": "compiled",
    "ddp": "2 ranks, ddp",
    "fsdp": "2 ranks, fsdp",
    "resume": "killed and resumed",
}
_TEXT = """\
# What each algorithm can be combined with

After reading this page you can tell whether an algorithm gives the same weights with microbatches, in bf16, compiled, on two
ranks and after a kill. `tests/test_matrix.py` checks every cell, for each algorithm in the packages of this repository. It
trains a small convolutional network with residual blocks, or a small GPT-2, for six steps on a CPU. The network has batch
norm and dropout where an algorithm needs them, and always for the last column; elsewhere it has group norm.

| column | ✓ means |
|---|---|
| microbatches | `microbatch=3` of a batch of 8 gives the same weights, up to rounding |
| bf16 | three steps with `precision="bf16"` end near the weights of fp32: at most 15 % of the way off |
| compiled | `compile={"backend": "aot_eager"}` gives the same weights after three steps, up to rounding |
| 2 ranks | both ranks end with the weights of one process with the same global batch, up to rounding |
| killed and resumed | a run that is killed (SIGKILL) in its second epoch and resumed ends bitwise identical |

Every two algorithms that do not conflict, and are for one kind of model, are also trained together: in one process, in parts
of a fit, and on two ranks, which end with the same weights. On fsdp, runs omit the algorithms that the table marks as refused.

"Up to rounding" allows 2e-5 in each weight, and 5e-2 for the low-precision norms, which run in bf16. A cell with a number does
not hold, for the reason below the table.

"""


def text(names: list[str]) -> str:
    """Return the page."""
    notes: list[str] = []
    lines = [f"| algorithm | {' | '.join(HEADS.values())} |", f"|---|{'---|' * len(HEADS)}"]
    for name in names:
        cells = []
        for column in HEADS:
            reason = REASONS.get(name, {}).get(column)
            if reason and reason not in notes:
                notes.append(reason)
            cells.append(f"({notes.index(reason) + 1})" if reason else "✓")
        lines.append(f"| [{name}]({name}.md) | {' | '.join(cells)} |")
    numbered = [f"{number}. {note[0].upper()}{note[1:]}." for number, note in enumerate(notes, 1)]
    return _TEXT + "\n".join([*lines, "", *numbered]).rstrip() + "\n"


if __name__ == "__main__":
    sys.path.append(str(HERE.parent))
    from matrix.runs import NAMES

    PAGE.write_text(text(NAMES))

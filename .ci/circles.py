"""Fail if more files of core import each other in a circle than the given number, with types and functions counted."""

from __future__ import annotations

import sys

import grimp
import networkx

imports = grimp.build_graph("hocket")
graph = networkx.DiGraph(
    (module, imported) for module in imports.modules for imported in imports.find_modules_directly_imported_by(module)
)
largest = max(networkx.strongly_connected_components(graph), key=len)
if len(largest) > int(sys.argv[1]):
    sys.exit(f"These {len(largest)} modules import each other; {sys.argv[1]} may: {', '.join(sorted(largest))}")

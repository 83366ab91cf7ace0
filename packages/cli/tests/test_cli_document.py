"""Plain values are written as YAML that reads as the same values."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, strategies as st

from hocket_cli.document import dump, flow, parse, parse_value
from hocket_cli.template import template

#: Any text, also of characters that mean something in YAML, and of line breaks of Unicode; and long text, which is folded.
TEXTS = (
    st.text()
    | st.text(alphabet=" \n\t\r\x85\u2028\u2029\ufeff\u3000\"'\\:#-?{}[],&*!|>%@`$~<=1e.+x_Tné😀\x00\x7f\x80\uffff")
    | st.text(alphabet=" ab\n", min_size=100)
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inside: st.lists(inside) | st.dictionaries(TEXTS | st.integers(2), inside), max_leaves=6
)


@given(VALUES)
@example("\x85")
@example({"a\u2028b": ["\u2029", "a\x85\nb"]})
@example("a\u3000")
@example("${HOME}")
@example(["1e3", "0x1", "<<", "~", "null", "", "...", ".nan"])
def test_every_value_reads_as_it_was(value: Any) -> None:
    assert repr(parse(dump({"key": value}), "c.yaml").value["key"].plain()) == repr(value)
    assert repr(parse(template({"run_name": value}), "c.yaml").value["run_name"].plain()) == repr(value)
    assert repr(parse_value(flow(value), "'run_name=…'").plain()) == repr(value)

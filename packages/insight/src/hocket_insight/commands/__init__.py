"""Commands of ``hocket`` that look at a run before it trains."""

"""Repeat a run and compare it step by step: `journal` records digests, and `comparison` reads two records of them."""

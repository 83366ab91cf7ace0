"""Checkpoints: what is in one, how it is written, when."""

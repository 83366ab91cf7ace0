"""Sweeps: many runs of one configuration with other values, each in its own process and folder. See ``docs/sweeps.md``."""

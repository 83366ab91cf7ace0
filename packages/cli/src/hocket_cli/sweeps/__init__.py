"""Sweeps: many runs of one configuration with other values, each in its own process and folder: ``docs/how-to/sweeps.md``."""

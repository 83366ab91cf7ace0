"""The Trainer, and what it assembles a run from."""

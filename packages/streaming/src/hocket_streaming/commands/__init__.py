"""The command ``hocket data``."""

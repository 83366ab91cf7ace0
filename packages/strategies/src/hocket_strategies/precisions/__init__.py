"""Precisions, discovered by their entry points."""

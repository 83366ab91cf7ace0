"""Fails when it is imported."""

raise SystemExit("the project was imported")

# ruff: noqa

from __future__ import annotations

import argparse

import pytest

from hocket_migration.command import add_arguments, run


@pytest.fixture
def migrate():
    """Run ``hocket migrate`` with these words, and return its exit status."""

    def call(*words):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return run(parser.parse_args([*map(str, words)]))

    return call


@pytest.fixture
def notebook():
    """Return a notebook of cells, each a kind and a text."""

    def make(*cells):
        made = [{"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)} for kind, text in cells]
        return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}

    return make

"""The loops: what happens, in the order in which it happens."""

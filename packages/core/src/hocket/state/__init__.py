"""The state of a run, the task that it trains, and the values that it logs."""

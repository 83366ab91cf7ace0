"""The profiler: where the time of a step goes, which causes are largest, and what to try."""

"""What a run shows of itself: monitors, profiles, memory, tables of models and plots.

`callbacks` has the monitors, `profiling` the profiler, `memory` what a run will need, `model_table` the summary of a model, and
`plotting` the figure of a history. `commands` adds ``hocket summary`` and ``hocket estimate`` to the command line.
"""

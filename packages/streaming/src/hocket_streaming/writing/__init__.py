"""Write data sets that are read in chunks: MDS, Parquet, and packed tokens.

`sources` yields samples in parts, `runs` sorts them on disk, shuffled or not, and `targets` makes files of them. `write` puts
them together in several processes, and continues after a kill. `check` and `planning` look at data that exist.
"""

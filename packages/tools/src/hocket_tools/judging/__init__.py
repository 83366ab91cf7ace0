"""Judge a run: metrics with intervals, corrupted images, comparisons of two runs, and predictions in files."""

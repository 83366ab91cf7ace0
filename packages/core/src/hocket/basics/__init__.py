"""What everything else is written in: times, files, nested data, tensors, random numbers."""

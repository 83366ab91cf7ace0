"""Start the ranks of one machine, and end all of them together. torch is only imported when it is needed."""

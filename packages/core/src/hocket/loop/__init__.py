"""The training, evaluation and prediction loops, and the default actions of a step."""

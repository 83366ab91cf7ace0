"""The training, evaluation and prediction loops, the default actions of a step, and the Trainer's arguments."""

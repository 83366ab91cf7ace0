"""Find a learning rate and a batch size by trial steps of a Trainer, which is afterwards bitwise as before."""

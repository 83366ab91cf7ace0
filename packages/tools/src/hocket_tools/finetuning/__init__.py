"""Fine-tuning: stages in which parts of a model train, each part with a learning rate of its own."""

"""Training: configuration, ranks, data, steps, checkpoints."""

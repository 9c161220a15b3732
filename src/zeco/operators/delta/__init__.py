"""Dense transitions of delta rules: the segment in PyTorch, and calls."""

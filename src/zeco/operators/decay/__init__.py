"""Decays by channel, by head, or none: the segment in PyTorch and on Triton kernels, and calls."""

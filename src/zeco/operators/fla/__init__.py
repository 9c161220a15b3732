"""Delta rules on Flash Linear Attention's kernels."""

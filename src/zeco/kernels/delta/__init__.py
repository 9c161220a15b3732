"""Dense transitions: what Flash Linear Attention's kernels leave to be done."""

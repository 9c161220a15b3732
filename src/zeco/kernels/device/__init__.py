"""All-Scan inside kernels."""

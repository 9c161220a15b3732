"""One decay a head, or none."""

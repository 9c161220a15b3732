"""The scans, one a file: each gives every rank its program."""

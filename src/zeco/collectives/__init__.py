"""Transports, All-Scan and the other scans, halo exchange, the ledger."""

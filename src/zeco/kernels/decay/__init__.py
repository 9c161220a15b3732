"""Decays that differ by channel, and what both kinds of decay share: plans, segments, states."""

"""Triton launchers; no autograd, no distributed logic."""

"""Affine maps, schedules, costs, shapes and errors; imports no other room."""

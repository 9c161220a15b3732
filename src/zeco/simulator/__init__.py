"""Schedules on clusters that aren't here."""

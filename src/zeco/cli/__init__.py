"""The ``zeco`` command: one small file a command."""

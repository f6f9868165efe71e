"""The dpipe command."""

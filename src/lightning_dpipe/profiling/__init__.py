"""From a model and a device to a Profile."""

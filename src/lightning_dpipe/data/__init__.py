"""Datamodules and image decoding."""

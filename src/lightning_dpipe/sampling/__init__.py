"""Drawing images from trained weights."""

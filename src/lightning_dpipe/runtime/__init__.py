"""From a Program and modules to one optimizer-ready step."""

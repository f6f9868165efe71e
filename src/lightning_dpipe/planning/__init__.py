"""From a Profile to a Plan."""

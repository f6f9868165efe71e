"""From a Plan to one straight-line Program per rank."""

"""Measurements behind the README: ``python -m benchmarks.<name> [--quick] [--json]``."""

"""One schedule a file: pure functions of integers."""

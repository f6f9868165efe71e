"""Encodings kept on disk and used again in later epochs."""

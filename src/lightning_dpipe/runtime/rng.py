"""Dropout's random numbers, keyed so that they do not depend on where a layer runs.

A layer that draws in training runs with torch's generator forked and seeded from (seed, batch,
layer, group, first row of the micro-batch). The generator outside is untouched, so a user's own
draws are too.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def fold(*parts: int | str) -> int:
    """Mix parts into 63 bits; the same on every machine (Python's `hash` is not)."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


# Torch's generator is the process's own, and ranks may be threads of one process.
_GENERATOR = threading.RLock()


@contextmanager
def forked(device: torch.device, *key: int | str) -> Iterator[None]:
    """Seed torch's generators from `key` inside the block and put them back after it."""
    devices = [device] if device.type == "cuda" else []
    with _GENERATOR, torch.random.fork_rng(devices=devices):
        torch.manual_seed(fold(*key))
        yield

"""Keyed random draws: what a sample draws depends on the sample and the step, on nothing else.

In:     a seed, a purpose ("noise", "timestep", ...) and keys int64 ``[batch, 2]``, one row
        (batches consumed, global slot) per sample.
Out:    one independent draw per row, on the keys' device. Any split or order of the rows, on any
        rank or stage, gives the same numbers; torch's global generators are never touched.
Source: Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in numpy.

Training keys count batches from 0; validation keys use batch ``-1 - loader``: the same noise at
every validation, never that of a training step. A validation key may carry a *level* (`at_level`):
a fixed timestep instead of a drawn one. All other draws are those of the key without it.

The draws run on the host. Keep the keys there: keys on an accelerator are copied back first, which
waits for it. They are custom operators, so that a FakeTensor trace sees shapes without drawing.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dpipe.core.errors import SpecError

NUM_LEVELS = 10
"""Level l of 1 to 9 is quantile l / 10 of the timesteps."""

_LEVEL = 1 << 32  # a batch number below zero is -1 - loader - level * 2**32
_WORD = (1 << 64) - 1  # two's complement view: a batch number below zero is a key too
_Draw = Callable[[np.random.Generator], npt.NDArray[np.generic] | float | int]


def normal(seed: int, purpose: str, keys: Tensor, shape: Sequence[int]) -> Tensor:
    """Draw standard normal numbers, float32 ``[batch, *shape]``.

    Args:
        seed: The run's seed.
        purpose: What the numbers are for; purposes draw independently.
        keys: int64 ``[batch, 2]``, (batches consumed, global slot) of each sample.
        shape: Shape of one sample's draw.

    Raises:
        SpecError: `keys` is not int64 ``[batch, 2]``.
    """
    _check_keys(keys)
    drawn: Tensor = _normal(seed, purpose, keys, list(shape))
    return drawn


def uniform(seed: int, purpose: str, keys: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draw uniform numbers in ``[0, 1)``, float32 ``[batch, *shape]``; arguments as `normal`.

    Raises:
        SpecError: `keys` is not int64 ``[batch, 2]``.
    """
    _check_keys(keys)
    drawn: Tensor = _uniform(seed, purpose, keys, list(shape))
    return drawn


def integers(seed: int, purpose: str, keys: Tensor, high: int) -> Tensor:
    """Draw one integer in ``[0, high)`` per sample, int64 ``[batch]``; arguments as `normal`.

    Raises:
        SpecError: `keys` is not int64 ``[batch, 2]``, or `high` is below 1.
    """
    _check_keys(keys)
    if high < 1:
        raise SpecError(f"integers are drawn below {high}; expected a bound of at least 1")
    drawn: Tensor = _integers(seed, purpose, keys, high)
    return drawn


def coin(seed: int, purpose: str, batch_index: int) -> float:
    """Draw one number in ``[0, 1)`` for a whole global batch: the same on every rank."""
    bits = np.random.Philox(key=_key(seed, purpose), counter=_counter(batch_index, 0))
    return float(np.random.Generator(bits).random())


def at_level(keys: Tensor, level: int) -> Tensor:
    """Validation keys int64 ``[batch, 2]`` with a fixed timestep: quantile ``level / NUM_LEVELS``.

    Raises:
        SpecError: The level is not in ``1 .. NUM_LEVELS - 1``, or the keys are of training.
    """
    _check_keys(keys)
    if not 1 <= level < NUM_LEVELS or bool((keys[:, 0] >= 0).any()):
        raise SpecError(
            f"level {level} for draw keys of batches {sorted(set(keys[:, 0].tolist()))}; expected "
            f"a level of 1 to {NUM_LEVELS - 1} and validation keys, whose batch is below zero"
        )
    base = -1 - (-1 - keys[:, 0]) % _LEVEL
    return torch.stack([base - level * _LEVEL, keys[:, 1]], dim=1)


def levels(keys: Tensor) -> Tensor:
    """The keys' levels, int64 ``[batch]``; 0: the timestep is drawn."""
    batch = keys[:, 0]
    return torch.where(batch < 0, torch.div(-1 - batch, _LEVEL, rounding_mode="floor"), 0)


def _check_keys(keys: Tensor) -> None:
    if keys.dtype is not torch.int64 or keys.ndim != 2 or keys.shape[1] != 2:
        raise SpecError(
            f"draw keys are {keys.dtype} {list(keys.shape)}; "
            "expected int64 [batch, 2]: (batches consumed, global slot) per sample"
        )


def _key(seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """Hash to Philox's 128-bit key; not ``hash()``, whose value changes from process to process."""
    digest = blake2b(f"{seed}\0{purpose}".encode(), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _counter(batch: int, slot: int) -> npt.NDArray[np.uint64]:
    """Put the key in the counter's high words.

    The generator counts up from word 0, so each sample owns 2**128 counts that no other one enters.
    """
    return np.array([0, 0, slot & _WORD, batch & _WORD], dtype=np.uint64)


def _fill(seed: int, purpose: str, keys: Tensor, out: Tensor, draw: _Draw) -> Tensor:
    """Draw each row of `out` (on the host) with the sample's own stream; return it on keys' device.

    One bit generator is moved from stream to stream: making one costs more than a small draw.
    """
    bits = np.random.Philox(key=_key(seed, purpose))
    generator = np.random.Generator(bits)
    fresh = bits.state  # an empty buffer, whatever the last stream left
    rows = out.numpy()
    for row, (batch, slot) in enumerate(keys.tolist()):
        base = batch if batch >= 0 else -1 - (-1 - batch) % _LEVEL
        fresh["state"]["counter"] = _counter(base, slot)
        bits.state = fresh
        rows[row] = draw(generator)
    return out.to(keys.device)


@torch.library.custom_op("lightning_dpipe::normal", mutates_args=())
def _normal(seed: int, purpose: str, keys: Tensor, shape: list[int]) -> Tensor:
    out = torch.empty(len(keys), *shape, dtype=torch.float32)
    return _fill(seed, purpose, keys, out, lambda g: g.standard_normal(shape, dtype=np.float32))


@torch.library.custom_op("lightning_dpipe::uniform", mutates_args=())
def _uniform(seed: int, purpose: str, keys: Tensor, shape: list[int]) -> Tensor:
    out = torch.empty(len(keys), *shape, dtype=torch.float32)
    return _fill(seed, purpose, keys, out, lambda g: g.random(shape, dtype=np.float32))


@torch.library.custom_op("lightning_dpipe::integers", mutates_args=())
def _integers(seed: int, purpose: str, keys: Tensor, high: int) -> Tensor:
    out = torch.empty(len(keys), dtype=torch.int64)
    return _fill(seed, purpose, keys, out, lambda g: int(g.integers(high)))


@_normal.register_fake
@_uniform.register_fake
def _fake_floats(seed: int, purpose: str, keys: Tensor, shape: list[int]) -> Tensor:
    return keys.new_empty((keys.shape[0], *shape), dtype=torch.float32)


@_integers.register_fake
def _fake_integers(seed: int, purpose: str, keys: Tensor, high: int) -> Tensor:
    return keys.new_empty((keys.shape[0],))

"""Errors a user can meet. Each says what is wrong, both numbers, and what to do about it."""

CAUSE = "cause: "
"""How a note on an exception begins that says which rank's failure it follows from."""


class DPipeError(ValueError):
    """Base of every error this package raises on bad input."""


class SpecError(DPipeError):
    """The model description is inconsistent (names, shapes, weights, shared modules)."""


class ProfileError(DPipeError):
    """A profile does not fit the model, or was asked for something it does not hold."""


class PlanError(DPipeError):
    """A plan cannot be made or does not fit the model, the batch or the world."""


class ScheduleError(PlanError):
    """A schedule is unknown, illegal or would deadlock."""


class ClusterError(DPipeError):
    """A cluster file lacks a figure, or has one that cannot be."""


class DataError(DPipeError):
    """A data file, caption or batch field is missing or unusable."""


class UnsupportedError(DPipeError):
    """A Trainer flag, layer or module that cannot work here, refused by name."""


class TransportError(DPipeError):
    """A tensor does not fit its message, or both ends of a channel disagree on what comes next."""


class RankError(RuntimeError):
    """Another rank failed; carries that rank's own traceback as text."""

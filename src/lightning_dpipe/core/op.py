"""One unit of pipeline work.

Letters are torch's: F forward, B full backward = I input gradient + W weight gradient. (Papers on
zero-bubble schedules write B for our I.) N is a frozen forward, S the extra self-conditioning
forward, which keeps no activations.
"""

import re
from dataclasses import dataclass
from enum import Enum

from lightning_dpipe.core.errors import ScheduleError


class OpKind(str, Enum):
    """What an op computes."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the field's letter)
    W = "W"
    N = "N"
    S = "S"


FORWARDS = (OpKind.F, OpKind.S)
"""What a step without training runs."""


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """Identity of one op; prints as ``2F0``: stage 2, forward, microbatch 0."""

    stage: int
    kind: OpKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """Read what `str` printed.

        Raises:
            ScheduleError: Not of the form ``2F0``.
        """
        match = re.fullmatch(r"(\d+)([FBIWNS])(\d+)", text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an op; write stage, letter, microbatch, as in 2F0"
            )
        return cls(int(match[1]), OpKind(match[2]), int(match[3]))

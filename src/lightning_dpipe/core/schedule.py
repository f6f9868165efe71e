"""A Schedule is the order of ops on each device: data, without times."""

from dataclasses import dataclass

from lightning_dpipe.core.op import Op


@dataclass(frozen=True, slots=True)
class Schedule:
    """`orders[device]` lists that device's ops in run order."""

    orders: tuple[tuple[Op, ...], ...]

    def __str__(self) -> str:
        return "\n".join(
            f"device {d}: " + " ".join(map(str, order)) for d, order in enumerate(self.orders)
        )

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read one line of ops per device; a ``device N:`` prefix is allowed."""
        lines = [line.split(":")[-1].split() for line in text.strip().splitlines()]
        return cls(tuple(tuple(map(Op.parse, ops)) for ops in lines))

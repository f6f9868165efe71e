"""Say how a search gets on, but only to somebody who has waited."""

import time
from collections.abc import Callable

from lightning_dpipe.planning.auto import Progress

WAIT_S = 2.0


def patient(
    say: Callable[[str], None],
    *,
    wait_s: float = WAIT_S,
    now_s: Callable[[], float] = time.monotonic,
) -> Progress:
    """A search's progress as a line of text each `wait_s`; a quick search says nothing.

    Args:
        say: Shows one line.
        wait_s: Seconds before the first line, and between lines.
        now_s: The clock.
    """
    last_s = now_s()

    def progress(tried: int, best_us: float, bound_us: float) -> None:
        nonlocal last_s
        if now_s() - last_s < wait_s:
            return
        last_s = now_s()
        say(
            f"searching: {tried} plans simulated, best iteration {best_us / 1e3:.2f} ms, "
            f"none can end before {bound_us / 1e3:.2f} ms"
        )

    return progress

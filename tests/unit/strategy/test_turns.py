"""The first rank of a machine loads first; the others wait on a key and hear of its failure."""

import logging
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.turns import in_turn, taking_turns
from lightning_dpipe.strategy.turns import NodeTurns


def test_others_load_after_the_first_however_long_it_takes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))  # waiting is no store timeout
    order: list[str] = []

    def rank(local_rank: int) -> None:
        with taking_turns(NodeTurns(store=store, local_rank=local_rank, patience_s=0.1)):
            if local_rank == 0:
                time.sleep(0.6)
            in_turn("vae of 'a/b'", lambda: order.append(str(local_rank)))

    caplog.set_level(logging.WARNING)
    threads = [threading.Thread(target=rank, args=(i,)) for i in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["0", "1"]
    assert "waiting for this machine's first rank to load vae of 'a/b'" in caplog.text


def test_a_failed_first_load_is_told_to_the_others() -> None:
    store = dist.HashStore()

    def broken() -> None:
        raise SpecError("no such revision")

    with pytest.raises(SpecError, match="no such revision"):
        NodeTurns(store=store, local_rank=0)("x", broken)
    with pytest.raises(SpecError, match="first rank could not load x; it failed: no such revision"):
        NodeTurns(store=store, local_rank=1)("x", lambda: pytest.fail("must not load"))

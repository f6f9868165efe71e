import pytest
import torch

from lightning_dpipe.core.profile import Link
from lightning_dpipe.profiling.links import measure_links
from lightning_dpipe.runtime.distributed import DistTransport
from ranks import run_ranks

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")


def links(rank: int) -> tuple[Link, Link]:
    return measure_links(DistTransport(CPU), CPU)


def test_all_ranks_get_the_same_links_also_the_one_without_a_partner() -> None:
    results = run_ranks(links, 3)
    assert results[0] == results[1] == results[2]
    for link in results[0]:
        assert link.bytes_per_s > 1e6
        assert 0 <= link.latency_us < 1e6


def test_a_single_rank_measures_its_loopback() -> None:
    ((p2p, allreduce),) = run_ranks(links, 1)
    assert p2p.bytes_per_s > allreduce.bytes_per_s > 0

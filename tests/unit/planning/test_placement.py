"""Links and bytes of placed pipelines, against closed forms and the messages of real programs."""

import math
from dataclasses import replace

import pytest

from lightning_dpipe.core.errors import ClusterError, PlanError
from lightning_dpipe.core.plan import Plan, default_groups
from lightning_dpipe.core.program import Send, SendRows, StepShape
from lightning_dpipe.lowering.lower import lower
from lightning_dpipe.planning.network import network_of
from lightning_dpipe.planning.placement import (
    card_bytes,
    edges_of,
    groups_on,
    layouts,
    least,
    nodes_of,
    placed,
    traffic,
)
from lightning_dpipe.planning.search import make_plan, schedule_of
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile
from unit.planning.clusters import BETWEEN, INSIDE, cluster_of

FROZEN = (FrozenChain(name="vae", forward_us=(10,)),)
DTYPE_BYTES = {"float32": 4, "int64": 8}


def plan_of(num_stages: int, world_size: int, **options: object) -> Plan:
    profile = model_profile([100] * 8, frozen=FROZEN, trained_bytes=10**6)
    return make_plan(
        profile,
        world_size=world_size,
        batch_size=4,
        num_stages=num_stages,
        **options,  # type: ignore[arg-type]
    )


PROFILE = model_profile([100] * 8, frozen=FROZEN, trained_bytes=10**6)
MODEL_BYTES = 8 * 10**6


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 6, 8, 12, 24])
def test_layouts_hold_every_rank_once_with_rank_0_last_of_group_0(num_devices: int) -> None:
    found = layouts(24, num_devices, cluster_of(6))
    assert found[0] == default_groups(24, num_devices)
    assert len(set(found)) == len(found)
    for groups in found:
        assert sorted(rank for group in groups for rank in group) == list(range(24))
        assert groups[0][-1] == 0
        assert groups_on(nodes_of(groups, cluster_of(6)), cluster_of(6)) == groups


def test_stages_on_nodes_of_their_own_are_a_layout() -> None:
    assert layouts(8, 2, cluster_of(2)) == (
        ((1, 0), (3, 2), (5, 4), (7, 6)),
        ((4, 0), (5, 1), (6, 2), (7, 3)),
    )


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_pipelines_inside_nodes_leave_the_models_bytes_on_each_card(num_devices: int) -> None:
    plan = plan_of(num_devices, 16)
    expected = 2 * (4 - 1) * MODEL_BYTES // 4
    assert card_bytes(plan, PROFILE, cluster_of(4)) == (expected,) * 4


def test_stages_on_nodes_of_their_own_move_activations_and_no_gradients() -> None:
    plan = replace(plan_of(2, 8), groups=layouts(8, 2, cluster_of(2))[1])
    width_bytes, samples = 32, 4 * 8  # 8 floats; samples on the pipelines of the cluster
    rows = 2 * 16 * width_bytes  # `x` and what is encoded, to the stage on the other node
    activations = samples * width_bytes  # forward one way, gradient the other
    assert card_bytes(plan, PROFILE, cluster_of(2)) == (activations + rows,) * 2


def test_a_spare_node_moves_nothing() -> None:
    plan = plan_of(2, 8)
    assert card_bytes(plan, PROFILE, cluster_of(3))[2] == 0


@pytest.mark.parametrize("replicas", [(1, 1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("fill", [False, True])
def test_traffic_is_what_the_programs_send(replicas: tuple[int, ...], fill: bool) -> None:
    plan = plan_of(len(replicas), len(replicas), num_microbatches=3, fill=False)
    devices = iter(range(3))
    stages = tuple(
        replace(stage, devices=tuple(next(devices) for _ in range(r)))
        for stage, r in zip(plan.stages, replicas, strict=True)
    )
    plan = replace(plan, stages=stages, groups=((2, 1, 0),), batch_size=6)
    shape = StepShape(
        sizes=(6,) * 3,
        next_sizes=(6,) * 3 if fill else None,
        encoded=fill,
        self_conditioned=False,
    )
    found: dict[tuple[int, int], int] = {}
    for device, program in enumerate(lower(plan, schedule_of(plan), PROFILE.graph, shape)):
        for instruction in program.instructions:
            if isinstance(instruction, Send | SendRows):
                message = instruction.message
                edge = (device, plan.groups[0].index(message.channel.target))
                size = math.prod(message.shape) * DTYPE_BYTES[message.dtype]
                found[edge] = found.get(edge, 0) + size
    assert found == traffic(plan, PROFILE)


def test_devices_of_a_node_share_its_card_when_they_reduce() -> None:
    cluster = cluster_of(2)
    for num_devices, share in ((1, 1), (2, 2), (4, 4)):
        plan = plan_of(num_devices, 8)
        legs = placed(PROFILE, plan, cluster).legs(8 // num_devices, 0)
        inside = 4 // num_devices
        assert legs == ((inside, INSIDE), (2, replace(BETWEEN, bytes_per_s=4 * 10**9 // share)))


def test_in_one_node_gradients_take_one_ring_inside() -> None:
    assert placed(PROFILE, plan_of(2, 4), cluster_of(1)).legs(2, 0) == ((2, INSIDE),)


def test_messages_of_all_pipelines_share_the_cards_they_cross() -> None:
    cluster = cluster_of(2, nic=2 * 10**9)
    nodes = nodes_of(layouts(8, 2, cluster)[1], cluster)
    assert edges_of(nodes, cluster)[0, 1] == replace(BETWEEN, bytes_per_s=5 * 10**8)
    one = ((0, 1), (0, 0), (0, 1), (1, 1))
    assert edges_of(one, cluster)[0, 1] == BETWEEN  # two flows, half a card each


def test_links_of_known_stages_are_never_below_the_bound_of_their_groups() -> None:
    cluster = cluster_of(3)
    for num_stages in (1, 2, 3, 4, 6):
        plan = plan_of(num_stages, 12)
        for groups in layouts(12, num_stages, cluster):
            at = replace(plan, groups=groups)
            low, high = least(PROFILE, groups, cluster), placed(PROFILE, at, cluster)
            bound_us = simulate(plan, schedule_of(plan), low).end_us
            assert bound_us <= simulate(plan, schedule_of(plan), high).end_us


def test_a_simulated_message_between_nodes_takes_their_link() -> None:
    wide = model_profile([100] * 8, frozen=FROZEN, trained_bytes=0, width=10**4)
    plan = make_plan(wide, world_size=4, batch_size=4, num_stages=2, num_microbatches=1)
    cluster = cluster_of(2, 2)
    inside, across = (
        simulate(plan, schedule_of(plan), placed(wide, replace(plan, groups=groups), cluster))
        for groups in layouts(4, 2, cluster)
    )
    message = 8 * 40_000  # samples x bytes; one forward and one gradient on the critical path
    extra = BETWEEN.transfer_us(message) - INSIDE.transfer_us(message)
    assert across.end_us - inside.end_us == 2 * extra


def test_a_world_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(PlanError, match="16 ranks do not fit cluster 'test' of 2 x 4 devices"):
        network_of(cluster_of(2)).layouts(16, 2)
    with pytest.raises(ClusterError, match="rank 9"):
        card_bytes(plan_of(2, 16), PROFILE, cluster_of(2))

"""Devices of unequal speed: told apart, planned together, and training as one process does."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.fleet import fleet, kinds_of
from lightning_dpipe.core.jsonio import from_data, to_data
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.profiling import store
from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.runtime.reduce import open_reducer
from lightning_dpipe.strategy import devices
from lightning_dpipe.strategy.assemble import PipelineSession
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.planned import PlanOptions, Setting, build
from oracle import accumulate, encode, joint, whole
from pipeline import make_plan
from ranks import run_ranks
from small import small_batch, small_unet
from synthetic import model_profile
from toy import Toy

CPU = torch.device("cpu")
ROWS = 6


def test_kinds_go_by_name_and_only_if_asked_by_time() -> None:
    names = ("L40", "A100", "L40", "L40")
    times = ((100, 50), (50, 25), (114, 50), (116, 50))
    assert kinds_of(names, times, None) == (0, 1, 0, 0)
    assert kinds_of(names, times, 0.15) == (0, 1, 0, 2)
    assert kinds_of(("cpu",) * 3, ((10,), (1000,), (10,)), None) == (0, 0, 0)


def test_an_unknown_way_to_tell_devices_apart_is_refused() -> None:
    with pytest.raises(PlanError, match="choose one of: 'name', 'time'"):
        PlanOptions(device_kinds="colour").check(2)


def test_sizes_for_free_shares_reach_from_one_row_to_the_local_batch() -> None:
    found = devices.widened({"net": (3, 6), "vae": (12,)}, 12)
    assert found == {"net": (1, 2, 3, 4, 6, 8, 12), "vae": (1, 2, 4, 8, 12)}


def plan_rank(rank: int, cache: str, names: tuple[str, ...], options: PlanOptions):
    """What `build` makes of devices that are called `names`; the profile's kinds, the plan."""
    os.environ["XDG_CACHE_HOME"] = cache
    module = Toy()
    module.configure_model()
    setting = Setting(
        world_size=len(names), batch_size=4, device=CPU, precision="32-true", autocast=None,
        fill=True,
    )  # fmt: skip
    with (
        mock.patch.object(store, "device_name", return_value=names[rank]),
        mock.patch.object(devices, "device_name", return_value=names[rank]),
    ):
        built = build(module.spec, options, setting, HostLink())
    assert built.profile is not None
    return built.profile.kinds, [x.device for x in built.profile.others], to_data(built.plan)


@pytest.mark.dist
def test_ranks_with_devices_of_two_names_plan_for_both(tmp_path: Path) -> None:
    options = PlanOptions(num_stages=1)
    told = run_ranks(plan_rank, 2, str(tmp_path), ("L40", "A100"), options, timeout_s=200)
    assert told[0] == told[1]
    kinds, others, data = told[0]
    assert (kinds, others) == ((0, 1), ["A100"])
    plan = from_data(Plan, data)
    assert (len(plan.groups), plan.stages[0].devices) == (1, (0, 1))


@pytest.mark.dist
def test_ranks_with_equal_devices_plan_as_ever(tmp_path: Path) -> None:
    options = PlanOptions(num_stages=1)
    told = run_ranks(plan_rank, 2, str(tmp_path), ("L40", "L40"), options, timeout_s=200)
    assert told[0] == told[1]
    kinds, _, data = told[0]
    assert kinds == ()
    assert from_data(Plan, data).groups == ((0,), (1,))


def train_rank(rank: int, data: object) -> tuple[float, dict[str, torch.Tensor]]:
    """Two steps over gloo, gradients summed over both."""
    plan = from_data(Plan, data)
    spec = small_unet(3)
    graph = trace(spec)
    session = PipelineSession(
        graph=graph, binding=bind(spec, graph), plan=plan, rank=rank,
        transport=DistTransport(CPU), device=CPU, seed=0,
        reducer=open_reducer(plan.replica_sets, rank, CPU),
    )  # fmt: skip
    sizes, loss = (ROWS, ROWS), 0.0
    for step in (0, 1):
        result = session.step(
            small_batch(ROWS, seed=10 * step + rank), sizes=sizes, batch_index=step,
            loss_scale=1 / (4 * ROWS), reduce=step == 1,
            next_batch=small_batch(ROWS, seed=10 + rank) if step == 0 else None,
            next_sizes=sizes if step == 0 else None,
        )  # fmt: skip
        loss += sum(float(x) for x in result.loss_sum.values())
    session.wait_reduction()
    session.close()
    return loss, gradients(spec)


def gradients(spec) -> dict[str, torch.Tensor]:
    return {
        f"{layer.name}.{i}": p.grad
        for layer in spec.backbones[0].layers
        for i, p in enumerate(layer.parameters())
        if p.requires_grad
    }


@pytest.mark.dist
@pytest.mark.parametrize("shares", [(1, 2), (5, 1)])
def test_two_ranks_with_unequal_shares_train_as_one_process(shares) -> None:
    plan = make_plan(
        trace(small_unet(3)), (), num_microbatches=2, batch_size=ROWS, replicas=(2,),
        shares=(shares,),
    )  # fmt: skip
    found = run_ranks(train_rank, 2, to_data(plan), timeout_s=200)
    batches = [rows_of_step(step) for step in (0, 1)]
    whole_loss, wanted = one_process(batches)
    assert sum(x for x, _ in found) == pytest.approx(whole_loss, rel=1e-6)
    for name in wanted:
        for _, grads in found:
            difference = float((grads[name] - wanted[name]).norm() / wanted[name].norm())
            assert difference < 1e-5, name
    # Kernels round differently for other numbers of rows; with the same ones nothing differs.
    parts = [one_process([own_rows(plan, device, x) for x in batches])[1] for device in (0, 1)]
    for name in wanted:
        for _, grads in found:
            assert torch.equal(grads[name], parts[0][name] + parts[1][name]), name


def rows_of_step(step: int) -> dict[str, torch.Tensor]:
    """Everything both ranks encode for a step, in the order of samples."""
    spec = small_unet(3)
    bind(spec, trace(spec))
    encoded = [
        encode(spec, small_batch(ROWS, seed=10 * step + rank), whole(spec.frozen, ROWS))
        for rank in (0, 1)
    ]
    return joint(encoded)


def own_rows(plan: Plan, device: int, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A device's share of each of the two micro-batches."""
    first, last = plan.stages[0].rows_on(device, ROWS)
    return {
        name: torch.cat([part[first:last] for part in rows.tensor_split(2)])
        for name, rows in named.items()
    }


def one_process(batches) -> tuple[float, dict[str, torch.Tensor]]:
    spec = small_unet(3)
    bind(spec, trace(spec))
    loss = sum(accumulate(spec, named, 2, 1 / (4 * ROWS)) for named in batches)
    return loss, gradients(spec)


def test_a_profile_of_several_kinds_is_for_its_own_world() -> None:
    profile = fleet([model_profile([1]), model_profile([2])], (0, 1))
    assert [profile.on(rank).forward_us("net", 0, 1, 1) for rank in (0, 1)] == [1, 2]

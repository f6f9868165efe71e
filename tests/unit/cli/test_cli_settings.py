"""Options that several parts share, and those that a command would ignore."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_dpipe.cli.__main__ import main
from lightning_dpipe.cli.paths import config_dir
from lightning_dpipe.cli.settings import settle


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", ["recipe=smoke", *overrides])


def test_sizes_reach_the_parts_that_read_them() -> None:
    config = composed("batch_size=6", "world_size=4", "trainer.num_nodes=2")
    settle(config, "train")
    assert (config.data.batch_size, config.trainer.devices) == (6, 2)
    untouched = composed()
    settle(untouched, "train")
    assert untouched == composed()


def test_a_profile_is_the_strategys_where_a_model_runs() -> None:
    config = composed("profile=p.json")
    settle(config, "train")
    assert config.strategy.profile == "p.json"


@pytest.mark.parametrize(
    ("command", "overrides", "message"),
    [
        ("train", ["data.batch_size=0"], "data.batch_size=0; a batch has at least 1 sample"),
        ("plan", ["data.batch_size=abc"], "data.batch_size=abc; a batch has at least 1 sample"),
        ("plan", ["trainer.devices=0", "cluster=cpu_2"], "trainer.devices=0; give at least 1"),
        ("train", ["trainer.devices=-3"], "trainer.devices=-3; give at least 1, or -1 for all"),
        ("train", ["strategy.cuts=3"], "cuts=3; give the first layer of every stage"),
        ("train", ["strategy.replan_every_n_steps=0"], "replan_every_n_steps=0; give a whole"),
        ("train", ["batch_size=0"], "batch_size=0; give a whole number of at least 1"),
        ("train", ["world_size=-2"], "world_size=-2; give a whole number"),
        ("train", ["trainer.max_steps=0"], "trainer.max_steps=0 trains nothing"),
        ("train", ["world_size=3", "trainer.num_nodes=2"], "world_size=3 on trainer.num_nodes=2"),
        ("train", ["cluster=l40_8"], "cluster=l40_8 is for machines that are not here"),
        ("verify", ["cluster=l40_8"], "`dpipe verify` runs on this one"),
        ("train", ["num_steps=3"], "num_steps=3 is for `dpipe sample`"),
        ("plan", ["out=x.json"], "out=x.json is for `dpipe profile`"),
        ("profile", ["profile=x.json"], "`dpipe profile` makes one; use out=FILE"),
        ("train", ["profile=x.json", "strategy=ddp"], "profile= needs strategy=diffusionpipe"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_one_line(
    command: str, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "recipe=smoke", *overrides]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1

"""W&B: offline without a key, never a key in the logged config, one run a job."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_dpipe.cli.logger import build_logger, has_wandb_key, loggable


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_a_key_is_found_in_the_environment_and_in_netrc_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine example.org login user password x\n")
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert has_wandb_key()
    (tmp_path / "netrc").write_text("not a netrc\n")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_wandb_key()


@pytest.mark.parametrize(
    ("mode", "key", "offline", "expected"),
    [
        (None, None, None, True),
        (None, "x", None, False),
        ("offline", "x", None, True),
        (None, "x", True, True),
        (None, None, False, False),
    ],
)
def test_offline_unless_there_is_a_key_or_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mode: str | None,
    key: str | None,
    offline: bool | None,
    expected: bool,
) -> None:
    for name, value in (("WANDB_MODE", mode), ("WANDB_API_KEY", key)):
        if value is not None:
            monkeypatch.setenv(name, value)
    target = "lightning.pytorch.loggers.WandbLogger"
    group = {"_target_": target, "project": "p", "save_dir": str(tmp_path), "offline": offline}
    logger = build_logger(OmegaConf.create({"logger": group}))
    assert logger is not None
    assert logger._offline is expected  # type: ignore[attr-defined]


def test_no_logger_group_means_no_logger() -> None:
    assert build_logger(OmegaConf.create({"logger": {}})) is None
    assert build_logger(OmegaConf.create({"logger": None})) is None


def test_what_is_logged_is_resolved_and_holds_no_secret() -> None:
    config = OmegaConf.create(
        {"lr": 0.1, "copy": "${lr}", "logger": {"wandb_api_key": "abc"}, "list": [{"Password": 1}]}
    )
    assert loggable(config) == {
        "lr": 0.1,
        "copy": 0.1,
        "logger": {"wandb_api_key": "<hidden>"},
        "list": [{"Password": "<hidden>"}],
    }

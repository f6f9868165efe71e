"""Choose the logger: Weights & Biases, offline unless the user is logged in.

In: the config group `logger`. Out: a Lightning logger, or None. Keys are only ever looked up where
W&B itself looks (environment, netrc), never read from or written to a config.
"""

import netrc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

SECRET_WORDS = ("api_key", "apikey", "password", "secret", "token_id", "access_token")


def has_wandb_key() -> bool:
    """Whether W&B would find a key: in WANDB_API_KEY, or in the netrc file for its host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return host is not None and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False  # no such file, or one that W&B could not read either


def build_logger(config: DictConfig) -> Logger | None:
    """Instantiate ``config.logger``; `offline` null is decided here, WANDB_MODE wins over it."""
    group = config.get("logger")
    if not group or "_target_" not in group:
        return None
    chosen = dict(group)
    if "offline" in chosen and chosen["offline"] is None:
        mode = os.environ.get("WANDB_MODE")
        chosen["offline"] = mode == "offline" if mode else not has_wandb_key()
    logger: Logger = instantiate(chosen)
    return logger


def loggable(config: DictConfig) -> dict[str, Any]:
    """The whole resolved config, with the value of anything that is named like a secret hidden."""
    found: dict[str, Any] = _redacted(OmegaConf.to_container(config, resolve=True))
    return found


def _redacted(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {
            key: "<hidden>" if _is_secret(str(key)) else _redacted(value)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [_redacted(value) for value in node]
    return node


def _is_secret(key: str) -> bool:
    return any(word in key.lower() for word in SECRET_WORDS)


@contextmanager
def finished_run() -> Iterator[None]:
    """End the W&B run with the job, marked failed if it raises: jobs must not share one."""
    import wandb

    try:
        yield
    except BaseException:
        wandb.finish(exit_code=1)
        raise
    wandb.finish()

"""What a recipe says about its own data set, when the command line chooses another one.

In: a composed config. Out: the config without ``data.num_samples`` and the like, if ``data=NAME``
was given and NAME has no such value. A recipe's values are merged whatever data is chosen.
"""

import logging

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_dpipe.cli.paths import config_dir

log = logging.getLogger(__name__)

OWN = "custom"
"""The choice for a user's own class, whose values cannot be known."""


def drop_leftovers(config: DictConfig) -> None:
    """Remove values that only the recipe's own data set knows, and say so."""
    if not HydraConfig.initialized():
        return
    given = {text.lstrip("+~").partition("=")[0] for text in HydraConfig.get().overrides.task}
    name = HydraConfig.get().runtime.choices.get("data")
    path = config_dir() / "data" / f"{name}.yaml"
    if "data" not in given or name == OWN or not path.is_file():
        return
    known = set(OmegaConf.load(path))
    for key in [k for k in config.data if k not in known and f"data.{k}" not in given]:
        log.info("the recipe's data.%s is for another data set: not used for data=%s", key, name)
        with open_dict(config.data):
            del config.data[key]

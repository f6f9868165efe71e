"""What several parts of a config mean together: sizes, and options of other commands.

In: a composed config and the command it is for. Out: the config with ``batch_size=`` and
``world_size=`` put where the parts read them, or a refusal by name.
"""

from omegaconf import DictConfig

from lightning_dpipe.cli.leftovers import drop_leftovers
from lightning_dpipe.core.errors import DPipeError

PLANS_ELSEWHERE = ("plan", "profile")
DRAWING = {
    "prompts": None,
    "mode": "exact",
    "patches": None,
    "warmup": 1,
    "num_steps": None,
    "guidance": None,
}
"""Options of ``dpipe sample`` and what they are by default."""
WRITES = ("profile", "export", "sample")


def settle(config: DictConfig, command: str) -> None:
    """Spread sizes over the config, and refuse options that `command` would ignore.

    Raises:
        DPipeError: An option has no effect here, or a number is none.
    """
    if config.get("cluster") and command not in PLANS_ELSEWHERE:
        raise DPipeError(
            f"cluster={config.cluster.name} is for machines that are not here; `dpipe {command}` "
            "runs on this one: leave it out, or use dpipe plan"
        )
    if config.out is not None and command not in WRITES:
        theirs = ", ".join(f"`dpipe {name}`" for name in WRITES)
        raise DPipeError(f"out={config.out} is for {theirs}; leave it out")
    for name, default in DRAWING.items():
        if config[name] != default and command != "sample":
            raise DPipeError(f"{name}={config[name]} is for `dpipe sample`; leave it out")
    if config.profile is not None and command == "profile":
        raise DPipeError(f"profile={config.profile}: `dpipe profile` makes one; use out=FILE")
    if config.profile is not None and command != "plan":
        if "profile" not in config.strategy:
            raise DPipeError("profile= needs strategy=diffusionpipe; leave it out")
        config.strategy.profile = config.profile
    drop_leftovers(config)
    _check_numbers(config)
    if config.batch_size is not None and "batch_size" in config.data:
        config.data.batch_size = config.batch_size
    if config.world_size is not None and not config.get("cluster"):
        nodes = config.trainer.num_nodes
        if config.world_size % nodes:
            raise DPipeError(
                f"world_size={config.world_size} on trainer.num_nodes={nodes}: the ranks must "
                "divide evenly over the nodes"
            )
        config.trainer.devices = config.world_size // nodes


def _check_numbers(config: DictConfig) -> None:
    for name in ("batch_size", "world_size"):
        value = config[name]
        if value is not None and (not isinstance(value, int) or value < 1):
            raise DPipeError(f"{name}={value}; give a whole number of at least 1, or leave it out")
    in_data = config.data.get("batch_size")
    if in_data is not None and (not isinstance(in_data, int) or in_data < 1):
        raise DPipeError(f"data.batch_size={in_data}; a batch has at least 1 sample per device")
    if config.trainer.get("max_steps") == 0:
        raise DPipeError(
            "trainer.max_steps=0 trains nothing; give a number of steps, or -1 for no limit "
            "(`dpipe plan` says what would run)"
        )

"""Where the Hydra config is: inside the installed package, else in the repository checkout."""

from pathlib import Path

from lightning_dpipe.core.errors import DPipeError

PACKAGE = Path(__file__).resolve().parents[1]


def config_dir() -> Path:
    """Absolute path of the config root.

    Raises:
        DPipeError: There is none: the install is broken.
    """
    for root in (PACKAGE / "conf", PACKAGE.parents[1] / "conf"):
        if (root / "config.yaml").is_file():
            return root
    raise DPipeError(
        f"no config in {PACKAGE / 'conf'} nor in {PACKAGE.parents[1] / 'conf'}; "
        "install lightning-dpipe again (pip install --force-reinstall lightning-dpipe)"
    )


def recipe_names() -> tuple[str, ...]:
    """Recipes that ship with the package."""
    return tuple(sorted(path.stem for path in (config_dir() / "recipe").glob("*.yaml")))

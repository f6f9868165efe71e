"""The ``dpipe`` command: choose a subcommand, keep its own flags from Hydra, report errors.

In: argv. Out: an exit code (0 done, 1 failed, 2 bad input). Imports neither torch nor Hydra until
a subcommand needs them, so that ``dpipe --help`` answers at once.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dpipe.cli.paths import config_dir, recipe_names
from lightning_dpipe.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand: a module with ``run(config, flags)``, and the flags it adds to Hydra's.

    One that is `plain` needs no config: its module has ``run(arguments)``, which returns the code.
    """

    name: str
    help: str
    flags: tuple[str, ...] = ()
    plain: bool = False

    @property
    def module(self) -> str:
        """Where the work is done; imported only when chosen."""
        return f"lightning_dpipe.cli.{self.name}"


COMMANDS = {
    command.name: command
    for command in (
        Command(name="train", help="train a recipe; -m sweeps over comma separated values"),
        Command(
            name="plan",
            help="plan and predict without training, here or for a cluster=NAME (--json)",
            flags=("--json",),
        ),
        Command(
            name="profile",
            help="measure a recipe's layers (estimate them with cluster=NAME); out=FILE (--json)",
            flags=("--json",),
        ),
        Command(
            name="simulate",
            help="predict a plan from files: PLAN PROFILE [--json] [--png FILE]",
            plain=True,
        ),
        Command(
            name="export",
            help="a checkpoint (ckpt_path=FILE) as a folder for from_pretrained (out=FOLDER)",
        ),
        Command(
            name="sample",
            help="images of a checkpoint (ckpt_path=FILE, prompts=FILE) in a folder (out=FOLDER)",
        ),
        Command(
            name="verify",
            help="one step under the plan against one process: same loss, same gradients? (--json)",
            flags=("--json",),
        ),
        Command(name="ls", help="recipes and config groups, and what they are", plain=True),
        Command(
            name="cp",
            help="copy a recipe out, to change it: RECIPE [recipe/FILE.yaml] [--force]",
            plain=True,
        ),
        Command(
            name="doctor",
            help="check a data set: every fault, and what training does about it (--json, --all)",
            flags=("--json", "--all"),
        ),
        Command(
            name="circles",
            help="write drawn circles with captions and hints: FOLDER [--num N] [--size PIXELS]",
            plain=True,
        ),
    )
}


def usage() -> str:
    """Text of ``dpipe --help``."""
    commands = "\n".join(f"  {c.name:<10}{c.help}" for c in COMMANDS.values())
    recipes = ", ".join(recipe_names())
    return (
        "usage: dpipe <command> [recipe=NAME] [key=value ...]\n\n"
        f"commands:\n{commands}\n\n"
        f"recipes: {recipes}\n\n"
        "dpipe <command> --help     the composed config, every value of which can be overridden\n"
        "dpipe <command> --cfg job  the config as YAML (--resolve: with values put in)\n"
        "--config-dir DIR           a folder with your own groups and recipes\n"
        f"\nlightning-dpipe {__version__}, config in {config_dir()}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dpipe``; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(__version__)
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        print(
            f"dpipe: {arguments[0]!r} is not a command; choose one of {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    if command.plain:
        code: int = importlib.import_module(command.module).run(arguments[1:])
        return code
    from lightning_dpipe.cli.app import run_app

    flags = tuple(a for a in arguments[1:] if a in command.flags)
    rest = [a for a in arguments[1:] if a not in command.flags]

    def task(config: Any) -> Any:
        from lightning_dpipe.cli.settings import settle

        settle(config, command.name)
        return importlib.import_module(command.module).run(config, flags)

    return run_app(
        task,
        prefix=(command.name, *flags),
        arguments=rest,
    )


if __name__ == "__main__":
    sys.exit(main())

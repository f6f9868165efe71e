"""``dpipe export``: a checkpoint as a folder for ``from_pretrained``.

In: the config of the run (``recipe=``, the same overrides), ``ckpt_path=FILE`` and ``out=FOLDER``.
Out: the folder; see `strategy.export`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from hydra.utils import to_absolute_path
from omegaconf import DictConfig

from lightning_dpipe.cli.parts import build_module
from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.strategy.export import export


def run(config: DictConfig, flags: Sequence[str] = ()) -> None:
    """Load, write and say what was written.

    Raises:
        DPipeError: No checkpoint or folder is given, or they cannot be used.
    """
    for name, value in (("ckpt_path", config.ckpt_path), ("out", config.out)):
        if value is None:
            raise DPipeError(f"dpipe export needs {name}=; give ckpt_path=FILE and out=FOLDER")
    source, folder = Path(to_absolute_path(config.ckpt_path)), Path(to_absolute_path(config.out))
    if not source.is_file():
        raise DPipeError(f"ckpt_path={source} does not exist")
    module = build_module(config)
    module.configure_model()
    checkpoint = torch.load(source, map_location="cpu", weights_only=True)
    done = export(module, checkpoint, folder)
    print(f"parts     {', '.join((*done.parts, *done.averaged))}")
    if done.pipeline is not None:
        print(f"pipeline  diffusers.{done.pipeline}.from_pretrained({str(folder)!r})")
    print(f"folder    {folder}")

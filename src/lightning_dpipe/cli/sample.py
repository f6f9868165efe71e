"""``dpipe sample``: images of a checkpoint, drawn in this process.

In: the config of the run, ``ckpt_path=FILE``, ``out=FOLDER``; ``prompts=FILE`` with a caption (or
label) a line, by default the held-out ones; ``mode=``, ``patches=``, ``warmup=``, ``num_steps=``,
``guidance=``.
Out: a PNG an image, ``grid.png``, ``samples.json``.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers
import lightning as L
import torch
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import default_collate

from lightning_dpipe.cli.console import configure_console
from lightning_dpipe.cli.parts import build_data, build_module
from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.sampling.grid import save_grid, to_picture
from lightning_dpipe.sampling.plan import Mode
from lightning_dpipe.strategy.callbacks.samples import captions_of
from lightning_dpipe.strategy.callbacks.whole import whole_weights
from lightning_dpipe.strategy.checkpoint import load_model_state
from lightning_dpipe.strategy.draw import Drawing, draw
from lightning_dpipe.strategy.export import average_of
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.prompts import prompt_fields, read_prompts
from lightning_dpipe.version import __version__


def run(config: DictConfig, flags: Sequence[str] = ()) -> None:
    """Load, draw and write.

    Raises:
        DPipeError: Something is missing, or does not fit the model.
    """
    if config.out is None:
        raise DPipeError("dpipe sample needs out=; give out=FOLDER")
    folder = Path(to_absolute_path(config.out))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DPipeError(f"{folder} is no empty folder; choose a new one to draw into")
    drawing = _drawing(config)
    prompts = None
    if config.prompts is not None:
        prompts = read_prompts(Path(to_absolute_path(config.prompts)))
    source = _checkpoint(config)
    configure_console()
    L.seed_everything(config.seed, workers=True, verbose=False)
    module, data = build_module(config), build_data(config)
    module.configure_model()
    checkpoint = _load(module, source)
    prompts, fields = _asked(config, module, data, prompts)
    on_gpu = config.trainer.accelerator != "cpu" and torch.cuda.is_available()
    module.to("cuda" if on_gpu else "cpu")
    print(f"drawing   {len(prompts)} images, {drawing.num_steps} steps, mode {drawing.mode.value}")
    began = time.monotonic()
    with whole_weights(module, average_of(checkpoint)):
        images = draw(module, fields, drawing).cpu()
    print(f"drawn     in {time.monotonic() - began:.1f} s")
    _write(folder, images, prompts)
    facts: dict[str, Any] = {
        "checkpoint": None if source is None else source.name,
        "global_step": checkpoint.get("global_step"),
        "averaged_weights": bool(average_of(checkpoint)),
        "seed": module.seed,
        "plan": {**asdict(drawing), "mode": drawing.mode.value},
        "versions": {
            "lightning-dpipe": __version__,
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
        },
        "samples": [{"file": _file(i), "prompt": prompt} for i, prompt in enumerate(prompts)],
    }
    text = json.dumps(facts, indent=2, ensure_ascii=False)
    (folder / "samples.json").write_text(text + "\n", encoding="utf-8")
    print(f"folder    {folder}")


def _drawing(config: DictConfig) -> Drawing:
    """How to draw, by default as the recipe's sample grid."""
    grid: Mapping[str, Any] = (config.get("callbacks") or {}).get("sample_grid") or {}
    num_steps = config.num_steps if config.num_steps is not None else grid.get("num_steps", 30)
    guidance = config.guidance if config.guidance is not None else grid.get("guidance", 2.0)
    modes = [mode.value for mode in Mode]
    if config.mode not in modes:
        raise DPipeError(f"mode={config.mode}; modes are {', '.join(modes)}")
    mode = Mode(config.mode)
    patches = config.patches if config.patches is not None else 1
    if mode is Mode.PIPEFUSION and config.patches is None:
        raise DPipeError("mode=pipefusion needs patches=N; its images depend on it")
    if mode is Mode.EXACT and patches != 1:
        raise DPipeError(f"patches={patches} with mode=exact; patches need mode=pipefusion")
    for name, value in (("num_steps", num_steps), ("patches", patches), ("warmup", config.warmup)):
        if not isinstance(value, int) or value < 1:
            raise DPipeError(f"{name}={value}; give a whole number of at least 1")
    if not isinstance(guidance, int | float):
        raise DPipeError(f"guidance={guidance}; give a number, 1 for none")
    return Drawing(
        num_steps=num_steps,
        guidance=float(guidance),
        mode=mode,
        patches=patches,
        warmup=config.warmup,
    )


def _checkpoint(config: DictConfig) -> Path | None:
    """The file to load; None for a pretrained model as it is."""
    if config.ckpt_path is None:
        if config.model.get("pretrained") is None:
            raise DPipeError(
                "dpipe sample needs ckpt_path=; this model has random weights without one"
            )
        return None
    source = Path(to_absolute_path(config.ckpt_path))
    if not source.is_file():
        raise DPipeError(f"ckpt_path={source} does not exist")
    return source


def _load(module: DiffusionModule, source: Path | None) -> Mapping[str, Any]:
    if source is None:
        return {}
    checkpoint: Mapping[str, Any] = torch.load(source, map_location="cpu", weights_only=True)
    try:
        load_model_state(module, checkpoint["state_dict"], strict=True)
    except (KeyError, RuntimeError) as error:
        raise DPipeError(f"{source} is not of this model: {error}") from error
    return checkpoint


def _asked(
    config: DictConfig, module: DiffusionModule, data: Any, prompts: tuple[str, ...] | None
) -> tuple[tuple[str, ...], Mapping[str, Tensor]]:
    """Prompts and their fields; of the held-out samples as many as the recipe's grid shows."""
    if prompts is not None:
        return prompts, prompt_fields(module, data, prompts)
    data.prepare_data()
    data.setup("fit")
    dataset = data.val_dataloader().dataset
    grid: Mapping[str, Any] = (config.get("callbacks") or {}).get("sample_grid") or {}
    count = min(grid.get("num_samples", 24), len(dataset))
    fields: dict[str, Tensor] = default_collate([dataset[i] for i in range(count)])
    return tuple(captions_of(data, fields)), fields


def _write(folder: Path, images: Tensor, prompts: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        to_picture(image).save(folder / _file(i), format="PNG")
    save_grid(folder / "grid.png", {"drawn": images}, prompts)


def _file(index: int) -> str:
    return f"{index:05d}.png"

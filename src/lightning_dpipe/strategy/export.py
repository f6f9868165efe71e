"""A checkpoint as a folder that diffusers and transformers load with ``from_pretrained``.

In:     a configured module on the CPU and a checkpoint of it (any stage count wrote the same file).
Out:    a folder per part in diffusers' layout (``unet``, ``vae``, ``text_encoder``, ``scheduler``,
        ...), averaged weights beside the raw ones (``unet_ema``), and a model card. Where the
        module knows its pipeline, the folder is one: ``DiffusionPipeline.from_pretrained(folder)``.
        Of a model with LoRA only the adapters: ``pytorch_lora_weights.safetensors`` for
        ``load_lora_weights(folder)``, averaged ones in ``ema/``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.models.lora import has_lora, save_lora
from lightning_dpipe.strategy.callbacks.whole import whole_weights
from lightning_dpipe.strategy.checkpoint import load_model_state
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.version import __version__

FOLDERS: Mapping[str, str] = {
    "text": "text_encoder",
    "text_2": "text_encoder_2",
    "text_3": "text_encoder_3",
    "dit": "transformer",
}
"""diffusers' names of parts, where a module's attribute is called otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: folders of raw parts and of averaged ones, and the pipeline's class."""

    parts: tuple[str, ...]
    averaged: tuple[str, ...]
    pipeline: str | None
    lora: bool = False


def export(module: DiffusionModule, checkpoint: Mapping[str, Any], folder: Path) -> Exported:
    """Write the folder.

    Args:
        module: Of the checkpoint's model, after ``configure_model``.
        checkpoint: What ``torch.load`` read.
        folder: Made if need be; must be empty, so that nothing of another model stays in it.

    Raises:
        DPipeError: The folder holds files, the module has no part that can be saved, or the
            checkpoint is of another model.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DPipeError(f"{folder} is not empty; choose a new folder to export to")
    parts: dict[str, Any] = {n: part for n, part in module.named_children() if _saves(part)}
    if not parts:
        raise DPipeError(
            f"{type(module).__name__} has no part with save_pretrained(): only models of diffusers "
            "and transformers can be exported"
        )
    try:
        load_model_state(module, checkpoint["state_dict"], strict=True)
    except (KeyError, RuntimeError) as error:
        raise DPipeError(f"the checkpoint is not of this model: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    adapted = [part for part in parts.values() if has_lora(part)]
    done = (
        _save_adapters(module, adapted[0], average_of(checkpoint), folder)
        if adapted
        else _save_whole(module, parts, average_of(checkpoint), folder)
    )
    (folder / "README.md").write_text(_card(module, checkpoint, done), encoding="utf-8")
    return done


def _save_adapters(
    module: DiffusionModule, part: Any, average: Mapping[str, Tensor], folder: Path
) -> Exported:
    """Save what LoRA trained; all else is as in the model it was trained on."""
    save_lora(part, folder)
    if average:
        with whole_weights(module, average):
            save_lora(part, folder / "ema")
    file = "pytorch_lora_weights.safetensors"
    averaged = (f"ema/{file}",) if average else ()
    return Exported(parts=(file,), averaged=averaged, pipeline=None, lora=True)


def _save_whole(
    module: DiffusionModule,
    parts: Mapping[str, Any],
    average: Mapping[str, Tensor],
    folder: Path,
) -> Exported:
    for name, part in parts.items():
        part.save_pretrained(folder / _folder(name))
    scheduler: Any = getattr(module, "scheduler", None)
    if scheduler is not None:
        scheduler.save_pretrained(folder / "scheduler")
    pipeline = module.to_pipeline()
    if pipeline is not None:
        pipeline.save_pretrained(folder)
    averaged = _save_averaged(module, parts, average, folder)
    return Exported(
        parts=tuple(map(_folder, parts)),
        averaged=averaged,
        pipeline=None if pipeline is None else type(pipeline).__name__,
    )


def _save_averaged(
    module: DiffusionModule,
    parts: Mapping[str, Any],
    average: Mapping[str, Tensor],
    folder: Path,
) -> tuple[str, ...]:
    """Save the parts that have averaged weights a second time, with these."""
    found = []
    with whole_weights(module, average):
        for name, part in parts.items():
            if any(weight.startswith(f"{name}.") for weight in average):
                found.append(f"{_folder(name)}_ema")
                part.save_pretrained(folder / found[-1])
    return tuple(found)


def average_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The EMA callback's weights, if the run had it."""
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, Mapping) and isinstance(state.get("average"), Mapping):
            average: Mapping[str, Tensor] = state["average"]
            return average
    return {}


def _saves(part: nn.Module) -> bool:
    return callable(getattr(part, "save_pretrained", None))


def _folder(name: str) -> str:
    return FOLDERS.get(name, name)


def _card(module: DiffusionModule, checkpoint: Mapping[str, Any], done: Exported) -> str:
    """A model card: what is in the folder, and how it came about."""
    trained = [f"`{b.name}`" for b in module.spec.backbones]
    size = sum(p.numel() for p in module.parameters() if p.requires_grad)
    lines = [
        "---",
        "library_name: diffusers",
        "tags: [lightning-dpipe]",
        "---",
        f"# {type(module).__name__}",
        "",
        f"Trained: {', '.join(trained)} ({size / 1e6:.1f} M weights), "
        f"{checkpoint.get('global_step', 'unknown')} steps, seed {module.seed}.",
        "",
        f"Parts: {', '.join(done.parts)}.",
    ]
    run: Mapping[str, Any] = checkpoint.get("dpipe_run", {})
    for label, key in (
        ("Recipe", "recipe"),
        ("Training samples", "num_samples"),
        ("Samples per step", "samples_per_step"),
        ("Commit of lightning-dpipe", "commit"),
    ):
        if run.get(key) is not None:
            lines += ["", f"{label}: {run[key]}"]
    lines.append("")
    if done.averaged:
        lines.append(f"Averaged weights (EMA): {', '.join(done.averaged)}.")
    if done.lora:
        lines += ["", "    pipeline_of_the_base_model.load_lora_weights(FOLDER)"]
    if done.pipeline is not None:
        lines += ["", f"    diffusers.{done.pipeline}.from_pretrained(FOLDER)"]
    lines += [
        "",
        f"Written by lightning-dpipe {__version__} with diffusers {diffusers.__version__} and "
        f"torch {torch.__version__}. Add what the data were, and the licence.",
        "",
    ]
    return "\n".join(lines)

"""Low-rank adapters on a backbone: only they are trained, the model passes gradients through.

In:     a diffusers model that peft can put adapters into, and what they should be.
Out:    the same model with adapters; later their weights as ``pytorch_lora_weights.safetensors``,
        which diffusers' ``load_lora_weights`` reads, scale (alpha / rank) included.
Source: Hu et al., arXiv 2106.09685.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dpipe.core.errors import SpecError, UnsupportedError

ADAPTER = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Adapters of `rank` on every layer whose name ends with one of `targets`, scaled alpha / rank.

    `alpha` is the rank by default, which scales by one.
    """

    rank: int = 8
    alpha: float | None = None
    targets: Sequence[str] = ("to_q", "to_k", "to_v", "to_out.0")
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise SpecError(f"lora.rank is {self.rank}; expected at least 1")
        if self.alpha is not None and self.alpha <= 0:
            raise SpecError(f"lora.alpha is {self.alpha}; expected a value above 0")
        if not 0.0 <= self.dropout < 1.0:
            raise SpecError(f"lora.dropout is {self.dropout}; expected a value in [0, 1)")

    @classmethod
    def of(cls, options: "Mapping[str, Any] | LoRA | None") -> "LoRA | None":
        """From a config's mapping; None stays None.

        Raises:
            SpecError: An option is unknown or out of its range.
        """
        if options is None or isinstance(options, LoRA):
            return options
        known = cls.__dataclass_fields__
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise SpecError(f"lora has no option {unknown[0]!r}; it has: {', '.join(known)}")
        return cls(**options)


def add_lora(model: Any, lora: LoRA) -> None:
    """Freeze `model` and put adapters into it, in place.

    Raises:
        UnsupportedError: peft is not installed.
        SpecError: No layer has a name that `targets` asks for.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UnsupportedError(
            "lora= needs peft, which is not installed: pip install 'lightning-dpipe[lora]'"
        ) from error
    model.requires_grad_(False)
    names = [name for name, _ in model.named_modules()]
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise SpecError(
                f"lora.targets asks for {target!r}, but no layer of {type(model).__name__} is "
                "called so; names are compared from the end, as in 'to_q' or 'ff.net.2'"
            )
    model.add_adapter(
        LoraConfig(
            r=lora.rank,
            # peft declares an int and computes with any number; a whole one is read back as given.
            lora_alpha=_whole(lora.rank if lora.alpha is None else lora.alpha),
            target_modules=list(lora.targets),
            lora_dropout=lora.dropout,
            init_lora_weights=True,
        ),
        adapter_name=ADAPTER,
    )


def has_lora(model: Any) -> bool:
    """Whether `add_lora` changed the model."""
    return ADAPTER in getattr(model, "peft_config", {})


def save_lora(model: Any, folder: Path) -> Path:
    """Write the adapters' weights as they are now; returns the file."""
    from diffusers import StableDiffusionPipeline
    from diffusers.training_utils import _collate_lora_metadata
    from peft import get_peft_model_state_dict

    metadata: Mapping[str, Any] = _collate_lora_metadata({"unet": model})
    StableDiffusionPipeline.save_lora_weights(
        folder,
        unet_lora_layers=get_peft_model_state_dict(model, adapter_name=ADAPTER),
        **metadata,
    )
    return folder / "pytorch_lora_weights.safetensors"


def _whole(value: float) -> Any:
    return int(value) if value == int(value) else value

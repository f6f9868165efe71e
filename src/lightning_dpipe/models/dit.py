"""`DiTTransformer2DModel` as a list of layers: patch_embed | block0 | block1 | ... | head.

Tensors: ``h`` is ``[batch, tokens, dim]``, ``cond`` (what the head is modulated with)
``[batch, dim]``. Two traps of the library are taken care of:
- the head runs block 0's timestep and label embedder a second time, so its weights would be shared
  by the first and the last stage. Layer ``block0`` computes ``cond`` too and passes it on;
- every block drops labels with its own draw. Dropping labels is data preparation, done once: the
  layer list sets ``dropout_prob`` to 0 everywhere (the null class stays a row of the table).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.hooks import refuse_checkpointing, refuse_hooks
from lightning_dpipe.models.names import check_outside
from lightning_dpipe.models.spec import Backbone, Layer
from lightning_dpipe.models.verify import Trial, arguments, config_key, verify_once


def dit_backbone(model: DiTTransformer2DModel, *, name: str = "dit", **names: Any) -> Backbone:
    """The transformer as a backbone; `names` are those of `dit_layers`."""
    return Backbone(name=name, layers=dit_layers(model, **names), model=model)


def dit_layers(
    model: DiTTransformer2DModel,
    *,
    sample: str = "sample",
    timestep: str = "timestep",
    label: str = "label",
    self_cond: str | None = None,
    out: str = "out",
    check: bool = True,
) -> tuple[Layer, ...]:
    """Cut a DiT at every block; sets the blocks' label dropout to 0.

    Args:
        model: The model; widen its input first when `self_cond` is read.
        sample: Noisy latent ``[batch, channels, side, side]``.
        timestep: ``[batch]``.
        label: Class of each sample, int64 ``[batch]``; ``num_embeds_ada_norm`` is the null class.
        self_cond: Previous estimate, appended to the sample's channels; None for none.
        out: Name of the output ``[batch, out_channels, side, side]``.
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: Gradient checkpointing is on, or a module has hooks.
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    refuse_checkpointing(model)
    refuse_hooks({"the DiT": model})
    if check:
        verify_once(config_key(model), lambda: _trial(model))
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    extra = () if self_cond is None else (self_cond,)
    first, *others = model.transformer_blocks
    layers = [
        Layer(
            name="patch_embed",
            module=_PatchEmbed(model.pos_embed),
            reads=(sample, *extra),
            writes=("h",),
            owns=(model.pos_embed,),
        ),
        Layer(
            name="block0",
            module=_FirstBlock(first),
            reads=("h", timestep, label),
            writes=("h", "cond"),
            owns=(first,),
        ),
    ]
    for i, block in enumerate(others, start=1):
        layers.append(
            Layer(
                name=f"block{i}",
                module=_Block(block),
                reads=("h", timestep, label),
                writes=("h",),
                owns=(block,),
            )
        )
    layers.append(
        Layer(
            name="head",
            module=_Head(model),
            reads=("h", "cond"),
            writes=(out,),
            owns=(model.norm_out, model.proj_out_1, model.proj_out_2),
        )
    )
    check_outside(layers[:-1], (sample, timestep, label, *extra, out))
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class _PatchEmbed:
    embed: nn.Module

    def __call__(self, sample: Tensor, *self_cond: Tensor) -> Tensor:
        height, width = sample.shape[-2:]
        if height != width:
            raise SpecError(
                f"the latent is {height}x{width}; this DiT's head puts a square together: "
                "crop or pad"
            )
        h: Tensor = self.embed(torch.cat((sample, *self_cond), dim=1) if self_cond else sample)
        # Tokens come out transposed. A gradient that crosses a cut has the layout of the value, and
        # the convolution's bias gradient sums in another order for another layout.
        return h.contiguous()


@dataclass(frozen=True, slots=True)
class _Block:
    block: nn.Module

    def __call__(self, h: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        made: Tensor = self.block(h, timestep=timestep, class_labels=label)
        return made


@dataclass(frozen=True, slots=True)
class _FirstBlock:
    block: Any

    def __call__(self, h: Tensor, timestep: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        h = self.block(h, timestep=timestep, class_labels=label)
        return h, self.block.norm1.emb(timestep, label, hidden_dtype=h.dtype)


@dataclass(frozen=True, slots=True)
class _Head:
    """Modulated norm, projection, and ``[batch, tokens, p * p * c]`` put together to an image."""

    model: DiTTransformer2DModel

    def __call__(self, h: Tensor, cond: Tensor) -> Tensor:
        model = self.model
        shift, scale = model.proj_out_1(F.silu(cond)).chunk(2, dim=1)
        h = model.norm_out(h) * (1 + scale[:, None]) + shift[:, None]
        h = model.proj_out_2(h)
        side, patch, channels = int(h.shape[1] ** 0.5), model.patch_size, model.out_channels
        h = h.reshape(-1, side, side, patch, patch, channels)
        h = torch.einsum("nhwpqc->nchpwq", h)
        return h.reshape(-1, channels, side * patch, side * patch)


def _trial(model: DiTTransformer2DModel) -> Trial:
    """A narrow model of two blocks and the same flags."""
    narrow = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 2}
    patch = model.config.patch_size
    narrow |= {"num_embeds_ada_norm": 5, "sample_size": 4 * patch}
    tiny: Any = type(model)(**{**arguments(model), **narrow})
    tiny.train()
    layers = dit_layers(tiny, check=False)
    sample = torch.randn(2, tiny.config.in_channels, 4 * patch, 4 * patch)
    timestep, label = torch.tensor([7, 123]), torch.tensor([1, 5])
    return Trial(
        model=tiny,
        layers=layers,
        inputs={"sample": sample, "timestep": timestep, "label": label},
        output="out",
        forward=lambda: tiny(sample, timestep, label, return_dict=False)[0],
    )

"""`PixArtTransformer2DModel` as a list of layers: embed | caption | block0 | block1 | ... | head.

Tensors: ``h`` is ``[batch, tokens, dim]``, ``ctx`` (the projected caption) ``[batch, words, dim]``,
``temb6`` (what blocks are modulated with) ``[batch, 6 * dim]``, ``emb`` (what the head is modulated
with) ``[batch, dim]``. The caption's projection is trained, so ``ctx`` is graph state, unlike the
text encoding that a U-Net reads. `scale_shift_table` is a bare parameter of the model; the head
owns it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import PixArtTransformer2DModel
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.hooks import refuse_checkpointing, refuse_hooks
from lightning_dpipe.models.names import check_outside
from lightning_dpipe.models.patches import check_sides, unpatchify
from lightning_dpipe.models.spec import Backbone, Layer
from lightning_dpipe.models.verify import Trial, arguments, config_key, verify_once

MASKED = -10000.0
"""What the library adds to the attention scores of masked words."""


def pixart_backbone(
    model: PixArtTransformer2DModel, *, name: str = "pixart", **names: Any
) -> Backbone:
    """The transformer as a backbone; `names` are those of `pixart_layers`."""
    return Backbone(name=name, layers=pixart_layers(model, **names), model=model)


def pixart_layers(
    model: PixArtTransformer2DModel,
    *,
    sample: str = "sample",
    timestep: str = "timestep",
    context: str = "context",
    mask: str | None = None,
    resolution: str = "resolution",
    aspect_ratio: str = "aspect_ratio",
    self_cond: str | None = None,
    out: str = "out",
    check: bool = True,
) -> tuple[Layer, ...]:
    """Cut a PixArt transformer at every block.

    Args:
        model: The model; widen its input first when `self_cond` is read.
        sample: Noisy latent ``[batch, channels, height, width]``, sides multiples of the patch.
        timestep: ``[batch]``.
        context: Caption encoding ``[batch, words, caption_channels]``.
        mask: Which words count, ``[batch, words]`` of 1 and 0; None for all.
        resolution: Height and width in pixels ``[batch, 2]``; read by 1024 px models only.
        aspect_ratio: ``[batch, 1]``; likewise.
        self_cond: Previous estimate, appended to the sample's channels; None for none.
        out: Name of the output ``[batch, out_channels, height, width]``.
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: Gradient checkpointing is on, attention is gated, or a module has hooks.
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    _refuse(model)
    if check:
        verify_once(config_key(model), lambda: _trial(model))
    extra = () if self_cond is None else (self_cond,)
    sizes = (resolution, aspect_ratio) if model.use_additional_conditions else ()
    masks = () if mask is None else (mask,)
    layers = [
        Layer(
            name="embed",
            module=_Embed(model, len(sizes)),
            reads=(sample, timestep, *sizes, *extra),
            writes=("h", "temb6", "emb"),
            owns=(model.pos_embed, model.adaln_single),
        )
    ]
    ctx = context
    if model.caption_projection is not None:
        ctx = "ctx"
        layers.append(
            Layer(
                name="caption",
                module=model.caption_projection,
                reads=(context,),
                writes=(ctx,),
            )
        )
    for i, block in enumerate(model.transformer_blocks):
        layers.append(
            Layer(
                name=f"block{i}",
                module=_Block(block),
                reads=("h", ctx, "temb6", *masks),
                writes=("h",),
                owns=(block,),
            )
        )
    layers.append(
        Layer(
            name="head",
            module=_Head(model),
            reads=("h", "emb", sample),
            writes=(out,),
            owns=(model.norm_out, model.proj_out, model.scale_shift_table),
        )
    )
    check_outside(layers[:-1], (sample, timestep, context, *sizes, *extra, *masks, out))
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class _Embed:
    model: Any
    num_sizes: int

    def __call__(
        self, sample: Tensor, timestep: Tensor, *more: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        model, sizes, self_cond = self.model, more[: self.num_sizes], more[self.num_sizes :]
        check_sides(sample, model.config.patch_size, "PixArt")
        h = model.pos_embed(torch.cat((sample, *self_cond), dim=1) if self_cond else sample)
        resolution, aspect_ratio = sizes if sizes else (None, None)
        added = {"resolution": resolution, "aspect_ratio": aspect_ratio}
        temb6, emb = model.adaln_single(
            timestep, added, batch_size=sample.shape[0], hidden_dtype=h.dtype
        )
        # Tokens come out transposed; see models/dit.py for why that matters at a cut.
        return h.contiguous(), temb6, emb


@dataclass(frozen=True, slots=True)
class _Block:
    block: nn.Module

    def __call__(self, h: Tensor, context: Tensor, temb6: Tensor, *mask: Tensor) -> Tensor:
        bias = ((1 - mask[0].to(h.dtype)) * MASKED).unsqueeze(1) if mask else None
        made: Tensor = self.block(
            h, encoder_hidden_states=context, encoder_attention_mask=bias, timestep=temb6
        )
        return made


@dataclass(frozen=True, slots=True)
class _Head:
    model: Any

    def __call__(self, h: Tensor, emb: Tensor, sample: Tensor) -> Tensor:
        model = self.model
        shift, scale = (model.scale_shift_table[None] + emb[:, None]).chunk(2, dim=1)
        h = model.proj_out(model.norm_out(h) * (1 + scale) + shift)
        return unpatchify(h, sample, patch=model.config.patch_size, channels=model.out_channels)


def _refuse(model: PixArtTransformer2DModel) -> None:
    refuse_checkpointing(model)
    if model.config.attention_type != "default":
        raise UnsupportedError(
            f"attention_type={model.config.attention_type!r} of {type(model).__name__} needs "
            "inputs that the layer list does not pass; use 'default'"
        )
    if model.config.caption_channels is None and model.config.cross_attention_dim is None:
        raise SpecError(
            "this PixArt model has neither caption_channels nor cross_attention_dim: it reads no "
            "caption; set one of them"
        )
    refuse_hooks({"the PixArt transformer": model})


def _trial(model: PixArtTransformer2DModel) -> Trial:
    """A narrow model of two blocks and the same flags."""
    patch = model.config.patch_size
    given = arguments(model)
    # Size conditions are each a third as wide as the model.
    narrow: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 6, "num_layers": 2}
    narrow |= {"sample_size": 4 * patch, "cross_attention_dim": 12}
    narrow["use_additional_conditions"] = model.use_additional_conditions
    words = 12
    if given["caption_channels"] is not None:
        narrow["caption_channels"] = words = 6
    tiny: Any = type(model)(**{**given, **narrow})
    tiny.train()
    inputs = {
        "sample": torch.randn(2, tiny.config.in_channels, 4 * patch, 2 * patch),
        "timestep": torch.tensor([7, 123]),
        "context": torch.randn(2, 3, words),
        "mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "resolution": torch.tensor([[64.0, 32.0], [64.0, 64.0]]),
        "aspect_ratio": torch.tensor([[2.0], [1.0]]),
    }
    added = {name: inputs[name] for name in ("resolution", "aspect_ratio")}
    return Trial(
        model=tiny,
        layers=pixart_layers(tiny, mask="mask", check=False),
        inputs=inputs,
        output="out",
        forward=lambda: tiny(
            inputs["sample"],
            encoder_hidden_states=inputs["context"],
            timestep=inputs["timestep"],
            encoder_attention_mask=inputs["mask"],
            added_cond_kwargs=added
            if tiny.use_additional_conditions
            else {"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0],
    )

"""`FluxTransformer2DModel` as a list of layers: embed | double0 | ... | single0 | ... | head.

Tensors: ``h`` (image stream) is ``[batch, tokens, dim]``, ``c`` (text stream) ``[batch, words,
dim]``, ``temb`` ``[batch, dim]``: all graph state. The latent is packed into tokens of 2 x 2 pixels
by the first layer and unpacked by the head, so that outside this file a Flux latent looks like any
other. Rotary embeddings depend on the latent's size only: each stage makes its own instead of
sending 4.7 MB (1024 px); blocks read the latent for its size.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.hooks import refuse_checkpointing, refuse_hooks
from lightning_dpipe.models.names import check_outside
from lightning_dpipe.models.patches import check_sides
from lightning_dpipe.models.spec import Backbone, Layer
from lightning_dpipe.models.verify import Trial, arguments, config_key, verify_once

PACK = 2
"""Side of the square of latent pixels that is one token."""

Rotary = tuple[Tensor, Tensor]


def flux_backbone(model: FluxTransformer2DModel, *, name: str = "flux", **names: Any) -> Backbone:
    """The transformer as a backbone; `names` are those of `flux_layers`."""
    return Backbone(name=name, layers=flux_layers(model, **names), model=model)


def flux_layers(
    model: FluxTransformer2DModel,
    *,
    sample: str = "sample",
    timestep: str = "timestep",
    context: str = "context",
    pooled: str = "pooled",
    guidance: str = "guidance",
    self_cond: str | None = None,
    out: str = "out",
    num_timesteps: float = 1.0,
    check: bool = True,
) -> tuple[Layer, ...]:
    """Cut a Flux transformer at every block.

    Args:
        model: The model; widen its input first when `self_cond` is read.
        sample: Noisy latent ``[batch, in_channels / 4, height, width]``, both sides even.
        timestep: ``[batch]`` in [0, `num_timesteps`].
        context: Text encoding ``[batch, words, joint_attention_dim]``.
        pooled: Pooled text encoding ``[batch, pooled_projection_dim]``.
        guidance: ``[batch]``; read by guidance-distilled models only.
        self_cond: Previous estimate, appended to the sample's channels; None for none.
        out: Name of the output ``[batch, out_channels / 4, height, width]``.
        num_timesteps: What pure noise is called outside, 1000 for diffusers' schedulers. The model
            takes timesteps in [0, 1] (and multiplies them by 1000).
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: Gradient checkpointing or an IP-adapter is on, or a module has hooks.
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    _refuse(model)
    if check:
        verify_once(config_key(model), lambda: _trial(model))
    extra = () if self_cond is None else (self_cond,)
    guides = (guidance,) if model.config.guidance_embeds else ()
    rotary = _Rotary(model.pos_embed)
    layers = [
        Layer(
            name="embed",
            module=_Embed(model, len(guides), num_timesteps),
            reads=(sample, timestep, context, pooled, *guides, *extra),
            writes=("h", "c", "temb"),
            owns=(model.x_embedder, model.time_text_embed, model.context_embedder),
        )
    ]
    for kind, blocks in (
        ("double", model.transformer_blocks),
        ("single", model.single_transformer_blocks),
    ):
        for i, block in enumerate(blocks):
            layers.append(
                Layer(
                    name=f"{kind}{i}",
                    module=_Block(block, rotary),
                    reads=("h", "c", "temb", sample),
                    writes=("h", "c"),
                    owns=(block,),
                )
            )
    layers.append(
        Layer(
            name="head",
            module=_Head(model),
            reads=("h", "temb", sample),
            writes=(out,),
            owns=(model.norm_out, model.proj_out),
        )
    )
    check_outside(layers[:-1], (sample, timestep, context, pooled, *guides, *extra, out))
    return tuple(layers)


def pack(latent: Tensor) -> Tensor:
    """Tokens ``[batch, height * width / 4, 4 * channels]`` of a latent."""
    batch, channels, height, width = latent.shape
    tiles = latent.view(batch, channels, height // PACK, PACK, width // PACK, PACK)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PACK * PACK)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Latent ``[batch, channels, height, width]`` of its tokens."""
    batch, _, size = tokens.shape
    channels = size // (PACK * PACK)
    tiles = tokens.view(batch, height // PACK, width // PACK, channels, PACK, PACK)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, height, width)


def position_ids(words: int, height: int, width: int, device: torch.device) -> Tensor:
    """Position of every word (0, 0, 0) and then of every token (0, row, column)."""
    rows, columns = height // PACK, width // PACK
    ids = torch.zeros(words + rows * columns, 3, device=device)
    ids[words:, 1] = torch.arange(rows, device=device).repeat_interleave(columns)
    ids[words:, 2] = torch.arange(columns, device=device).repeat(rows)
    return ids


@dataclass(frozen=True, slots=True)
class _Rotary:
    """Rotary embeddings by size, made once: they depend on nothing else."""

    embed: nn.Module
    known: dict[tuple[int, int, int, torch.device], Rotary] = field(default_factory=dict)

    def of(self, words: int, sample: Tensor) -> Rotary:
        height, width = sample.shape[-2:]
        key = (words, height, width, sample.device)
        if key in self.known:
            return self.known[key]
        with torch.no_grad():
            made: Rotary = self.embed(position_ids(words, height, width, sample.device))
        if type(made[0]) is Tensor:  # not the fake tensors of a trace
            self.known[key] = made
        return made


@dataclass(frozen=True, slots=True)
class _Embed:
    model: Any
    num_guides: int
    num_timesteps: float

    def __call__(
        self, sample: Tensor, timestep: Tensor, context: Tensor, pooled: Tensor, *more: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        model, guides, self_cond = self.model, more[: self.num_guides], more[self.num_guides :]
        check_sides(sample, PACK, "Flux")
        h = model.x_embedder(pack(torch.cat((sample, *self_cond), dim=1) if self_cond else sample))
        times = [t.to(h.dtype) * 1000 for t in (timestep / self.num_timesteps, *guides)]
        return h, model.context_embedder(context), model.time_text_embed(*times, pooled)


@dataclass(frozen=True, slots=True)
class _Block:
    block: nn.Module
    rotary: _Rotary

    def __call__(self, h: Tensor, c: Tensor, temb: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        c, h = self.block(
            hidden_states=h,
            encoder_hidden_states=c,
            temb=temb,
            image_rotary_emb=self.rotary.of(c.shape[1], sample),
        )
        return h, c


@dataclass(frozen=True, slots=True)
class _Head:
    model: Any

    def __call__(self, h: Tensor, temb: Tensor, sample: Tensor) -> Tensor:
        model = self.model
        return unpack(model.proj_out(model.norm_out(h, temb)), *sample.shape[-2:])


def _refuse(model: FluxTransformer2DModel) -> None:
    refuse_checkpointing(model)
    if getattr(model, "encoder_hid_proj", None) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} has an IP-adapter, whose inputs the layer list does not pass; "
            "unload it"
        )
    if model.config.patch_size != 1:
        raise UnsupportedError(
            f"patch_size={model.config.patch_size} of {type(model).__name__}; published Flux "
            "models have 1 and pack 2 x 2 pixels into a token, which is what the layer list does"
        )
    refuse_hooks({"the Flux transformer": model})


def _trial(model: FluxTransformer2DModel) -> Trial:
    """A narrow model of two blocks of each kind and the same flags."""
    narrow: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
    narrow |= {"axes_dims_rope": (2, 2, 4), "num_single_layers": 2, "in_channels": 8}
    narrow |= {"joint_attention_dim": 6, "pooled_projection_dim": 5, "out_channels": None}
    tiny: Any = type(model)(**{**arguments(model), **narrow})
    tiny.train()
    height, width, words = 4, 6, 3
    inputs = {
        "sample": torch.randn(2, 2, height, width),
        "timestep": torch.tensor([0.25, 0.9]),
        "context": torch.randn(2, words, 6),
        "pooled": torch.randn(2, 5),
        "guidance": torch.tensor([1.0, 3.5]),
    }
    ids = position_ids(words, height, width, torch.device("cpu"))

    def forward() -> Tensor:
        made: Tensor = tiny(
            pack(inputs["sample"]),
            encoder_hidden_states=inputs["context"],
            pooled_projections=inputs["pooled"],
            timestep=inputs["timestep"],
            guidance=inputs["guidance"] if tiny.config.guidance_embeds else None,
            txt_ids=ids[:words],
            img_ids=ids[words:],
            return_dict=False,
        )[0]
        return unpack(made, height, width)

    return Trial(
        model=tiny,
        layers=flux_layers(tiny, check=False),
        inputs=inputs,
        output="out",
        forward=forward,
    )

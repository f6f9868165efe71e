"""Decoding an image in bands of rows, one a rank, exactly.

In:     an AutoencoderKL, latents ``[batch, channels, height, width]``, a group of ranks.
Out:    every rank's rows of the image, ``[batch, colours, rows x 8, width x 8]``.
Every 3 x 3 convolution gets the row above and the row below from the neighbours. A group norm needs
mean and variance of the whole image: those of the bands are joined, from one small gather (Chan,
Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
The attention in the middle has own queries and everyone's keys and values, at the size of the
latents. What is left differs from `vae.decode` in the last bits only: a norm's sums and a
convolution's kernel depend on the number of rows.
The model's own modules are called; nothing is patched or hooked, so nothing has to be undone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2D, UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.hooks import refuse_hooks
from lightning_dpipe.sampling.bands import BandGroup, check_bands, even_bands


@torch.no_grad()
def decode_band(
    vae: AutoencoderKL, latents: Tensor, group: BandGroup, *, bands: Sequence[int] | None = None
) -> Tensor:
    """Decode this rank's rows. Collective over the group.

    Args:
        vae: The autoencoder, with the same weights on all ranks.
        latents: ``[batch, channels, height, width]``, scaled as for ``vae.decode``; own rows are
            read only.
        group: The ranks, rank 0 at the top of the image.
        bands: Latent rows of every rank, the same on all; even by default.

    Returns:
        ``[batch, colours, rows x scale, width x scale]``.

    Raises:
        PlanError: The bands are not the image's, or there are fewer rows than ranks.
        UnsupportedError: The decoder has a part that is not known here.
        RankError: Another rank failed.
    """
    refuse_unknown(vae)
    height = latents.shape[-2]
    rows = even_bands(height, group.size) if bands is None else tuple(bands)
    check_bands(rows, height, group.size)
    start = sum(rows[: group.rank])
    mine = latents[..., start : start + rows[group.rank], :]
    decoder = vae.decoder
    walk = _Walk(group=group, bands=rows)
    h = mine if vae.post_quant_conv is None else vae.post_quant_conv(mine)
    h = walk.convolve(decoder.conv_in, walk.framed(h))
    mid = decoder.mid_block
    h = walk.resnet(mid.resnets[0], h)
    for attention, resnet in zip(mid.attentions, mid.resnets[1:], strict=True):
        if attention is not None:
            h = walk.attend(attention, h)
        h = walk.resnet(resnet, h)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            h = walk.resnet(resnet, h)
        for upsampler in block.upsamplers or ():
            h = walk.upsample(upsampler, h)
    return walk.convolve(decoder.conv_out, walk.normed(decoder.conv_norm_out, decoder.conv_act, h))


def join_bands(band: Tensor, group: BandGroup, bands: Sequence[int], height: int) -> Tensor:
    """The whole image on every rank.

    Args:
        band: What `decode_band` returned.
        group: The ranks.
        bands: Latent rows of every rank.
        height: Of the latents.

    Raises:
        PlanError: The bands are not the image's.
        RankError: Another rank failed.
    """
    check_bands(bands, height, group.size)
    scale = band.shape[-2] // bands[group.rank]
    shapes = [(*band.shape[:2], rows * scale, band.shape[-1]) for rows in bands]
    return torch.cat(group.gather(band, shapes), dim=2)


@dataclass(slots=True)
class _Walk:
    """One decoding; `bands` are the rows of every rank at the resolution it has come to."""

    group: BandGroup
    bands: tuple[int, ...]

    def framed(self, h: Tensor) -> Tensor:
        """With a row of the neighbours, or zeros beyond the image, above and below."""
        frame = h.new_zeros(*h.shape[:2], h.shape[2] + 2, h.shape[3])
        frame[:, :, 1:-1].copy_(h)
        return self._edges(frame)

    def normed(self, norm: nn.GroupNorm, activation: nn.Module, h: Tensor) -> Tensor:
        """Normed, activated, framed."""
        frame = h.new_zeros(*h.shape[:2], h.shape[2] + 2, h.shape[3])
        inner = frame[:, :, 1:-1]
        inner.copy_(self.norm(norm, h))
        inner.copy_(activation(inner))
        return self._edges(frame)

    def _edges(self, frame: Tensor) -> Tensor:
        above, below = self.group.swap(frame[:, :, 1:2], frame[:, :, -2:-1])
        if above is not None:
            frame[:, :, :1].copy_(above)
        if below is not None:
            frame[:, :, -1:].copy_(below)
        return frame

    def convolve(self, conv: nn.Conv2d, frame: Tensor) -> Tensor:
        """A 3 x 3 convolution of framed rows."""
        return F.conv2d(frame, conv.weight, conv.bias, padding=(0, 1))

    def norm(self, norm: nn.GroupNorm, h: Tensor) -> Tensor:
        """A group norm over all bands."""
        batch, channels = h.shape[:2]
        groups = h.reshape(batch, norm.num_groups, -1).float()
        variance, mean = torch.var_mean(groups, dim=-1, correction=0)
        del groups
        own = torch.stack((mean, variance)).double()
        every = torch.stack(self.group.gather(own, [own.shape] * self.group.size))
        share = torch.tensor(self.bands, dtype=torch.float64, device=h.device)
        share = (share / share.sum()).view(-1, 1, 1)
        whole = (share * every[:, 0]).sum(0)
        spread = (share * (every[:, 1] + (every[:, 0] - whole) ** 2)).sum(0)
        inverse = (spread + norm.eps).rsqrt()
        per_channel = channels // norm.num_groups
        scale = inverse.repeat_interleave(per_channel, dim=1)
        shift = -whole.repeat_interleave(per_channel, dim=1) * scale
        if norm.affine:
            scale = scale * norm.weight.double()
            shift = shift * norm.weight.double() + norm.bias.double()
        scale, shift = (s.float()[:, :, None, None] for s in (scale, shift))
        return torch.addcmul(shift, h.float(), scale).to(h.dtype)

    def resnet(self, resnet: ResnetBlock2D, h: Tensor) -> Tensor:
        """Norm, convolution, norm, convolution, and the way around them."""
        inner = self.convolve(resnet.conv1, self.normed(resnet.norm1, resnet.nonlinearity, h))
        inner = self.convolve(resnet.conv2, self.normed(resnet.norm2, resnet.nonlinearity, inner))
        around = h if resnet.conv_shortcut is None else resnet.conv_shortcut(h)
        made: Tensor = (around + inner) / resnet.output_scale_factor
        return made

    def upsample(self, upsampler: Upsample2D, h: Tensor) -> Tensor:
        """Every pixel four times, then a convolution."""
        self.bands = tuple(2 * rows for rows in self.bands)
        conv = upsampler.conv
        return self.convolve(conv, self.framed(F.interpolate(h, scale_factor=2.0, mode="nearest")))

    def attend(self, attention: Attention, h: Tensor) -> Tensor:
        """Own queries to everyone's keys and values."""
        batch, _, rows, width = h.shape
        normed = h if attention.group_norm is None else self.norm(attention.group_norm, h)
        tokens = normed.flatten(2).transpose(1, 2)
        query = attention.to_q(tokens)
        own = torch.cat((attention.to_k(tokens), attention.to_v(tokens)), dim=-1)
        shapes = [(batch, band * width, own.shape[-1]) for band in self.bands]
        key, value = torch.cat(self.group.gather(own, shapes), dim=1).chunk(2, dim=-1)
        heads = (
            t.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for t in (query, key, value)
        )
        seen = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        out = attention.to_out[0](seen).transpose(1, 2).unflatten(2, (rows, width))
        whole = out + h if attention.residual_connection else out
        made: Tensor = whole / attention.rescale_output_factor
        return made


def refuse_unknown(vae: AutoencoderKL) -> None:
    """Refuse a decoder with parts that bands do not reproduce.

    Raises:
        UnsupportedError: One is found; the message names it.
    """
    for feature, used in {
        "tiling (call disable_tiling; bands take its place)": vae.use_tiling,
        "slicing (call disable_slicing)": vae.use_slicing,
    }.items():
        if used:
            raise UnsupportedError(f"{type(vae).__name__} uses {feature}; switch it off")
    decoder = vae.decoder
    named = {name: module for name, module in decoder.named_modules() if name}
    refuse_hooks({"the VAE": vae, "its decoder": decoder, **named})
    blocks = {f"up{i}": (block, UpDecoderBlock2D) for i, block in enumerate(decoder.up_blocks)}
    for name, (block, known) in {**blocks, "mid": (decoder.mid_block, UNetMidBlock2D)}.items():
        if type(block) is not known:
            raise UnsupportedError(
                f"block {name} is a {type(block).__name__}; bands know {known.__name__}"
            )
    for name, module in named.items():
        why = _unknown(module)
        if why:
            raise UnsupportedError(f"{name} ({type(module).__name__}) {why}; bands cannot run it")


def _unknown(module: nn.Module) -> str:
    """What a module has that bands do not run, or nothing."""
    if isinstance(module, nn.Conv2d):
        shape = (module.kernel_size, module.padding, module.stride, module.dilation)
        known = {((3, 3), (1, 1)), ((1, 1), (0, 0))}
        same = shape[:2] in known and shape[2:] == ((1, 1), (1, 1)) and module.groups == 1
        return "" if same and module.padding_mode == "zeros" else f"is a convolution {shape}"
    if isinstance(module, ResnetBlock2D):
        odd = (module.time_emb_proj, module.upsample, module.downsample)
        active = module.training and module.dropout.p > 0
        return "has a time embedding, resampling or dropout" if any(odd) or active else ""
    if isinstance(module, Attention):
        norms = (module.spatial_norm, module.norm_q, module.norm_k, module.norm_cross)
        return "has norms of its own" if any(norms) else ""
    if isinstance(module, Upsample2D):
        plain = module.use_conv and not module.use_conv_transpose and module.interpolate
        return "" if plain and module.norm is None and module.name == "conv" else "is not plain"
    return ""

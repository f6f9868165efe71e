"""One-process stale sampling, written out: the oracle of mode pipefusion.

No row model, no processor, no buffer: every block's arithmetic stands here, keys and values are
lists with one entry a patch, joined when they are attended to. Text is computed with a step's first
patch; later patches see its keys and values.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from lightning_dpipe.models.flux import pack, position_ids, unpack
from lightning_dpipe.models.patches import unpatchify
from lightning_dpipe.sampling.simple import SampleRequest
from lightning_dpipe.sampling.solver import SolverOptions

Predict = Callable[[Tensor, Tensor, int | None], Tensor]


@torch.no_grad()
def stale(
    name: str,
    model: Any,
    scheduler: Any,
    request: SampleRequest,
    *,
    cuts: Sequence[int],
    warmup: int,
    options: SolverOptions | None = None,
) -> Tensor:
    """Latents of one group of images; `cuts` in token rows of two latent pixels."""
    options = options or SolverOptions()
    count = {} if "sigmas" in options.timesteps else {"num_inference_steps": request.num_steps}
    scheduler.set_timesteps(**count, **options.timesteps)
    pixels = [2 * row for row in cuts]
    solvers = [copy.deepcopy(scheduler) for _ in pixels[1:]]
    x = request.noise * getattr(scheduler, "init_noise_sigma", 1.0)
    rows = [x[:, :, a:b] for a, b in pairwise(pixels)]
    conditions, double = dict(request.conditions), 1
    if request.guidance is not None:
        double, other = 2, request.guidance.unconditional
        order = (0, 1) if name == "dit" else (1, 0)
        conditions = {
            k: torch.cat([(v, other.get(k, v))[i] for i in order]) for k, v in conditions.items()
        }
    predict = PREDICT[name](model, conditions, cuts, (x.shape[2], x.shape[3]))

    def guided(out: Tensor) -> Tensor:
        out = out[:, : x.shape[1]]
        if request.guidance is None:
            return out
        a, b = out.chunk(2)
        cond, uncond = (a, b) if name == "dit" else (b, a)
        return uncond + request.guidance.scale * (cond - uncond)

    for step, t in enumerate(scheduler.timesteps):
        wholes: list[Tensor | None] = [None] * len(rows)
        if step < warmup:
            out = guided(predict(torch.cat([torch.cat(rows, 2)] * double), t, None))
            wholes = list(out.split([r.shape[2] for r in rows], dim=2))
        for m, ready in enumerate(wholes):
            out_m = guided(predict(torch.cat([rows[m]] * double), t, m)) if ready is None else ready
            rows[m] = solvers[m].step(out_m, t, rows[m], return_dict=False, **options.step)[0]
    return torch.cat(rows, dim=2)


class Memory:
    """Keys or values of one attention: a list with one entry a patch, and one for text."""

    def __init__(self, cuts: Sequence[int], columns: int) -> None:
        self.sizes = [(b - a) * columns for a, b in pairwise(cuts)]
        self.parts: list[Tensor] = []
        self.text: list[Tensor] = []

    def put(self, fresh: Tensor, m: int | None, dim: int) -> None:
        if m is None:
            self.parts = list(fresh.split(self.sizes, dim=dim))
        else:
            self.parts[m] = fresh


class Base:
    """What the families share: positions of the whole image, memories by attention."""

    def __init__(
        self, model: Any, c: dict[str, Tensor], cuts: Sequence[int], size: tuple[int, int]
    ) -> None:
        self.model, self.c, self.cuts = model, c, cuts
        self.columns = size[1] // 2
        self.memories: dict[int, tuple[Memory, Memory]] = {}
        if hasattr(model.pos_embed, "proj"):
            blank = copy.deepcopy(model.pos_embed)
            torch.nn.init.zeros_(blank.proj.weight)
            torch.nn.init.zeros_(blank.proj.bias)
            self.positions = blank(torch.zeros(1, blank.proj.in_channels, *size))

    def kept(self, attn: Any) -> tuple[Memory, Memory]:
        new = (Memory(self.cuts, self.columns), Memory(self.cuts, self.columns))
        return self.memories.setdefault(id(attn), new)

    def tokens(self, m: int | None) -> slice:
        if m is None:
            return slice(0, self.cuts[-1] * self.columns)
        return slice(self.cuts[m] * self.columns, self.cuts[m + 1] * self.columns)

    def embed(self, x: Tensor, m: int | None) -> Tensor:
        tokens = self.model.pos_embed.proj(x).flatten(2).transpose(1, 2)
        return (tokens + self.positions[:, self.tokens(m)]).contiguous()

    def attend(self, attn: Any, n: Tensor, m: int | None) -> Tensor:
        q, k, v = (split(attn, f(n)) for f in (attn.to_q, attn.to_k, attn.to_v))
        if attn.norm_q is not None:
            q, k = attn.norm_q(q), attn.norm_k(k)
        keys, values = self.kept(attn)
        keys.put(k, m, 2)
        values.put(v, m, 2)
        out = F.scaled_dot_product_attention(
            q, torch.cat(keys.parts, 2), torch.cat(values.parts, 2)
        )
        return attn.to_out[0](join(out))


def split(attn: Any, x: Tensor) -> Tensor:
    return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class PixArt(Base):
    def __call__(self, x: Tensor, t: Tensor, m: int | None) -> Tensor:
        model = self.model
        h = self.embed(x, m)
        added = {"resolution": None, "aspect_ratio": None}
        temb6, emb = model.adaln_single(
            t.expand(len(x)), added, batch_size=len(x), hidden_dtype=h.dtype
        )
        ctx = model.caption_projection(self.c["context"])
        bias = ((1 - self.c["mask"]) * -10000.0)[:, None]
        for b in model.transformer_blocks:
            table = b.scale_shift_table[None] + temb6.reshape(len(x), 6, -1)
            shift1, scale1, gate1, shift2, scale2, gate2 = table.chunk(6, dim=1)
            h = gate1 * self.attend(b.attn1, b.norm1(h) * (1 + scale1) + shift1, m) + h
            h = b.attn2(h, encoder_hidden_states=ctx, attention_mask=bias) + h
            h = gate2 * b.ff(b.norm2(h) * (1 + scale2) + shift2) + h
        shift, scale = (model.scale_shift_table[None] + emb[:, None]).chunk(2, dim=1)
        h = model.proj_out(model.norm_out(h) * (1 + scale) + shift)
        return unpatchify(h, x, patch=2, channels=model.out_channels)


class DiT(Base):
    def __call__(self, x: Tensor, t: Tensor, m: int | None) -> Tensor:
        model, label, t = self.model, self.c["label"], t.expand(len(x))
        h = self.embed(x, m)
        for b in model.transformer_blocks:
            n, gate1, shift, scale, gate2 = b.norm1(h, t, label, hidden_dtype=h.dtype)
            h = gate1[:, None] * self.attend(b.attn1, n, m) + h
            h = gate2[:, None] * b.ff(b.norm3(h) * (1 + scale[:, None]) + shift[:, None]) + h
        emb = model.transformer_blocks[0].norm1.emb(t, label, hidden_dtype=h.dtype)
        shift, scale = model.proj_out_1(F.silu(emb)).chunk(2, dim=1)
        h = model.proj_out_2(model.norm_out(h) * (1 + scale[:, None]) + shift[:, None])
        return unpatchify(h, x, patch=2, channels=model.out_channels)


class SD3(Base):
    def __call__(self, x: Tensor, t: Tensor, m: int | None) -> Tensor:
        model = self.model
        h = self.embed(x, m)
        temb = model.time_text_embed(t.expand(len(x)), self.c["pooled"])
        c = model.context_embedder(self.c["context"]) if m in (None, 0) else None
        for b in model.transformer_blocks:
            h, c = self.block(b, h, c, temb, m)
        h = model.proj_out(model.norm_out(h, temb))
        return unpatchify(h, x, patch=2, channels=model.out_channels)

    def block(
        self, b: Any, h: Tensor, c: Tensor | None, temb: Tensor, m: int | None
    ) -> tuple[Tensor, Tensor | None]:
        if b.use_dual_attention:
            n, gate1, shift, scale, gate2, n2, gate3 = b.norm1(h, emb=temb)
        else:
            n, gate1, shift, scale, gate2 = b.norm1(h, emb=temb)
        nc = rest = None
        if c is not None and b.context_pre_only:
            nc = b.norm1_context(c, temb)
        elif c is not None:
            nc, *rest = b.norm1_context(c, emb=temb)
        out, words = self.joint(b.attn, n, nc, m)
        h = h + gate1[:, None] * out
        if b.use_dual_attention:
            h = h + gate3[:, None] * self.attend(b.attn2, n2, m)
        h = h + gate2[:, None] * b.ff(b.norm2(h) * (1 + scale[:, None]) + shift[:, None])
        if c is None or rest is None:
            return h, None
        cgate1, cshift, cscale, cgate2 = rest
        c = c + cgate1[:, None] * b.attn.to_add_out(words)
        nc = b.norm2_context(c) * (1 + cscale[:, None]) + cshift[:, None]
        return h, c + cgate2[:, None] * b.ff_context(nc)

    def joint(self, a: Any, n: Tensor, nc: Tensor | None, m: int | None) -> tuple[Tensor, Tensor]:
        q, k, v = (split(a, f(n)) for f in (a.to_q, a.to_k, a.to_v))
        if a.norm_q is not None:
            q, k = a.norm_q(q), a.norm_k(k)
        keys, values = self.kept(a)
        keys.put(k, m, 2)
        values.put(v, m, 2)
        if nc is not None:
            qc, kc, vc = (split(a, f(nc)) for f in (a.add_q_proj, a.add_k_proj, a.add_v_proj))
            if a.norm_added_q is not None:
                qc, kc = a.norm_added_q(qc), a.norm_added_k(kc)
            keys.text, values.text = [kc], [vc]
            q = torch.cat([q, qc], dim=2)
        keyed, valued = (torch.cat(x.parts + x.text, dim=2) for x in (keys, values))
        out = join(F.scaled_dot_product_attention(q, keyed, valued))
        return a.to_out[0](out[:, : n.shape[1]]), out[:, n.shape[1] :]


class Flux(Base):
    def __call__(self, x: Tensor, t: Tensor, m: int | None) -> Tensor:
        model, words = self.model, self.c["context"].shape[1]
        height, width = 2 * self.cuts[-1], 2 * self.columns
        cos, sin = model.pos_embed(position_ids(words, height, width, torch.device("cpu")))
        where = torch.arange(words, words + len(cos))[self.tokens(m)]
        if m in (None, 0):
            where = torch.cat([torch.arange(words), where])
        self.rotary = (cos[where], sin[where])
        times = (t.expand(len(x)) / 1000 * 1000, self.c["guidance"] * 1000)
        temb = model.time_text_embed(*times, self.c["pooled"])
        h = model.x_embedder(pack(x))
        c = model.context_embedder(self.c["context"]) if m in (None, 0) else h[:, :0]
        for b in model.transformer_blocks:
            h, c = self.double(b, h, c, temb, m)
        for b in model.single_transformer_blocks:
            joined = torch.cat([c, h], dim=1)
            n, gate = b.norm(joined, emb=temb)
            both = torch.cat([self.mix(b.attn, n, None, m), b.act_mlp(b.proj_mlp(n))], dim=2)
            joined = joined + gate[:, None] * b.proj_out(both)
            c, h = joined[:, : c.shape[1]], joined[:, c.shape[1] :]
        return unpack(model.proj_out(model.norm_out(h, temb)), x.shape[2], x.shape[3])

    def double(
        self, b: Any, h: Tensor, c: Tensor, temb: Tensor, m: int | None
    ) -> tuple[Tensor, Tensor]:
        n, gate1, shift, scale, gate2 = b.norm1(h, emb=temb)
        nc, cgate1, cshift, cscale, cgate2 = b.norm1_context(c, emb=temb)
        out = self.mix(b.attn, n, nc, m)
        words, tokens = out[:, : c.shape[1]], out[:, c.shape[1] :]
        h = h + gate1[:, None] * b.attn.to_out[0](tokens.contiguous())
        h = h + gate2[:, None] * b.ff(b.norm2(h) * (1 + scale[:, None]) + shift[:, None])
        if c.shape[1]:
            c = c + cgate1[:, None] * b.attn.to_add_out(words.contiguous())
            nc = b.norm2_context(c) * (1 + cscale[:, None]) + cshift[:, None]
            c = c + cgate2[:, None] * b.ff_context(nc)
        return h, c

    def mix(self, a: Any, n: Tensor, nc: Tensor | None, m: int | None) -> Tensor:
        words = self.c["context"].shape[1] if m in (None, 0) else 0
        q, k, v = (f(n).unflatten(-1, (a.heads, -1)) for f in (a.to_q, a.to_k, a.to_v))
        q, k = a.norm_q(q), a.norm_k(k)
        if nc is not None and words:
            added = (a.add_q_proj, a.add_k_proj, a.add_v_proj)
            qc, kc, vc = (f(nc).unflatten(-1, (a.heads, -1)) for f in added)
            q = torch.cat([a.norm_added_q(qc), q], dim=1)
            k = torch.cat([a.norm_added_k(kc), k], dim=1)
            v = torch.cat([vc, v], dim=1)
        q, k = (apply_rotary_emb(x, self.rotary, sequence_dim=1) for x in (q, k))
        keys, values = self.kept(a)
        for memory, fresh in ((keys, k), (values, v)):
            if words:
                memory.text = [fresh[:, :words]]
            memory.put(fresh[:, words:], m, 1)
        keyed, valued = (torch.cat(x.text + x.parts, dim=1) for x in (keys, values))
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, keyed, valued)))
        return join(out)


PREDICT: dict[str, Callable[..., Predict]] = {
    "pixart": PixArt, "dit": DiT, "sd3": SD3, "sd35": SD3, "flux": Flux
}  # fmt: skip

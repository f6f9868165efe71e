"""Small real models with everything that makes pipelines hard: skips, aliases, side inputs."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_dpipe.models.spec import (
    Backbone,
    Field,
    FrozenComponent,
    Layer,
    Loss,
    PipelineSpec,
    SelfConditioning,
)

WIDTH = 6


class Block(nn.Module):
    def __init__(self, num_inputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH * num_inputs, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(torch.cat(inputs, dim=1))))


class Push(nn.Module):
    """Writes one tensor under two names, as a U-Net does with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, emb: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.nn.functional.silu(self.linear(h) + emb)
        return out, out


def _per_sample(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean(dim=1)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sigmoid()


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x - y


def small_unet(
    depth: int = 3,
    *,
    seed: int = 0,
    dropout: float = 0.0,
    self_conditioning: bool = False,
    frozen_layers: int = 3,
) -> PipelineSpec:
    """A U-shaped chain: emb, `depth` pushes, `depth` pops over skips; two frozen components."""
    torch.manual_seed(seed)
    layers = [
        Layer(name="emb", module=nn.Linear(WIDTH, WIDTH), reads=("time",), writes=("emb",)),
    ]
    first: tuple[str, ...] = ("noisy", "self_cond") if self_conditioning else ("noisy",)
    layers.append(Layer(name="in", module=Block(len(first)), reads=first, writes=("h",)))
    for i in range(depth):
        layers.append(
            Layer(name=f"down{i}", module=Push(), reads=("h", "emb"), writes=("h", f"s{i}"))
        )
    for i in reversed(range(depth)):
        layers.append(
            Layer(
                name=f"up{i}",
                module=Block(4, dropout),
                reads=("h", f"s{i}", "context", "emb"),
                writes=("h",),
            )
        )
    layers.append(Layer(name="out", module=nn.Linear(WIDTH, WIDTH), reads=("h",), writes=("out",)))
    text: Sequence[Layer] = [
        Layer(
            name=f"text{i}",
            module=Scale(),
            reads=("tokens",) if i == 0 else ("t",),
            writes=("context",) if i == frozen_layers - 1 else ("t",),
        )
        for i in range(frozen_layers)
    ]
    noise = Layer(name="mix", module=Add(), reads=("image", "context"), writes=("noisy", "target"))
    condition = SelfConditioning(
        writes="self_cond",
        estimate=lambda out, noisy: out - noisy,
        reads=("out", "noisy"),
        shape=(WIDTH,),
    )
    return PipelineSpec(
        inputs={"tokens": Field(shape=(WIDTH,)), "image": Field(shape=(WIDTH,)),
                "time": Field(shape=(WIDTH,))},
        frozen=(
            FrozenComponent(name="text", layers=tuple(text)),
            FrozenComponent(name="noise", layers=(noise,)),
        ),
        backbones=(Backbone(name="net", layers=tuple(layers)),),
        loss=Loss(fn=_per_sample, reads=("out", "target")),
        self_conditioning=condition if self_conditioning else None,
    )  # fmt: skip


def small_batch(rows: int, seed: int) -> dict[str, Tensor]:
    """One rank's fields."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(rows, WIDTH, generator=generator) for name in ("tokens", "image", "time")
    }


class Mixer(nn.Module):
    """Any number of inputs to one output; frozen or trained, with or without an alias."""

    def __init__(self, num_inputs: int, *, alias: bool, trained: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH * num_inputs, WIDTH).requires_grad_(trained)
        self.alias = alias

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out = torch.tanh(self.linear(torch.cat(inputs, dim=1)))
        return (out, out) if self.alias else out


def cascade(
    depths: Sequence[int] = (3, 2),
    *,
    seed: int = 0,
    dropout: float = 0.0,
    feedback: int | None = None,
) -> PipelineSpec:
    """U-shaped backbones side by side, as a cascaded diffusion model has them.

    All read the frozen `context` and the field `time`; backbone i > 0 also reads what a frozen
    component of its own makes of the image. Inner names are the same in all of them. `feedback` is
    the number of the backbone that is self-conditioned.
    """
    parts = [
        small_unet(depth, seed=seed + i, dropout=dropout, self_conditioning=i == feedback)
        for i, depth in enumerate(depths)
    ]
    frozen, backbones = list(parts[0].frozen), []
    for i, part in enumerate(parts):
        layers = part.backbones[0].layers
        if i:
            frozen.append(
                FrozenComponent(
                    name=f"low{i}",
                    layers=(
                        Layer(
                            name=f"low{i}", module=Scale(), reads=("image",), writes=(f"low{i}",)
                        ),
                    ),
                )
            )
            mixed = Layer(
                name="mixed", module=Block(3), reads=("h", f"low{i}", "emb"), writes=("h",)
            )
            layers = (*layers[:2], mixed, *layers[2:])
        backbones.append(Backbone(name=f"net{i}", layers=layers))
    return PipelineSpec(
        inputs=parts[0].inputs,
        frozen=tuple(frozen),
        backbones=tuple(backbones),
        loss={b.name: Loss(fn=_per_sample, reads=("out", "target")) for b in backbones},
        self_conditioning=None if feedback is None else parts[feedback].self_conditioning,
    )


def random_backbone(name: str, draw: random.Random, extra: Sequence[str] = ()) -> Backbone:
    """A random chain: skips of any length, conditioning read anywhere, aliases, frozen layers."""
    layers: list[Layer] = []
    known = ["h"]  # graph state that a later layer may read
    for i in range(draw.randint(3, 9)):
        reads = ["h" if i else "noisy"]
        reads += draw.sample(known[1:], min(len(known) - 1, draw.randint(0, 2)))
        reads += draw.sample(["context", "time", "noisy", *extra], draw.randint(0, 2))
        alias = draw.random() < 0.4
        trained = i == 0 or draw.random() < 0.75
        layers.append(
            Layer(
                name=f"layer{i}",
                module=Mixer(len(dict.fromkeys(reads)), alias=alias, trained=trained),
                reads=tuple(dict.fromkeys(reads)),
                writes=("h", f"s{i}") if alias else ("h",),
            )
        )
        known += [f"s{i}"] if alias else []
    return Backbone(name=name, layers=tuple(layers))


def random_model(seed: int, num_backbones: int = 1) -> PipelineSpec:
    """Random backbones; the second one and those after it also read a component of their own."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    backbones = [random_backbone("net", draw)]
    text = Layer(name="text", module=Scale(), reads=("tokens",), writes=("t",))
    last = Layer(name="project", module=Scale(), reads=("t",), writes=("context",))
    noise = Layer(name="mix", module=Add(), reads=("image", "context"), writes=("noisy", "target"))
    frozen = [
        FrozenComponent(name="text", layers=(text, last)),
        FrozenComponent(name="noise", layers=(noise,)),
    ]
    if num_backbones > 1:
        low = Layer(name="low", module=Scale(), reads=("image",), writes=("low",))
        frozen.append(FrozenComponent(name="low", layers=(low,)))
        others = range(1, num_backbones)
        backbones += [random_backbone(f"net{i}", draw, extra=("low",)) for i in others]
    field = Field(shape=(WIDTH,))
    return PipelineSpec(
        inputs={"tokens": field, "image": field, "time": field},
        frozen=tuple(frozen),
        backbones=tuple(backbones),
        loss={b.name: Loss(fn=_per_sample, reads=("h", "target")) for b in backbones},
    )

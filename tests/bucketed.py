"""A small real U-Net in five shape classes, frozen work with convolutions, and data for it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from lightning import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.graph import ComponentKind, ModelGraph
from lightning_dpipe.core.profile import ComponentCost, LayerCost, Link, Profile
from lightning_dpipe.data.buckets import BucketBatchSampler
from lightning_dpipe.models.spec import (
    DRAW_KEY,
    Field,
    FrozenComponent,
    Layer,
    Loss,
    PipelineSpec,
)
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.models.widen import widen_input
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.objective.noise import noise_component
from lightning_dpipe.objective.schedule import NoiseSchedule
from lightning_dpipe.objective.selfcond import self_conditioning
from lightning_dpipe.strategy.module import DiffusionModule

SIDES = {BASE: (16, 16), "wide": (12, 20), "tall": (20, 12), "flat": (8, 28), "slim": (28, 8)}
"""Pixels (height, width); latents have half of both."""


def build(selfcond: bool = False) -> nn.ModuleDict:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    if selfcond:
        widen_input(unet, 4)
    shrink = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 2, stride=2))
    return nn.ModuleDict(
        {"unet": unet, "shrink": shrink, "words": nn.Embedding(20, 8), "mix": nn.Linear(8, 8)}
    )


def spec_of(parts: nn.ModuleDict, *, selfcond: bool = False, buckets: bool = True) -> PipelineSpec:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler(prediction_type="v_prediction"))
    parts["shrink"].requires_grad_(False)
    shrink = tuple(
        Layer(name=f"conv{i}", module=m, reads=("image" if i == 0 else "c",), writes=("c",))
        for i, m in enumerate(parts["shrink"][:-1])
    )
    last = Layer(name="latents", module=parts["shrink"][-1], reads=("c",), writes=("latents",))
    words = (
        Layer(name="words", module=parts["words"], reads=("input_ids",), writes=("w",)),
        Layer(name="mix", module=parts["mix"], reads=("w",), writes=("context",)),
    )
    latents = {name: (4, high // 2, wide // 2) for name, (high, wide) in SIDES.items()}
    estimate = {name: {"estimate": latents[name]} if selfcond else {} for name in SIDES}
    shapes = {
        name: {"image": (3, *sides), **estimate[name]}
        for name, sides in SIDES.items()
        if name != BASE
    }
    return PipelineSpec(
        inputs={
            "image": Field(shape=(3, *SIDES[BASE])),
            "input_ids": Field(shape=(5,), dtype=torch.int64),
        },
        frozen=(
            FrozenComponent(name="shrink", layers=(*shrink, last)),
            FrozenComponent(name="words", layers=words),
            noise_component(schedule, seed=3),
        ),
        backbones=(
            unet_backbone(
                parts["unet"], sample="noisy", self_cond="estimate" if selfcond else None
            ),
        ),
        loss=Loss(fn=weighted_mse, reads=("out", "target", "weight")),
        self_conditioning=(self_conditioning(schedule, shape=latents[BASE]) if selfcond else None),
        shapes=shapes if buckets else {},
    )


def bucketed_spec(*, selfcond: bool = False, buckets: bool = True) -> PipelineSpec:
    return spec_of(build(selfcond), selfcond=selfcond, buckets=buckets)


def sample(bucket: str, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "image": torch.randn(3, *SIDES[bucket], generator=generator),
        "input_ids": torch.randint(0, 20, (5,), generator=generator),
    }


def batch(bucket: str, rows: int, *, step: int, rank: int, world: int) -> dict[str, Tensor]:
    """One rank's fields with draw keys by global slot."""
    slots = [i * world + rank for i in range(rows)]
    samples = [sample(bucket, 1009 * step + slot) for slot in slots]
    fields = {name: torch.stack([s[name] for s in samples]) for name in samples[0]}
    return {**fields, DRAW_KEY: torch.tensor([[step, slot] for slot in slots])}


def made_up_profile(graph: ModelGraph, *, frozen: int = 3) -> Profile:
    """Costs in proportion to what a layer writes, `frozen` times that of frozen ones."""

    def cost(component: Any) -> ComponentCost:
        trains = component.kind is ComponentKind.BACKBONE
        samples = (1, 2, 4, 8)
        layers = []
        for layer in component.layers:
            written = sum(graph.values[v].bytes_per_sample for v in layer.writes)
            factor = 1 if trains else frozen
            forward = tuple(5 + factor * n * written // 8 for n in samples)
            backward = tuple(2 * x for x in forward) if trains else (0,) * len(samples)
            layers.append(
                LayerCost(
                    name=layer.name, forward_us=forward, backward_us=backward,
                    input_grad_us=tuple(x // 2 for x in backward),
                    activation_bytes=(0,) * len(samples), param_bytes=0, trained_bytes=0,
                )
            )  # fmt: skip
        return ComponentCost(name=component.name, samples=samples, layers=tuple(layers))

    free = Link(latency_us=1, bytes_per_s=10**12)
    return Profile(
        graph=graph, costs=tuple(cost(c) for c in graph.components), p2p=free, allreduce=free,
        device="none", dtype="float32",
    )  # fmt: skip


class Bucketed(DiffusionModule):
    def __init__(self, *, selfcond: bool = False, lr: float = 1e-2) -> None:
        super().__init__(seed=3)
        self.selfcond, self.lr = selfcond, lr
        self.parts: nn.ModuleDict | None = None

    def configure_model(self) -> None:
        if self.parts is None:
            with torch.random.fork_rng():
                self.parts = build(self.selfcond)

    def pipeline_spec(self) -> PipelineSpec:
        assert self.parts is not None
        return spec_of(self.parts, selfcond=self.selfcond)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Pictures(Dataset[Mapping[str, Tensor]]):
    def __init__(self, buckets: Sequence[str]) -> None:
        self.buckets = buckets

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return sample(self.buckets[index], index)


class BucketedData(LightningDataModule):
    """`counts` samples of each class, in turn."""

    def __init__(self, counts: Mapping[str, int], batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.buckets = [name for name, count in counts.items() for _ in range(count)]

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = BucketBatchSampler(self.buckets, self.batch_size, seed=1)
        return DataLoader(Pictures(self.buckets), batch_sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        sampler = BucketBatchSampler(self.buckets, self.batch_size, shuffle=False)
        return DataLoader(Pictures(self.buckets), batch_sampler=sampler)

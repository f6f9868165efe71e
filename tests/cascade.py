"""A small cascaded diffusion model: a base U-Net and a super-resolution one, trained together.

Both read the same encoded caption. The second one's input is made by frozen work: its own noisy
image with the upsampled small one beside it, noised as well.
"""

from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_dpipe.models.spec import (
    DRAW_KEY,
    Field,
    FrozenComponent,
    Layer,
    Loss,
    PipelineSpec,
)
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.objective.draws import normal
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.objective.noise import noise_component
from lightning_dpipe.objective.schedule import NoiseSchedule
from lightning_dpipe.strategy.module import DiffusionModule

SIDE, TOKENS, DIM = 16, 4, 8


def unet(side: int, channels: int, resnets: int) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=side,
        in_channels=channels,
        out_channels=3,
        block_out_channels=(8, 16),
        layers_per_block=resnets,
        norm_num_groups=4,
        cross_attention_dim=DIM,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )


def beside(noisy: Tensor, low: Tensor, key: Tensor) -> Tensor:
    """The small image, upsampled and noised a little, beside the noisy large one."""
    high = nn.functional.interpolate(low, scale_factor=2.0)
    return torch.cat([noisy, high + 0.1 * normal(9, "augment", key, high.shape[1:])], dim=1)


class Cascade(DiffusionModule):
    def __init__(self, *, lr: float = 1e-3, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        self.lr = lr

    def configure_model(self) -> None:
        if hasattr(self, "base"):
            return
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.text = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
            self.base = unet(SIDE // 2, 3, 1)
            self.fine = unet(SIDE, 6, 2)

    def pipeline_spec(self) -> PipelineSpec:
        schedule = NoiseSchedule.from_scheduler(DDPMScheduler(num_train_timesteps=100))
        text = tuple(
            Layer(
                name=f"text{i}",
                module=module,
                reads=("context" if i else "caption",),
                writes=("context",),
            )
            for i, module in enumerate(self.text)
        )
        low = Layer(name="low", module=nn.AvgPool2d(2), reads=("image",), writes=("low",))
        join = Layer(
            name="join", module=beside, reads=("fine_noisy", "low", DRAW_KEY), writes=("pair",)
        )
        return PipelineSpec(
            inputs={
                "image": Field(shape=(3, SIDE, SIDE)),
                "caption": Field(shape=(TOKENS, DIM)),
            },
            frozen=(
                FrozenComponent(name="text", layers=text),
                FrozenComponent(name="low", layers=(low,)),
                noise_component(schedule, seed=1, latents="low", name="noise", prefix="base_"),
                noise_component(
                    schedule, seed=1, latents="image", name="fine_noise", prefix="fine_"
                ),
                FrozenComponent(name="join", layers=(join,)),
            ),
            backbones=(
                unet_backbone(
                    self.base, name="base", sample="base_noisy", timestep="base_timestep"
                ),
                unet_backbone(self.fine, name="fine", sample="pair", timestep="fine_timestep"),
            ),
            loss={
                name: Loss(fn=weighted_mse, reads=("out", f"{name}_target", f"{name}_weight"))
                for name in ("base", "fine")
            },
        )

    def configure_optimizers(self) -> Any:
        # A gradient that is only rounding would move its weight by lr: eps keeps it where it is.
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, eps=1e-4)


class Pictures(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.images = torch.rand(count, 3, SIDE, SIDE, generator=generator) * 2 - 1
        self.captions = torch.randn(count, TOKENS, DIM, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "caption": self.captions[index], "index": index}


class CascadeData(LightningDataModule):
    """`batch_size` is per device. `joint` is one process on the batches of so many ranks."""

    def __init__(self, *, count: int = 24, batch_size: int = 4, joint: int = 1) -> None:
        super().__init__()
        self.count, self.batch_size, self.joint = count, batch_size, joint

    def train_dataloader(self) -> DataLoader[Any]:
        data = Pictures(self.count)
        if self.joint == 1:
            return DataLoader(data, batch_size=self.batch_size, shuffle=True)
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
        return DataLoader(data, batch_size=self.joint * self.batch_size, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Pictures(8), batch_size=self.joint * self.batch_size)

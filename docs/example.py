"""A complete script: a small DiT on random images, two pipeline stages on two CPU ranks.

python docs/example.py                    # strategy="diffusionpipe"
python docs/example.py ddp                # the same module, samples, noise and losses under DDP
"""

import sys

import lightning as L
import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from torch.utils.data import DataLoader, Dataset

import lightning_dpipe  # noqa: F401  (registers the strategy)
from lightning_dpipe import BubbleFill, DiffusionModule, Field, Loss, PipelineSpec
from lightning_dpipe.models.dit import dit_backbone
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.objective.noise import noise_component
from lightning_dpipe.objective.schedule import NoiseSchedule


class Images(Dataset):
    """Random latents with a class label; a batch is a dict of tensors."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, object]:
        generator = torch.Generator().manual_seed(index)
        return {"latents": torch.randn(4, 8, 8, generator=generator), "label": index % 10}


class SmallDiT(DiffusionModule):
    """Noise is a frozen component: it runs ahead, for the next batch. The DiT is cut in stages."""

    def configure_model(self) -> None:
        """Build the modules; called on every rank."""
        self.dit = DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4,
            num_layers=6, sample_size=8, patch_size=2, num_embeds_ada_norm=10,
            norm_type="ada_norm_zero",
        )  # fmt: skip

    def pipeline_spec(self) -> PipelineSpec:
        """Layers over named tensors; a batch may hold more fields than `inputs` lists."""
        schedule = NoiseSchedule.from_scheduler(DDPMScheduler(prediction_type="v_prediction"))
        return PipelineSpec(
            inputs={
                "latents": Field(shape=(4, 8, 8)),
                "label": Field(shape=(), dtype=torch.int64),
            },
            # Reads `latents`, writes `noisy`, `timestep`, `target` and `weight`.
            frozen=(noise_component(schedule, seed=self.seed),),
            backbones=(dit_backbone(self.dit, sample="noisy", label="label", out="out"),),
            loss=Loss(fn=weighted_mse, reads=("out", "target", "weight")),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As always; weights of other stages are there by name and never get a gradient."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=sys.argv[1] if len(sys.argv) > 1 else "diffusionpipe",
        accelerator="cpu",
        devices=2,
        max_steps=10,
        callbacks=[BubbleFill()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(SmallDiT(), DataLoader(Images(), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print("loss", float(trainer.callback_metrics["train/loss"]))

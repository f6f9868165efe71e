"""Real diffusers and transformers modules at benchmark sizes, as pipeline specs."""

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel
from torch import Tensor
from transformers import BertConfig, BertModel

from lightning_dpipe.models.dit import dit_backbone
from lightning_dpipe.models.spec import DRAW_KEY, Field, Loss, PipelineSpec
from lightning_dpipe.models.text import bert_encoder
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.models.widen import widen_input
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.objective.noise import noise_component
from lightning_dpipe.objective.schedule import NoiseSchedule
from lightning_dpipe.objective.selfcond import self_conditioning
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig
from lightning_dpipe.strategy.modules.text_to_image import TextToImage

LOSS = Loss(fn=weighted_mse, reads=("out", "target", "weight"))


def schedule() -> NoiseSchedule:
    """The scaled-linear betas of Stable Diffusion, v-prediction."""
    return NoiseSchedule.from_scheduler(
        DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    )


def unet_spec(*, seed: int = 0, selfcond: bool = False) -> PipelineSpec:
    """A small SD-shaped U-Net on 8x8 latents with a BERT encoder of random weights."""
    torch.manual_seed(seed)
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32, 32),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        use_linear_projection=True,
        norm_num_groups=8,
    )
    if selfcond:
        widen_input(unet, 4)
    text = BertModel(
        BertConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=16,
        ),
        add_pooling_layer=False,
    )
    text.eval().requires_grad_(False)
    return PipelineSpec(
        inputs={
            "latents": Field(shape=(4, 8, 8)),
            "input_ids": Field(shape=(8,), dtype=torch.int64),
            "attention_mask": Field(shape=(8,), dtype=torch.int64),
        },
        frozen=(bert_encoder(text), noise_component(schedule(), seed=seed)),
        backbones=(
            unet_backbone(unet, sample="noisy", self_cond="estimate" if selfcond else None),
        ),
        loss=LOSS,
        self_conditioning=self_conditioning(schedule(), shape=(4, 8, 8)) if selfcond else None,
    )


def dit_spec(
    *,
    seed: int = 0,
    depth: int = 6,
    width: int = 64,
    side: int = 8,
    selfcond: bool = False,
    noised: bool = True,
) -> PipelineSpec:
    """A DiT of `depth` blocks on ``4 x side x side`` latents, patch 2.

    `noised` False: the batch brings what the noise component would write; nothing is frozen.
    """
    torch.manual_seed(seed)
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=width // 4,
        in_channels=4,
        out_channels=4,
        num_layers=depth,
        sample_size=side,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_type="ada_norm_zero",
    )
    if selfcond:
        widen_input(model, 4)
    for p in model.parameters():  # zero-initialised projections would hide most gradients
        if not p.any():
            torch.nn.init.normal_(p, std=0.02)
    image = Field(shape=(4, side, side))
    label = Field(shape=(), dtype=torch.int64)
    if noised:
        inputs = {"latents": image, "label": label}
    else:
        inputs = {"noisy": image, "target": image, "weight": Field(shape=()), "timestep": label}
        inputs["label"] = label
    return PipelineSpec(
        inputs=inputs,
        frozen=(noise_component(schedule(), seed=seed),) if noised else (),
        backbones=(
            dit_backbone(model, sample="noisy", self_cond="estimate" if selfcond else None),
        ),
        loss=LOSS,
        self_conditioning=(
            self_conditioning(schedule(), shape=(4, side, side)) if selfcond else None
        ),
    )


def fields(spec: PipelineSpec, rows: int, *, step: int, rank: int, world: int) -> dict[str, Tensor]:
    """One rank's batch of a step: random data and draw keys, by global slot."""
    slots = [i * world + rank for i in range(rows)]
    batch = {DRAW_KEY: torch.tensor([[step, slot] for slot in slots])}
    for name, field in spec.inputs.items():
        batch[name] = torch.stack([_sample(name, field, 1_000_003 * step + slot) for slot in slots])
    return batch


def _sample(name: str, field: Field, seed: int) -> Tensor:
    if name == "attention_mask":
        return torch.ones(field.shape, dtype=field.dtype)
    generator = torch.Generator().manual_seed(seed)
    if field.dtype.is_floating_point:
        return torch.randn(field.shape, generator=generator)
    return torch.randint(0, 9, field.shape, generator=generator)


def emoji_spec(*, tokens: int = 16) -> PipelineSpec:
    """The model of recipe `emoji_unet`: its U-Net on 32-pixel images, the real MiniLM encoder."""
    torch.manual_seed(0)
    unet = {
        "sample_size": 16,
        "in_channels": 12,
        "out_channels": 12,
        "block_out_channels": (48, 96, 96),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 384,
        "attention_head_dim": 4,
        "use_linear_projection": True,
        "norm_num_groups": 16,
    }
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    module = TextToImage(
        unet=unet, scheduler=scheduler, optimizer=AdamWConfig(), num_tokens=tokens, seed=0
    )
    module.configure_model()
    return module.pipeline_spec()

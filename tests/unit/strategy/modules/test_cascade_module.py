"""The cascade: two models that do not see each other in training, and draw one after the other."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.data.shapes import ShapesDataModule
from lightning_dpipe.models.spec import DRAW_KEY, Backbone, Layer
from lightning_dpipe.strategy.local import sample_losses
from lightning_dpipe.strategy.modules.cascade import Cascade
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig

UNET: dict[str, Any] = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 8, "attention_head_dim": 2,
}  # fmt: skip
TEXT = {
    "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 8,
}  # fmt: skip


def build(**changes: Any) -> Cascade:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "base": {**UNET, "sample_size": 4, "in_channels": 12, "out_channels": 12},
        "sr": {**UNET, "sample_size": 8, "in_channels": 25, "out_channels": 12},
        "scheduler": DDPMScheduler(prediction_type="sample"), "optimizer": AdamWConfig(),
        "image_size": 16, "num_tokens": 4, "text": TEXT, "seed": 3, **changes,
    }  # fmt: skip
    module = Cascade(**options)
    module.configure_model()
    return module.eval()


def batch(count: int) -> dict[str, Tensor]:
    fields: dict[str, Tensor] = next(iter(ShapesDataModule(batch_size=count).val_dataloader()))
    return {**fields, DRAW_KEY: torch.tensor([[0, i] for i in range(count)])}


def test_each_loss_trains_its_own_model_only() -> None:
    module = build()
    losses = sample_losses(module.spec, batch(3), self_conditioned=False)
    assert set(losses) == {"base", "sr"}
    for name, other in (("base", "sr"), ("sr", "base")):
        module.zero_grad()
        losses[name].mean().backward(retain_graph=True)
        assert all(p.grad is not None for p in getattr(module, name).parameters())
        assert all(p.grad is None for p in getattr(module, other).parameters())


def test_the_large_model_is_told_what_the_small_picture_is() -> None:
    """With zero weights for the conditioning its loss is another one."""
    module, fields = build(), batch(3)
    before = sample_losses(module.spec, fields, self_conditioned=False)
    with torch.no_grad():
        module.sr.conv_in.weight[:, 12:] = 0.0
    after = sample_losses(module.spec, fields, self_conditioned=False)
    assert not torch.equal(before["sr"], after["sr"])
    assert torch.equal(before["base"], after["base"])


def test_pictures_are_drawn_small_and_then_enlarged(monkeypatch: pytest.MonkeyPatch) -> None:
    module, fields = build(sample_augmentation=0.0), batch(4)
    seen: dict[str, Tensor] = {}
    enlarge = module.enlarge

    def spy(small: Tensor, context: Tensor, **options: Any) -> Tensor:
        seen.update(small=small, context=context)
        return enlarge(small, context, **options)

    monkeypatch.setattr(module, "enlarge", spy)
    drawn = module.draw_samples(fields, num_steps=3, guidance=2.0)
    assert drawn.shape == (4, 3, 16, 16)
    assert seen["small"].shape == (4, 3, 8, 8)
    assert float(seen["small"].abs().max()) <= 1.0
    assert torch.equal(drawn, module.draw_samples(fields, num_steps=3, guidance=2.0))
    other = enlarge(-seen["small"], seen["context"], num_steps=3, guidance=2.0)
    assert not torch.equal(drawn, other)


def test_a_model_that_copies_its_conditioning_enlarges_the_small_picture() -> None:
    """Channels mean the same in training and sampling: the picture, not its noise or its level."""

    class Copies(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return tensors[1][:, :12]

    module = build(sample_augmentation=0.0)
    layer = Layer(name="copy", module=Copies(), reads=("sr_noisy", "conditioning"), writes=("out",))
    copies = Backbone(name="sr", layers=(layer,))
    module._spec = replace(module.spec, backbones=(module.spec.backbones[0], copies))
    small = torch.rand(2, 3, 8, 8) * 2 - 1
    large = module.enlarge(small, torch.zeros(2, 4, 8), num_steps=4, guidance=1.0)
    assert torch.allclose(large, nn.functional.interpolate(small, scale_factor=2.0), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sample_augmentation": 0.6},
            r"sample_augmentation=0.6 is not in \[0, augmentation=0.5\]",
        ),
        ({"image_size": 18}, "image_size=18 is not a multiple of 4"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(**options)

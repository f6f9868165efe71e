import torch

from lightning_dpipe.objective.pixels import pixel_latents


def test_pixel_shuffle_undoes_the_component() -> None:
    (layer,) = pixel_latents(2).layers
    image = torch.randn(3, 3, 32, 32)
    latents = layer.module(image)
    assert latents.shape == (3, 12, 16, 16)
    assert torch.equal(torch.nn.PixelShuffle(2)(latents), image)

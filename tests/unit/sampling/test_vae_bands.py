"""Bands against the library's own decode: same image, less memory, nothing left behind."""

import threading
import weakref
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_dpipe.core.errors import PlanError, RankError, UnsupportedError
from lightning_dpipe.sampling.bands import BandGroup, OneBand, even_bands, run_threads
from lightning_dpipe.sampling.vae_bands import decode_band, join_bands


def autoencoder(**changes: Any) -> AutoencoderKL:
    """Three resolutions, two resnets each, attention in the middle."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (8, 16, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
    }
    vae = AutoencoderKL(**{**config, **changes}).eval().requires_grad_(False)
    for parameter in vae.parameters():  # norms and biases are not what they start as
        parameter.add_(0.1 * torch.randn_like(parameter))
    return vae


VAE = autoencoder()


def whole(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    with torch.no_grad():
        image: Tensor = vae.decode(latents, return_dict=False)[0]
    return image


def banded(vae: AutoencoderKL, latents: Tensor, bands: tuple[int, ...]) -> Tensor:
    def work(group: BandGroup) -> Tensor:
        return decode_band(vae, latents, group, bands=bands)

    return torch.cat(run_threads(len(bands), work), dim=2)


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 7), st.integers(1, 2))
def test_any_bands_give_the_image(bands: list[int], width: int, batch: int) -> None:
    latents = torch.randn(batch, 4, sum(bands), width, generator=torch.Generator().manual_seed(1))
    image = whole(VAE, latents)
    assert distance(banded(VAE, latents, tuple(bands)), image) <= 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"use_post_quant_conv": False},
        {"mid_block_add_attention": False},
        {"layers_per_block": 2, "block_out_channels": (8, 8, 16)},
        {"block_out_channels": (8, 16, 16), "norm_num_groups": 8},
    ],
)
def test_every_shape_of_decoder(changes: dict[str, Any]) -> None:
    vae, latents = autoencoder(**changes), torch.randn(1, 4, 7, 5)
    assert distance(banded(vae, latents, (2, 1, 4)), whole(vae, latents)) <= 1e-5


def test_one_band_is_the_image_and_everyone_can_have_it() -> None:
    latents = torch.randn(1, 4, 6, 5)
    image = whole(VAE, latents)
    assert distance(decode_band(VAE, latents, OneBand()), image) <= 1e-5

    def work(group: BandGroup) -> Tensor:
        bands = even_bands(6, group.size)
        return join_bands(decode_band(VAE, latents, group), group, bands, 6)

    for joined in run_threads(4, work):
        assert distance(joined, image) <= 1e-5


def test_a_norm_far_from_zero_keeps_its_digits() -> None:
    # Sums of squares would lose the variance next to a mean of 1000.
    vae = autoencoder()
    vae.decoder.conv_in.bias.add_(1000.0)
    latents = torch.randn(1, 4, 6, 5)
    double = vae.double()
    exact = whole(double, latents.double())
    vae = double.float()
    error = distance(banded(vae, latents, (1, 3, 2)).double(), exact)
    assert error <= 2 * distance(whole(vae, latents).double(), exact) + 1e-5


def test_half_precision_is_as_near_as_the_library_is() -> None:
    vae = autoencoder()
    latents = torch.randn(1, 4, 6, 5)
    exact = whole(vae, latents)
    vae.to(torch.bfloat16)
    theirs = distance(whole(vae, latents.bfloat16()).float(), exact)
    mine = distance(banded(vae, latents.bfloat16(), (2, 4)).float(), exact)
    assert mine <= 1.5 * theirs


class Peak(TorchDispatchMode):
    """Most bytes that were alive at once, of what operations of this thread made."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()
        self.lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                with self.lock:
                    if key not in self.seen:
                        self.seen.add(key)
                        self.now += size
                        weakref.finalize(storage, self.free, key, size)
                    self.peak = max(self.peak, self.now)
        return out

    def free(self, key: int, size: int) -> None:
        with self.lock:
            self.seen.discard(key)
            self.now -= size


def test_a_rank_needs_less_memory_the_more_there_are() -> None:
    latents = torch.randn(1, 4, 32, 16)
    with Peak() as one:
        whole(VAE, latents)

    def work(group: BandGroup) -> int:
        with Peak() as own:
            decode_band(VAE, latents, group)
        return own.peak

    shares = {size: max(run_threads(size, work)) / one.peak for size in (1, 2, 4)}
    assert shares[1] <= 1.05
    assert shares[2] <= 0.55
    assert shares[4] <= 0.3


def test_nothing_is_left_behind() -> None:
    latents = torch.randn(1, 4, 5, 5)
    before = {name: set(vars(module)) for name, module in VAE.named_modules()}
    processors = dict(VAE.attn_processors)
    image = whole(VAE, latents)
    banded(VAE, latents, (2, 3))
    assert {name: set(vars(module)) for name, module in VAE.named_modules()} == before
    assert VAE.attn_processors == processors
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in VAE.modules())
    assert torch.equal(whole(VAE, latents), image)


@pytest.mark.parametrize(
    ("bands", "words"),
    [((3, 3), "bands .3, 3. for 2 ranks and 5 rows"), ((5, 0), "each rank at least one row")],
)
def test_bands_that_are_not_the_image_are_refused(bands: tuple[int, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        banded(VAE, torch.randn(1, 4, 5, 5), bands)


def test_fewer_rows_than_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="2 rows for 3 ranks; use 1 to 2 ranks"):
        run_threads(3, lambda group: decode_band(VAE, torch.randn(1, 4, 2, 5), group))


def test_a_failing_band_stops_the_others() -> None:
    def work(group: BandGroup) -> Tensor:
        if group.rank == 1:
            raise ValueError("this band is lost")
        return decode_band(VAE, torch.randn(1, 4, 5, 5), group)

    with pytest.raises(ValueError, match="this band is lost"):
        run_threads(2, work, timeout_s=20)


def test_a_band_that_never_comes_is_given_up() -> None:
    def work(group: BandGroup) -> Tensor | None:
        return decode_band(VAE, torch.randn(1, 4, 5, 5), group) if group.rank else None

    with pytest.raises(RankError, match="did not answer in time"):
        run_threads(2, work, timeout_s=0.2)


def test_parts_that_bands_do_not_know_are_refused() -> None:
    latents = torch.randn(1, 4, 4, 4)
    vae = autoencoder()
    vae.enable_tiling()
    with pytest.raises(UnsupportedError, match="uses tiling"):
        decode_band(vae, latents, OneBand())
    vae = autoencoder()
    vae.decoder.up_blocks[0].resnets[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"up_blocks.0.resnets.0 .* has hooks"):
        decode_band(vae, latents, OneBand())
    vae = autoencoder()
    vae.decoder.conv_out = torch.nn.Conv2d(8, 3, 5, padding=2)
    with pytest.raises(UnsupportedError, match=r"conv_out \(Conv2d\) is a convolution"):
        decode_band(vae, latents, OneBand())
    vae = autoencoder(
        up_block_types=("UpDecoderBlock2D", "AttnUpDecoderBlock2D", "UpDecoderBlock2D")
    )
    with pytest.raises(UnsupportedError, match="block up1 is a AttnUpDecoderBlock2D"):
        decode_band(vae, latents, OneBand())

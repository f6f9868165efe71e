"""Families against the models themselves: parameters, FLOPs, kernels, all from diffusers' code."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from diffusers import (
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models import presets
from lightning_dpipe.sampling.shapes import DIT_XL_2, FAMILIES, FLUX, PIXART, SD3, Family

MODELS: Mapping[str, tuple[type, Mapping[str, Any], Family]] = {
    "dit": (DiTTransformer2DModel, presets.DIT_XL_2_256, DIT_XL_2),
    "pixart": (PixArtTransformer2DModel, presets.PIXART_ALPHA_512, PIXART),
    "sd3": (SD3Transformer2DModel, presets.SD3_M, SD3),
    "flux": (FluxTransformer2DModel, presets.FLUX_DEV, FLUX),
}


def test_every_published_family_is_checked() -> None:
    assert set(FAMILIES.values()) == {family for _, _, family in MODELS.values()}


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_shapes_are_those_of_the_model(name: str) -> None:
    kind, config, family = MODELS[name]
    model = presets.on_meta(kind, config)
    assert sum(p.numel() for p in model.parameters()) == family.parameters
    lists = [model.transformer_blocks, getattr(model, "single_transformer_blocks", None)]
    for blocks, kinds in zip([b for b in lists if b], family.blocks, strict=True):
        assert len(blocks) == kinds.count
        assert sum(p.numel() for p in blocks[0].parameters()) == kinds.parameters
    assert family.heads == config["num_attention_heads"]
    assert family.width == family.heads * config["attention_head_dim"]


# Forward passes of the whole model; image sides in pixels, text tokens as in the call.
def _run(name: str, model: Any, side: int, text: int) -> None:
    latent = side // 8
    meta = {"device": "meta"}
    with torch.no_grad():
        if name == "dit":
            zero = torch.zeros(1, dtype=torch.long, **meta)
            model(torch.empty(1, 4, latent, latent, **meta), timestep=zero, class_labels=zero)
        elif name == "pixart":
            model(
                torch.empty(1, 4, latent, latent, **meta),
                encoder_hidden_states=torch.empty(1, text, 4096, **meta),
                timestep=torch.zeros(1, **meta),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            )
        elif name == "sd3":
            model(
                torch.empty(1, 16, latent, latent, **meta),
                encoder_hidden_states=torch.empty(1, text, 4096, **meta),
                pooled_projections=torch.empty(1, 2048, **meta),
                timestep=torch.zeros(1, **meta),
            )
        else:
            image = (side // 16) ** 2
            model(
                torch.empty(1, image, 64, **meta),
                encoder_hidden_states=torch.empty(1, text, 4096, **meta),
                pooled_projections=torch.empty(1, 768, **meta),
                timestep=torch.zeros(1, **meta),
                guidance=torch.zeros(1, **meta),
                img_ids=torch.zeros(image, 3, **meta),
                txt_ids=torch.zeros(text, 3, **meta),
            )


@pytest.mark.parametrize(("name", "side"), [("dit", 256), ("pixart", 512), ("sd3", 1024)])
def test_flops_are_those_of_a_forward_pass(name: str, side: int) -> None:
    kind, config, family = MODELS[name]
    model = presets.on_meta(kind, config).eval()
    with FlopCounterMode(display=False) as counter:
        _run(name, model, side, family.text_tokens)
    mine = family.step_flops(side) / family.branches
    assert mine == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_flops_of_flux_by_block() -> None:
    # Its forward pass is too long for a test; one block of each kind, at 1024 px with 512 words.
    kind, config, family = MODELS["flux"]
    model = presets.on_meta(kind, {**config, "num_layers": 1, "num_single_layers": 1}).eval()
    with FlopCounterMode(display=False) as counter:
        _run("flux", model, 1024, 512)
    embedders = 2 * (4096 * (64 + 64) + 512 * 4096) * 3072
    mine = sum(sum(family.products(k, 4096, 512, 4608)) for k in family.blocks)
    assert mine + embedders == pytest.approx(counter.get_total_flops(), rel=0.005)


class Launches(TorchDispatchMode):
    """Counts operations that are kernels: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        free = func.is_view or func.__name__.startswith(("_unsafe_view", "empty"))
        self.count += not free
        return func(*args, **(kwargs or {}))


def launches(block: Callable[..., Any], **inputs: Any) -> int:
    counted = Launches()
    with torch.no_grad(), counted:
        block(**inputs)
    return counted.count


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_a_block_are_those_its_code_launches(name: str) -> None:
    kind, config, family = MODELS[name]
    width = 2 * config["attention_head_dim"]
    narrow = {**config, "num_attention_heads": 2, "num_layers": 2}
    narrow |= {
        key: width for key in ("cross_attention_dim", "caption_projection_dim") if key in config
    }
    narrow |= {"num_single_layers": 1} if name == "flux" else {}
    model = kind(**narrow).to(torch.bfloat16).eval()
    batch = family.branches
    image, text = _rows(batch, 8, width), _rows(batch, 5, width)
    ids = torch.ones(batch, dtype=torch.long)
    inputs: dict[str, dict[str, Any]] = {
        "dit": {"timestep": ids, "class_labels": ids},
        "pixart": {"encoder_hidden_states": text, "timestep": _rows(batch, 6 * width)},
        "sd3": {"encoder_hidden_states": text, "temb": _rows(batch, width)},
        "flux": {
            "encoder_hidden_states": text,
            "temb": _rows(batch, width),
            "image_rotary_emb": (torch.randn(13, 128), torch.randn(13, 128)),
        },
    }
    blocks = [model.transformer_blocks[0]]
    blocks += [model.single_transformer_blocks[0]] if name == "flux" else []
    counted = [launches(block, hidden_states=image, **inputs[name]) for block in blocks]
    assert counted == [kinds.kernels for kinds in family.blocks]


def test_sizes_that_are_no_whole_tokens_are_refused() -> None:
    assert FLUX.grid((512, 1024)) == (32, 64)
    with pytest.raises(SpecError, match=r"height 1000 px.*multiple of the 16 px.*nearest: 992"):
        FLUX.grid((1000, 1024))
    with pytest.raises(SpecError, match="width 0 px"):
        FLUX.grid((1024, 0))

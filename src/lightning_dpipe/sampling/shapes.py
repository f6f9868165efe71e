"""Diffusion transformers as the cost model sees them: shapes, arithmetic, weights.

In:     the size of an image in pixels. Out: tokens, FLOPs and bytes of its blocks.
Numbers are those of the published configurations (tests compare them with `models/presets.py`:
parameters, FLOPs of a forward pass, kernels of a block). FLOPs are 2 per multiply-add and count
matrix products of blocks, which are over 98 % of a forward pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from lightning_dpipe.core.errors import SpecError

BYTES = 2
"""Of an activation or a weight: sampling runs in bfloat16."""


class Attention(Enum):
    """What the image tokens of a block attend to beside themselves."""

    SELF = "self"
    CROSS = "cross"  # text in an attention of its own, keys and values constant over the steps
    JOINT = "joint"  # text tokens are in the sequence, with weights of their own
    SINGLE = "single"  # text tokens are in the sequence, with the image's weights

    @property
    def has_text_rows(self) -> bool:
        """Whether the block works on text tokens too."""
        return self in (Attention.JOINT, Attention.SINGLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """`count` like blocks of `parameters` each; `kernels` are launched for one forward pass."""

    attention: Attention
    count: int
    parameters: int
    kernels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A diffusion transformer.

    Attributes:
        name: For messages.
        blocks: Kinds of blocks in the order of the model.
        width: Of a token.
        heads: Of every attention.
        text_tokens: Of one prompt; 0 for class labels.
        pixels: Side of the square of pixels that is one token.
        token_values: Latent values of one token (what a solver steps on).
        branches: 2 if classifier-free guidance runs the model with and without the prompt.
        parameters: Of the transformer.
        text_parameters: Of its text encoders.
        steps: Usual number of solver steps.
    """

    name: str
    blocks: tuple[BlockKind, ...]
    width: int
    heads: int
    text_tokens: int
    pixels: int
    token_values: int
    branches: int
    parameters: int
    text_parameters: int
    steps: int

    @property
    def layers(self) -> int:
        """Blocks of all kinds."""
        return sum(kind.count for kind in self.blocks)

    @property
    def sequence_text(self) -> int:
        """Text tokens that take part in the sequence, so that methods have to cut or send them."""
        return self.text_tokens if self.blocks[0].attention.has_text_rows else 0

    def grid(self, size: "Size") -> tuple[int, int]:
        """Rows and columns of tokens of an image.

        Raises:
            SpecError: A side is not a multiple of a token's pixels.
        """
        height, width = (size, size) if isinstance(size, int) else size
        for name, side in (("height", height), ("width", width)):
            if side <= 0 or side % self.pixels:
                nearest = max(1, round(side / self.pixels)) * self.pixels
                raise SpecError(
                    f"{name} {side} px of a {self.name} image is not a multiple of the "
                    f"{self.pixels} px of a token; nearest: {nearest}"
                )
        return height // self.pixels, width // self.pixels

    def tokens(self, size: "Size") -> int:
        """Image tokens."""
        rows, columns = self.grid(size)
        return rows * columns

    def sequence(self, size: "Size") -> int:
        """Tokens that attend to each other: ``p`` of the papers' formulas."""
        return self.tokens(size) + self.sequence_text

    def kv_bytes(self, size: "Size", *, branches: int | None = None) -> int:
        """Keys and values of one block for the whole sequence."""
        count = self.branches if branches is None else branches
        return 2 * count * self.sequence(size) * self.width * BYTES

    def kinds(self) -> tuple[BlockKind, ...]:
        """The kind of every block, in the order of the model."""
        return tuple(kind for kind in self.blocks for _ in range(kind.count))

    def step_flops(self, size: "Size") -> int:
        """Of one solver step with all branches on one device."""
        image, text = self.tokens(size), self.sequence_text
        one = sum(
            kind.count * sum(self.products(kind, image, text, image + text)) for kind in self.blocks
        )
        return self.branches * one

    def products(self, kind: BlockKind, image: int, text: int, keys: int) -> tuple[int, ...]:
        """FLOPs of every matrix product of a block for one branch; the attention, as one, is first.

        Args:
            kind: The block.
            image: Image tokens that it works on.
            text: Text tokens that it works on (joint and single blocks).
            keys: Tokens that they attend to.
        """
        square = 2 * self.width**2
        found = [4 * (image + text) * keys * self.width]
        if kind.attention is Attention.SINGLE:
            image, text = image + text, 0
        # Queries, keys, values, result, and both matrices of the MLP; text has its own.
        found += [n * rows * square for rows in (image, text) if rows for n in (1, 1, 1, 1, 4, 4)]
        if kind.attention is Attention.CROSS:  # text keys and values are made once an image
            found += [image * square] * 2 + [4 * image * self.text_tokens * self.width]
        return tuple(found)


Size = int | tuple[int, int]
"""Side of a square image in pixels, or (height, width)."""

_T5_XXL = 4_762_310_656
_CLIP_L = 123_060_480
_CLIP_G = 694_659_840

DIT_XL_2 = Family(
    name="DiT-XL/2",
    blocks=(
        BlockKind(attention=Attention.SELF, count=28, parameters=26_682_624, kernels=40),
    ),
    width=1152, heads=16, text_tokens=0, pixels=16, token_values=16, branches=2,
    parameters=749_826_464, text_parameters=0, steps=50,
)  # fmt: skip
PIXART = Family(
    name="PixArt-alpha",
    blocks=(
        BlockKind(attention=Attention.CROSS, count=28, parameters=21_255_552, kernels=29),
    ),
    width=1152, heads=16, text_tokens=120, pixels=16, token_values=16, branches=2,
    parameters=610_856_096, text_parameters=_T5_XXL, steps=20,
)  # fmt: skip
SD3 = Family(
    name="SD3-M",
    blocks=(
        BlockKind(attention=Attention.JOINT, count=24, parameters=84_980_736, kernels=51),
    ),
    width=1536, heads=24, text_tokens=333, pixels=16, token_values=64, branches=2,
    parameters=2_028_328_000, text_parameters=_T5_XXL + _CLIP_L + _CLIP_G, steps=20,
)  # fmt: skip
FLUX = Family(
    name="Flux-dev",
    blocks=(
        BlockKind(attention=Attention.JOINT, count=19, parameters=339_831_296, kernels=94),
        BlockKind(attention=Attention.SINGLE, count=38, parameters=141_591_808, kernels=49),
    ),
    width=3072, heads=24, text_tokens=512, pixels=16, token_values=64, branches=1,
    parameters=11_901_408_320, text_parameters=_T5_XXL + _CLIP_L, steps=28,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "dit_xl_2": DIT_XL_2, "pixart": PIXART, "sd3": SD3, "flux": FLUX,
}  # fmt: skip

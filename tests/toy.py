"""A small diffusion model and data set for the tests of the strategy: MLP blocks with a skip.

Frozen: an encoder with dropout (which eval mode must silence), keyed noise. Trained: blocks of a
residual MLP over named tensors; the last one reads the first one's output as a skip.
"""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_dpipe.models.spec import (
    DRAW_KEY,
    Backbone,
    Field,
    FrozenComponent,
    Layer,
    Loss,
    PipelineSpec,
    SelfConditioning,
)
from lightning_dpipe.objective.draws import integers, normal
from lightning_dpipe.strategy.module import DiffusionModule

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, h: Tensor, temb: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h + temb)))


class Join(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)

    def forward(self, h: Tensor, skip: Tensor) -> Tensor:
        return self.mix(torch.cat([h, skip], dim=1))


class Mix(nn.Module):
    """First layer: the noisy input and, when there is one, the estimate fed back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.back = nn.Linear(width, width)

    def forward(self, noisy: Tensor, estimate: Tensor) -> Tensor:
        return self.inner(noisy) + self.back(estimate)


def draw(x: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    noise = normal(3, "noise", key, x.shape[1:]).to(x.device)
    when = (integers(3, "time", key, 100).to(x.device).float() / 100)[:, None]
    return (1 - when) * x + when * noise, when, noise - x


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().mean(dim=1)


class Toy(DiffusionModule):
    def __init__(
        self,
        *,
        blocks: int = 3,
        self_conditioning: bool = False,
        lr: float = 1e-2,
        optimizer: str = "adamw",
        seed: int | None = None,
        spec_error: bool = False,
    ) -> None:
        super().__init__(seed=seed)
        self.save_hyperparameters(ignore=["seed"])
        self.blocks: nn.ModuleList | None = None

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.encoder = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)
            )
            self.time = nn.Linear(1, WIDTH)
            self.entry = (
                Mix(WIDTH) if self.hparams["self_conditioning"] else nn.Linear(WIDTH, WIDTH)
            )
            self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(self.hparams["blocks"]))
            self.join = Join(WIDTH)

    def pipeline_spec(self) -> PipelineSpec:
        assert self.blocks is not None
        feedback = ("estimate",) if self.hparams["self_conditioning"] else ()
        layers = [
            Layer(name="time", module=self.time, reads=("when",), writes=("temb",)),
            Layer(name="entry", module=self.entry, reads=("noisy", *feedback), writes=("h",)),
        ]
        for i, block in enumerate(self.blocks):
            writes = ("skip",) if i == 0 else ("h",)
            reads = ("skip", "temb") if i == 1 else ("h", "temb")
            layers.append(Layer(name=f"block{i}", module=block, reads=reads, writes=writes))
        missing = "nowhere" if self.hparams["spec_error"] else "skip"
        layers.append(
            Layer(name="join", module=self.join, reads=("h", missing), writes=("prediction",))
        )
        encode = tuple(
            Layer(name=f"encode{i}", module=m, reads=("image" if i == 0 else "e",), writes=("e",))
            for i, m in enumerate(self.encoder)
        )
        noise = Layer(
            name="draw", module=draw, reads=("e", DRAW_KEY), writes=("noisy", "when", "target")
        )
        conditioning = SelfConditioning(
            writes="estimate",
            estimate=lambda prediction, noisy: noisy - prediction,
            reads=("prediction", "noisy"),
            shape=(WIDTH,),
        )
        return PipelineSpec(
            inputs={"image": Field(shape=(WIDTH,))},
            frozen=(
                FrozenComponent(name="encoder", layers=encode),
                FrozenComponent(name="noise", layers=(noise,)),
            ),
            backbones=(Backbone(name="mlp", layers=tuple(layers)),),
            loss=Loss(fn=squared_error, reads=("prediction", "target")),
            self_conditioning=conditioning if feedback else None,
        )

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.hparams["optimizer"] == "sgd":
            return torch.optim.SGD(trained, lr=self.hparams["lr"])
        return torch.optim.AdamW(trained, lr=self.hparams["lr"], weight_decay=0.01)


class Images(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, salt: int = 0) -> None:
        generator = torch.Generator().manual_seed(11 + salt)
        self.images = torch.randn(count, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "index": index}


class ToyData(LightningDataModule):
    """`batch_size` is per device, as under DDP."""

    def __init__(self, *, count: int = 32, batch_size: int = 8, val: int = 16) -> None:
        super().__init__()
        self.count, self.batch_size, self.val = count, batch_size, val

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Images(self.count), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Images(self.val, salt=1), batch_size=self.batch_size)

    predict_dataloader = test_dataloader = val_dataloader

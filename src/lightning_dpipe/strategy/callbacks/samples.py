"""Draw what the model has learnt: a grid of samples beside the real held-out images.

In:     a module with ``draw_samples(fields, num_steps=, guidance=)`` and a datamodule of map-style
        datasets whose samples hold ``image``.
Out:    a PNG at the end of training, and during it if asked for, in W&B too, and how near the
        samples came to what was asked.

Sampling runs in one process, on rank 0, from the weights of all stages (averaged ones, if there is
an `EMA` callback); the other ranks wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import default_collate

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.data.fields import FieldDataset
from lightning_dpipe.sampling.grid import save_grid
from lightning_dpipe.sampling.ranks import nearest_ranks
from lightning_dpipe.strategy.callbacks.ema import EMA
from lightning_dpipe.strategy.callbacks.whole import gather_weights, whole_weights


@runtime_checkable
class DrawsSamples(Protocol):
    """A module that `SampleGrid` can ask for images."""

    def draw_samples(
        self, fields: Mapping[str, Tensor], *, num_steps: int, guidance: float
    ) -> Tensor:
        """One image per row of the batch fields, ``[batch, channels, height, width]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What was asked and what came out.

    `hits`: to how many samples the nearest real image is the asked one, or one of the asked label.
    `ranks`: place of each asked image among all real ones, nearest first, 1 is best; empty for
    labels, which many images share.
    """

    captions: tuple[str, ...]
    hits: int
    ranks: tuple[int, ...]
    num_references: int
    path: Path


class SampleGrid(Callback):
    """Draw the held-out captions (or labels) when training ends, always from the same noise.

    Args:
        path: The PNG to write; those drawn during training have ``_step_N`` in their names.
        num_samples: At most so many of the validation set, in its order.
        num_steps: Steps of the sampler.
        guidance: Classifier-free guidance; 1 is none.
        every_n_validations: Draw after every so many validations too; None: only at the end.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        num_samples: int = 24,
        num_steps: int = 30,
        guidance: float = 2.0,
        every_n_validations: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.num_samples = num_samples
        self.num_steps = num_steps
        self.guidance = guidance
        self.every_n_validations = every_n_validations
        self.drawn: Drawn | None = None
        self._validations = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a module that cannot draw before it has trained for hours.

        Raises:
            UnsupportedError: The module has no ``draw_samples``.
        """
        if not isinstance(pl_module, DrawsSamples):
            raise UnsupportedError(
                f"SampleGrid asks {type(pl_module).__name__} for draw_samples(fields, num_steps=, "
                "guidance=), which it does not have; define it, or remove the callback "
                "(~callbacks.sample_grid)"
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw if it is this validation's turn."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        self._validations += 1
        every = self.every_n_validations
        if every is not None and self._validations % every == 0:
            name = f"{self.path.stem}_step_{trainer.global_step}{self.path.suffix}"
            self._draw_together(trainer, pl_module, self.path.with_name(name))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the final samples."""
        self._draw_together(trainer, pl_module, self.path)

    def _draw_together(self, trainer: Trainer, pl_module: LightningModule, path: Path) -> None:
        """Draw on rank 0 with the weights of all ranks."""
        weights = gather_weights(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EMA):
                weights = {**weights, **callback.gather()}
        if trainer.is_global_zero:
            with whole_weights(pl_module, weights):
                self._draw(trainer, pl_module, path)
        trainer.strategy.barrier("samples are drawn")

    def _draw(self, trainer: Trainer, module: Any, path: Path) -> None:
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        asked = datamodule.val_dataloader().dataset
        shown = list(range(min(self.num_samples, len(asked))))
        fields = default_collate([asked[i] for i in shown])
        if "image" not in fields and hasattr(module, "real_images"):
            fields["image"] = module.real_images(fields)
        images = module.draw_samples(fields, num_steps=self.num_steps, guidance=self.guidance)
        captions = captions_of(datamodule, fields)
        save_grid(path, {"real": fields["image"], "drawn": images}, captions)
        # Held-out images come first, so that a sample's number is its image's place.
        others = [x.fields for x in (asked, datamodule.train_dataloader().dataset) if _in_memory(x)]
        self.drawn = _score(captions, fields, images.cpu(), others or [fields], path)
        if trainer.logger is not None and hasattr(trainer.logger, "log_image"):
            trainer.logger.log_image(key="samples", images=[str(path)])


def _score(
    captions: Sequence[str],
    fields: Mapping[str, Tensor],
    images: Tensor,
    references: Sequence[Mapping[str, Tensor]],
    path: Path,
) -> Drawn:
    """Compare samples with all real images by pixel distance."""
    real = torch.cat([x["image"] for x in references])
    ranks: tuple[int, ...] = ()
    if "label" in fields:
        labels = torch.cat([x["label"] for x in references])
        nearest = torch.cdist(images.flatten(1).double(), real.flatten(1).double()).argmin(1)
        hits = int((labels[nearest] == fields["label"]).sum())
    else:
        ranks = nearest_ranks(images, real, torch.arange(len(images)))
        hits = sum(rank == 1 for rank in ranks)
    return Drawn(
        captions=tuple(captions), hits=hits, ranks=ranks, num_references=len(real), path=path
    )


def captions_of(datamodule: Any, fields: Mapping[str, Tensor]) -> Sequence[str]:
    """Captions of the first validation samples: the datamodule's, else labels, else numbers."""
    count = len(next(iter(fields.values())))
    if hasattr(datamodule, "validation_captions"):
        return tuple(datamodule.validation_captions)[:count]
    return [str(int(x)) for x in fields.get("label", torch.arange(count))]


def _in_memory(dataset: Any) -> bool:
    """Whether all images can be compared at no cost; a large set is not read for it."""
    return isinstance(dataset, FieldDataset)

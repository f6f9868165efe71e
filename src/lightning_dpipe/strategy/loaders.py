"""Ties a Trainer's loaders to the strategy: what `lookahead` needs to know about the loop."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.lookahead import AgreedLoader, Kept, LoaderLinks, Outlooks, agreed


def fills_bubbles(trainer: Any) -> bool:
    """Whether the user asked for frozen work in bubbles."""
    return any(isinstance(callback, BubbleFill) for callback in trainer.callbacks)


def wrap_loader(
    loader: Any,
    trainer: Any,
    *,
    spec: PipelineSpec,
    link: HostLink,
    outlooks: Outlooks,
) -> AgreedLoader:
    """Make all ranks agree on a loader's batches; in training look one ahead for `BubbleFill`.

    Args:
        loader: The user's loader with Lightning's sampler.
        trainer: Says which loop the loader is for, and when it ends.
        spec: Declares the batch fields and their shape classes.
        link: Asks all ranks.
        outlooks: Where batches are announced; training forgets those that were not run. It also
            has what looks batches up in a cache, if there is one.
    """
    if isinstance(loader, AgreedLoader):
        return loader
    seeds_workers = int(os.environ.get("PL_SEED_WORKERS", "0"))
    if seeds_workers and getattr(loader, "worker_init_fn", "") is None:
        # Lightning would set it on our wrapper, where it has no effect.
        loader.worker_init_fn = partial(pl_worker_init_function, rank=trainer.global_rank)
    training = bool(trainer.training)
    links = LoaderLinks(
        exchange=link.gather,
        num_samples=partial(_count, field=next(iter(spec.inputs))),
        announce=lambda outlook: outlooks.announce(outlook, training),
        clear=outlooks.training.clear if training else lambda: None,
        limit=lambda: float(trainer.num_training_batches),
        next_epoch=partial(_next_epoch, trainer),
        buckets=spec.buckets,
        bucket_of=partial(_bucket, spec=spec),
        raise_together=link.raise_together,
        recall=partial(_recall, outlooks, training),
        settle=partial(_settle, outlooks, training, loader),
    )
    stage = trainer.state.stage
    name = "train" if training or stage is None else str(stage.value)
    ahead = training and fills_bubbles(trainer)
    return agreed(loader, links, name=name, ahead=ahead, strict=not training)


# A loader may be wrapped before there is a plan, and so before there is a cache.
def _recall(outlooks: Outlooks, training: bool, batch: Any, ahead: int) -> Kept | None:
    recall = outlooks.recall if training else None
    return None if recall is None else recall(batch, ahead)


def _settle(outlooks: Outlooks, training: bool, loader: Any) -> None:
    if training and outlooks.recall is not None:
        outlooks.recall.settle(loader)


def loader_batch_size(loaders: Any) -> int | None:
    """Batch size that a loader declares, itself or through its batch sampler."""
    for loader in loaders:
        for holder in (loader, getattr(loader, "batch_sampler", None)):
            size = getattr(holder, "batch_size", None)
            if isinstance(size, int):
                return size
    return None


def _count(batch: Any, *, field: str) -> int:
    """Samples of a raw batch; one that lacks the field is refused later, with a better message."""
    tensor = batch.get(field) if isinstance(batch, Mapping) else None
    return int(tensor.shape[0]) if isinstance(tensor, Tensor) else 1


def _bucket(batch: Any, *, spec: PipelineSpec) -> str:
    """Shape class of a raw batch; one that lacks a field is refused later, as in `_count`."""
    names = [name for name in spec.inputs if spec.shapes]
    fields = {n: batch.get(n) for n in names} if isinstance(batch, Mapping) else {}
    tensors = {n: t for n, t in fields.items() if isinstance(t, Tensor)}
    return spec.bucket_of(tensors) if tensors and len(tensors) == len(names) else BASE


def _next_epoch(trainer: Any) -> int | None:
    """The epoch after the current one, or None when its loader or the training ends first."""
    upcoming = int(trainer.fit_loop.epoch_progress.current.processed) + 1
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= upcoming:
        return None
    if 0 <= trainer.max_steps <= trainer.global_step + 1:
        return None
    return None if trainer.reload_dataloaders_every_n_epochs else upcoming

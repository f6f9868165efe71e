"""The cache behind a Trainer's loader: a batch's kept encodings, before the batch is announced.

In:     raw batches as the loader yields them, and how many steps lie before each.
Out:    `Kept`: the groups of values that the cache has for the whole batch. The ranks then agree
        (`lookahead`): a group of which any rank lacks a sample is encoded as without a cache.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import DPipeError, UnsupportedError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.strategy.assemble import CachedFillsOf, PipelineSession
from lightning_dpipe.strategy.cache.encodings import EncodingCache
from lightning_dpipe.strategy.cache.open import open_cache
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.installed import Installation
from lightning_dpipe.strategy.local import num_samples, select_fields
from lightning_dpipe.strategy.lookahead import Kept, Outlooks
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.pair_fills import CachedFills
from lightning_dpipe.strategy.planned import Setting

_LOOKED_AT = 8
"""Samples that are fetched twice to see whether the data changes: a flip in every other one escapes
with probability 1/256."""


class Recall:
    """What a training loader asks. `queued` counts announced batches that no step has run yet."""

    def __init__(
        self,
        cache: EncodingCache,
        module: DiffusionModule,
        session: PipelineSession,
        link: HostLink,
        *,
        convert: Callable[[Any], Any],
        queued: Callable[[], int],
    ) -> None:
        self.cache = cache
        self._module, self._session, self._link = module, session, link
        self._convert, self._queued = convert, queued
        self._checked: Any = None

    def __call__(self, batch: Any, ahead: int) -> Kept | None:
        """Look a raw batch up; `ahead` is 1 if another one is about to be announced before it."""
        spec = self._module.spec
        converted = self._convert(batch)
        if not isinstance(converted, Mapping) or not set(spec.inputs) - {DRAW_KEY} <= set(
            converted
        ):
            return None  # refused with a better message when its step comes
        fields = select_fields(spec, converted)
        graph = self._session.graphs[spec.bucket_of(fields) if spec.shapes else BASE]
        ahead += self._queued()
        fields[DRAW_KEY] = self._module.training_keys(num_samples(fields), ahead=ahead)
        groups = self.cache.recall(self._by_value(fields, graph), graph)
        number = self._module.batches_consumed + ahead
        return Kept(number=number, groups=groups) if groups else None

    def settle(self, loader: Any) -> None:
        """Before an epoch starts: what any rank has encoded is there for all. Collective.

        Raises:
            UnsupportedError: As `check`, at the first epoch, on every rank.
        """
        if loader is not self._checked:
            error: DPipeError | None = None
            try:
                self.check(loader)
            except DPipeError as found:
                error = found
            self._link.raise_together(error)
            self._checked = loader
        self.cache.settle()
        self._link.gather(0)

    def check(self, loader: Any) -> None:
        """Refuse data that is augmented at random: no two epochs would see the same sample.

        Raises:
            UnsupportedError: The field is named.
        """
        dataset: Any = getattr(loader, "dataset", None)
        collate = getattr(loader, "collate_fn", None)
        if (
            collate is None
            or not hasattr(dataset, "__getitem__")
            or not hasattr(dataset, "__len__")
        ):
            return  # a stream cannot be asked twice; its samples are looked up all the same
        count = len(dataset)
        indices = sorted({i * count // _LOOKED_AT for i in range(_LOOKED_AT)} if count else ())
        with isolate_rng():
            for index in indices:
                self._compare(index, *(collate([dataset[index]]) for _ in range(2)))

    def _compare(self, index: int, first: Any, second: Any) -> None:
        """Refuse two looks at a sample that differ; integers may (one caption of several)."""
        for name in self._module.spec.inputs:
            both = [x.get(name) if isinstance(x, Mapping) else None for x in (first, second)]
            one, other = both
            if not isinstance(one, Tensor) or not isinstance(other, Tensor):
                continue
            if one.is_floating_point() and not torch.equal(one, other):
                raise UnsupportedError(
                    f"batch field {name!r} of sample {index} changes from look to look: the data "
                    'is augmented at random, so BubbleFill(cache="disk") would find no sample '
                    'again and fill the disk; augment once, offline, or use cache="off", which '
                    "encodes in the bubbles"
                )

    def _by_value(self, fields: Mapping[str, Tensor], graph: ModelGraph) -> dict[int, Tensor]:
        return {
            v: fields[graph.values[v].name] for v in graph.inputs if graph.values[v].name in fields
        }


def attach(
    installed: Installation,
    module: DiffusionModule,
    setting: Setting,
    link: HostLink,
    outlooks: Outlooks,
) -> None:
    """Give session and loaders the cache that the user's `BubbleFill` asks for. Collective.

    Raises:
        UnsupportedError: Nothing can be kept.
        DataError: The folder is inside the data.
    """
    trainer: Any = module.trainer
    built, session = installed.built, installed.session
    asking = next((c for c in trainer.callbacks if isinstance(c, BubbleFill) and c.keeps), None)
    if asking is None or not setting.fill:
        session.keep(None)
        outlooks.recall = None
        return
    data_folder = getattr(trainer.datamodule, "folder", None)
    cache = open_cache(
        built.graph,
        built.binding,
        folder=asking.cache_dir,
        device=setting.device,
        precision=setting.precision,
        link=link,
        data_folder=data_folder if isinstance(data_folder, Path) else None,
    )
    fills: CachedFillsOf | None = None
    if built.profile is not None:
        profiles = {BASE: built.profile, **built.bucket_profiles}
        fills = CachedFills(built.plan, profiles, link, cache.cut)
    session.keep(cache, fills)
    asking.opened(cache)
    outlooks.recall = Recall(
        cache,
        module,
        session,
        link,
        convert=trainer.precision_plugin.convert_input,
        queued=lambda: len(outlooks.training),
    )

"""From what the user asked `BubbleFill` for to an open cache, or a refusal by name.

In:     the model as planned, its weights on this rank, where it runs.
Out:    an `EncodingCache` with the same marks on all ranks.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_dpipe.core.caching import CacheCut, cache_cut
from lightning_dpipe.core.errors import DataError, UnsupportedError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.profiling.store import device_name, tool_versions
from lightning_dpipe.runtime.bound import Binding
from lightning_dpipe.strategy.cache.encodings import EncodingCache
from lightning_dpipe.strategy.cache.entries import Entries, default_folder
from lightning_dpipe.strategy.cache.fingerprint import Fingerprint
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.lookahead import MOST_GROUPS
from lightning_dpipe.version import __version__

log = logging.getLogger(__name__)


def cut_of(graph: ModelGraph, binding: Binding) -> CacheCut:
    """What may be kept of a bound model.

    Raises:
        UnsupportedError: Nothing; what every frozen component draws or lacks is named.
    """
    weighted = frozenset(
        (c.name, i)
        for c in graph.frozen
        for i, layer in enumerate(binding.layers[c.name])
        if layer.parameters
    )
    cut = cache_cut(graph, draw_key=binding.draw_key, weighted=weighted)
    if not cut.kept:
        bare = [c.name for c in graph.frozen if not any(place[0] == c.name for place in weighted)]
        drawn = [c.name for c in graph.frozen if c.name not in bare]
        raise UnsupportedError(
            'BubbleFill(cache="disk") has nothing to keep: frozen components that follow from '
            f"random draws: {', '.join(drawn) or 'none'}; components without weights: "
            f'{", ".join(bare) or "none"}; use cache="off"'
        )
    return cut


def marks_of(
    cut: CacheCut, graph: ModelGraph, binding: Binding, circumstances: Mapping[str, str]
) -> tuple[str, ...]:
    """For each group of values that are kept together, a digest of who encodes them."""
    walk = Fingerprint()
    marks = []
    for group in cut.groups:
        parts: list[Any] = [sorted(circumstances.items()), group.sources, group.kept]
        for component, index in group.layers:
            layer = binding.layers[component][index]
            parts.append((component, index, layer.reads, layer.writes, layer.name))
            parts.append((layer.fn, list(layer.parameters), list(layer.modules)))
        marks.append(walk.of(parts))
    return tuple(marks)


def circumstances_of(device: torch.device, precision: str) -> dict[str, str]:
    """What else decides the bits of an encoding."""
    return {
        "package": __version__,
        "versions": str(tool_versions()),
        "device": device_name(device),
        "precision": precision,
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": str(torch.backends.cudnn.allow_tf32),
    }


def open_cache(
    graph: ModelGraph,
    binding: Binding,
    *,
    folder: Path | None,
    device: torch.device,
    precision: str,
    link: HostLink,
    data_folder: Path | None = None,
) -> EncodingCache:
    """Open the cache of a model. Collective.

    Args:
        graph: The model.
        binding: Its layers, with their weights.
        folder: Where entries go; None: the user's cache folder.
        device: Where encoders run.
        precision: Lightning's name for it.
        link: Over all ranks.
        data_folder: Where the training data is, if that is known.

    Raises:
        UnsupportedError: Nothing can be kept.
        DataError: The folder is inside the data.
    """
    cut = cut_of(graph, binding).only(range(MOST_GROUPS))
    root = (default_folder() if folder is None else folder).expanduser().resolve()
    if data_folder is not None and root.is_relative_to(data_folder.expanduser().resolve()):
        raise DataError(
            f"cache_dir {root} is inside the data folder {data_folder}, into which nothing is "
            "written; give another one"
        )
    # Rank 0's, so that what one rank has kept another one finds.
    marks = None
    if link.rank == 0:
        marks = marks_of(cut, graph, binding, circumstances_of(device, precision))
    marks = link.broadcast_object(marks)
    running = [
        c.name
        for c in graph.frozen
        if any((c.name, i) not in cut.idle for i in range(len(c.layers)))
    ]
    if link.rank == 0:
        kept = ", ".join(graph.values[v].name for v in cut.kept)
        rest = ", ".join(running) or "nothing"
        log.info("encodings are kept in %s: %s; later epochs run (parts of) %s", root, kept, rest)
    return EncodingCache(cut=cut, layers=binding.layers, entries=Entries(root), marks=marks)

"""Fills by the shape classes of a step's batch and of the next one, made when first needed.

In:     the plan and one Profile per class, the same on all ranks.
Out:    the same fills on all ranks: each pair's digest is compared before its first step. All ranks
        meet a pair in the same step, so that the comparison needs no message of its own.
"""

from collections.abc import Mapping

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.caching import CacheCut
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.pairs import cached_fills, cached_profile, pair_fills, pair_profile
from lightning_dpipe.strategy.collectives import HostLink


class PairFills:
    """``fills(bucket, next_bucket)``; the base's own pair has the plan's fills."""

    def __init__(self, plan: Plan, profiles: Mapping[str, Profile], link: HostLink) -> None:
        self._plan, self._profiles, self._link = plan, profiles, link
        self._known: dict[tuple[str, str], tuple[Fill, ...]] = {(BASE, BASE): plan.fills}

    def __call__(self, bucket: str, next_bucket: str) -> tuple[Fill, ...]:
        """Fills of one pair. Collective at the first call with it.

        Raises:
            DPipeError: The ranks made different fills.
        """
        pair = (bucket, next_bucket)
        if pair not in self._known:
            profiles = self._profiles
            fills = pair_fills(self._plan, profiles[bucket], profiles[next_bucket])
            self._link.compare(f"the fills of {bucket} before {next_bucket}", digest(fills))
            self._known[pair] = fills
        return self._known[pair]

    def profile(self, bucket: str, next_bucket: str) -> Profile:
        """What a steady step of the pair costs."""
        return pair_profile(self._profiles[bucket], self._profiles[next_bucket])


class CachedFills:
    """As `PairFills`, for steps whose next batch's kept encodings are at hand."""

    def __init__(
        self, plan: Plan, profiles: Mapping[str, Profile], link: HostLink, cut: CacheCut
    ) -> None:
        self._plan, self._profiles, self._link, self._cut = plan, profiles, link, cut
        self._known: dict[tuple[str, str, tuple[int, ...]], tuple[Fill, ...]] = {}

    def __call__(self, bucket: str, next_bucket: str, groups: tuple[int, ...]) -> tuple[Fill, ...]:
        """Fills of one pair with some groups at hand. Collective at the first call with them.

        Raises:
            DPipeError: The ranks made different fills.
        """
        key = (bucket, next_bucket, groups)
        if key not in self._known:
            this, following = self._profiles[bucket], self._profiles[next_bucket]
            fills = cached_fills(self._plan, this, following, self._cut.only(groups))
            what = f"the fills of {bucket} before {next_bucket} with kept groups {groups}"
            self._link.compare(what, digest(fills))
            self._known[key] = fills
        return self._known[key]

    def profile(self, bucket: str, next_bucket: str, groups: tuple[int, ...]) -> Profile:
        """What a steady step of the pair costs."""
        pair = pair_profile(self._profiles[bucket], self._profiles[next_bucket])
        return cached_profile(pair, self._cut.only(groups))

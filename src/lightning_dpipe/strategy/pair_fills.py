"""Fills by the shape classes of a step's batch and of the next one, made when first needed.

In:     the plan and one Profile per class, the same on all ranks.
Out:    the same fills on all ranks: each pair's digest is compared before its first step. All ranks
        meet a pair in the same step, so that the comparison needs no message of its own.
"""

from collections.abc import Mapping

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.pairs import pair_fills, pair_profile
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

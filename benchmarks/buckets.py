"""Aspect-ratio buckets: an epoch that mixes shape classes against each class trained alone.

Stable Diffusion 2.1 from its estimated A100 profile at 512 px, in five classes of about the same
number of pixels, on emulated devices (`benchmarks.emulation`): the real engine over threads, one
stage a device, frozen work of the next batch in the bubbles. The cut is that of 512 x 512; fills
are made for each pair (class of this batch, class of the next one). Optimizer steps are left out.

A class's times and bytes are the profile's times its share of pixels, text apart; counting its
kernels (`profiling.roofline`) gives the U-Net and the VAE at 384 x 640 within 0.2 % of that.

A mixed epoch goes through all 25 pairs once. Its ideal is the sum of what each step's own class
takes when it trains alone, filled. All classes alone and mixed epochs take turns. A busy host only
makes emulated devices slower, so a step's time is the least over the rounds, alone and mixed.

    over_ideal              measured sum of a mixed epoch over its ideal
    over_ideal_with_noise   the same for means over the rounds: says how busy the host was
    over_ideal_predicted    the same as simulated
    over_ideal_base_fills   as simulated if every pair had the fills of 512 x 512
    over_ideal_resolutions  as simulated for classes of 1 to 1/4 of the pixels (no bar)
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from benchmarks.common import Report, parser, show
from benchmarks.emulated_buckets import run_buckets
from benchmarks.fill_emulated import PROFILES
from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import ComponentCost, LayerCost, Profile
from lightning_dpipe.planning.pairs import pair_fills, pair_profile
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.simulate import simulate

SIDES = {BASE: (512, 512), "wide": (384, 640), "tall": (640, 384),
         "landscape": (448, 576), "portrait": (576, 448)}  # fmt: skip
PIXELS = 512 * 512
RESOLUTIONS = {BASE: 1.0, "448": 0.766, "384": 0.5625, "320": 0.391, "256": 0.25}
ROWS = 32
SAME_STEPS = 2
"""Measured steps of a class alone in each round, after one that changes to it."""


def of_share(profile: Profile, share: float) -> Profile:
    """The profile of a class with `share` of the pixels; what depends on text only stays."""

    def cost(component: ComponentCost) -> ComponentCost:
        if component.name == "text":
            return component
        return replace(component, layers=tuple(map(layer, component.layers)))

    def layer(known: LayerCost) -> LayerCost:
        return replace(
            known,
            forward_us=times(known.forward_us),
            backward_us=times(known.backward_us),
            input_grad_us=times(known.input_grad_us),
            optimizer_us=0,
        )

    def times(us: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(round(t * share) for t in us)

    values = tuple(
        replace(v, shape=(max(1, round(v.shape[0] * share)), *v.shape[1:]))
        if len(v.shape) == 3
        else v
        for v in profile.graph.values
    )
    costs = tuple(map(cost, profile.costs))
    return replace(profile, costs=costs, graph=replace(profile.graph, values=values))


@dataclass
class Pairs:
    """Fills and predictions of every pair of classes, cached."""

    plan: Plan
    profiles: dict[str, Profile]

    def __post_init__(self) -> None:
        self._fills = {
            (a, b): pair_fills(self.plan, self.profiles[a], self.profiles[b])
            for a, b in product(self.profiles, repeat=2)
        }

    def fills(self, this: str, following: str) -> tuple[Fill, ...]:
        """Fills of a step of class `this` that encodes a batch of class `following`."""
        return self._fills[this, following]

    def predicted_us(self, this: str, following: str, fills: tuple[Fill, ...] | None = None) -> int:
        """The step's iteration as simulated, by default with its own fills."""
        plan = replace(self.plan, fills=fills or self.fills(this, following))
        profile = pair_profile(self.profiles[this], self.profiles[following])
        return simulate(plan, schedule_of(plan), profile).end_us

    def over_ideal(self, fills: tuple[Fill, ...] | None = None) -> float:
        """Predicted sum over all pairs, over each step's class alone."""
        pairs = list(product(self.profiles, repeat=2))
        ideal_us = sum(self.predicted_us(a, a) for a, _ in pairs)
        return sum(self.predicted_us(a, b, fills) for a, b in pairs) / ideal_us


def pairs_of(profile: Profile, devices: int, shares: dict[str, float]) -> Pairs:
    """One cut, made for the base, and all classes' profiles."""
    profiles = {name: of_share(profile, share) for name, share in shares.items()}
    plan = make_plan(
        profiles[BASE], world_size=devices, batch_size=ROWS, num_stages=devices,
        num_microbatches=2 * devices,
    )  # fmt: skip
    return Pairs(plan, profiles)


def all_pairs(names: Sequence[str]) -> list[str]:
    """A circle in which every ordered pair of names, equal ones too, follows each other once.

    Source: the greedy "prefer the largest" construction of a de Bruijn sequence of order 2.
    """
    circle, seen = [names[0]], set[tuple[str, str]]()
    while len(seen) < len(names) ** 2:
        here = circle[-1]
        following = next(n for n in reversed(names) if (here, n) not in seen)
        seen.add((here, following))
        circle.append(following)
    assert circle[-1] == names[0]
    return circle


def measure(report: Report, pairs: Pairs, rounds: int, scale: float) -> None:
    """Run rounds of every class alone and a mixed epoch; fill rows and the measured figure."""
    names = list(pairs.profiles)
    walk, kinds = list[str](), list[str]()
    circle = all_pairs(names)
    for _ in range(rounds):
        for name in names:
            walk += [name] * (SAME_STEPS + 1)  # the first encodes nothing of another class
            kinds += ["alone"] * SAME_STEPS + ["change"]
        walk += circle
        kinds += ["mixed"] * (len(circle) - 1) + ["change"]
    took_us = run_buckets(
        pairs.profiles, pairs.plan, pairs.fills, [*walk, names[0]], scale=scale, progress=show
    )
    steps = list(zip(pairwise([*walk, names[0]]), kinds, took_us, strict=True))
    took: dict[str, dict[tuple[str, str], float]] = {kind: {} for kind in set(kinds)}
    for pair, kind, us in steps:
        took[kind][pair] = min(us, took[kind].get(pair, us))
    alone = {name: took["alone"][name, name] for name in names}
    mixed = took["mixed"]
    report.figures["over_ideal"] = sum(mixed.values()) / sum(alone[a] for a, _ in mixed)
    sums = {
        kind: statistics.mean(us for (_, _), k, us in steps if k == kind)
        for kind in ("alone", "mixed")
    }
    report.figures["over_ideal_with_noise"] = sums["mixed"] / sums["alone"]
    errors = []
    for name in names:
        said_us = pairs.predicted_us(name, name) * scale
        errors.append(abs(said_us / alone[name] - 1))
        after = statistics.mean(us for (a, _), us in mixed.items() if a == name)
        report.rows.append(
            {"class": name, "height": SIDES[name][0], "width": SIDES[name][1],
             "alone_ms": alone[name] / scale / 1e3, "predicted_ms": said_us / scale / 1e3,
             "mixed_ms": after / scale / 1e3, "fills_alone": len(pairs.fills(name, name))}
        )  # fmt: skip
    report.figures["prediction_error"] = max(errors)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--devices", type=int, default=4, help="emulated devices")
    args = options.parse_args(argv)
    profile = load(Profile, PROFILES / "sd21_a100_bf16.json")
    shares = {name: high * wide / PIXELS for name, (high, wide) in SIDES.items()}
    report = Report("buckets")
    pairs = pairs_of(profile, args.devices, shares)
    measure(report, pairs, rounds=1 if args.quick else 3, scale=0.5 if args.quick else 1.0)
    report.figures |= {
        "over_ideal_predicted": pairs.over_ideal(),
        "over_ideal_base_fills": pairs.over_ideal(pairs.plan.fills),
        "over_ideal_resolutions": pairs_of(profile, args.devices, RESOLUTIONS).over_ideal(),
        "classes": len(SIDES),
        "different_fills": len({pairs.fills(a, b) for a, b in product(SIDES, repeat=2)}),
    }
    report.bar("over_ideal", "<=", 1.03)
    return report.finish(as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())

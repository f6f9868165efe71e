"""Does a plan fit a model, a profile, a run? If not, say in what they differ.

In:     a plan and what it meets. Out: nothing, or a PlanError with both digests and both sides of
everything that differs, as far as the plan knows where it came from (`core/origin`).
"""

from collections.abc import Mapping

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.fills import check_fills
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.origin import head_differences, layer_counts, layer_differences
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile


def check_model(plan: Plan, graph: ModelGraph) -> None:
    """Refuse a plan of another model, or one that leaves out or repeats layers of this one.

    Raises:
        PlanError: Both digests, and the components whose numbers of layers differ; or the stages
            or fills that do not fit the model.
    """
    here = digest(graph)
    if plan.graph_digest == here:
        _check_stages(plan, graph)
        check_fills(plan, graph)
        return
    known = {} if plan.origin is None else dict(plan.origin.layers)
    there_text, here_text = layer_differences(known, dict(layer_counts(graph)))
    if known and there_text:
        raise PlanError(
            f"the plan is for graph {plan.graph_digest} with {there_text}, this model is {here} "
            f"with {here_text}; plan again"
        )
    same = " with as many layers, but other shapes or reads" if known else ""
    raise PlanError(
        f"the plan is for graph {plan.graph_digest}, this model is {here}{same}; plan again"
    )


def _check_stages(plan: Plan, graph: ModelGraph) -> None:
    """Each backbone's stages hold each of its layers once, in order."""
    layers = {c.name: len(c.layers) for c in graph.backbones}
    for name in dict.fromkeys((*layers, *(s.backbone for s in plan.stages))):
        spans = [(s.start, s.stop) for s in plan.stages if s.backbone == name]
        borders = [0, *(stop for _, stop in spans)]
        starts = [*(start for start, _ in spans), layers.get(name)]
        if borders != starts:
            there = ", ".join(f"{start}:{stop}" for start, stop in spans) or "none"
            known = ", ".join(f"{n} 0:{size}" for n, size in layers.items())
            raise PlanError(
                f"the plan's stages of {name!r} have layers {there}; the backbones are {known}, "
                "and each layer belongs to one stage, in order: plan again"
            )


def check_profile(plan: Plan, profile: Profile) -> None:
    """Refuse a profile that a plan was not made of.

    Raises:
        PlanError: The model differs, or the profile does; what differs is named.
    """
    check_model(plan, profile.graph)
    here = digest(profile)
    if plan.profile_digest == here:
        return
    text = ""
    if plan.origin is not None:
        text = head_differences(plan.origin, profile.device, profile.dtype, profile.versions)
        if not text and plan.origin.estimated != profile.estimated:
            text = "one is estimated, the other measured"
    raise PlanError(
        f"the plan was made of profile {plan.profile_digest}, this one is {here}: "
        f"{text or 'its times, sizes or links are others'}; plan again"
    )


def check_profile_of(profile: Profile, graph: ModelGraph) -> None:
    """Refuse a profile of another model.

    Raises:
        PlanError: Both digests, and the components whose numbers of layers differ.
    """
    if (there := digest(profile.graph)) != (here := digest(graph)):
        there_text, here_text = layer_differences(
            dict(layer_counts(profile.graph)), dict(layer_counts(graph))
        )
        raise PlanError(
            f"the profile is of graph {there} with {there_text or 'as many layers'}, this model is "
            f"{here} with {here_text or 'other shapes or reads'}; measure again"
        )


def check_batch_of(plan: Plan, batch_size: int) -> None:
    """Refuse another batch than the plan was made for.

    Raises:
        PlanError: Both sizes are named.
    """
    if batch_size != plan.batch_size:
        raise PlanError(
            f"the plan is for {plan.batch_size} samples per device, this run has {batch_size}; "
            f"plan again, or use batch size {plan.batch_size}"
        )


def check_run(
    plan: Plan, *, device: str, dtype: str, versions: Mapping[str, str], batch_size: int | None
) -> None:
    """Refuse a plan that was made for another run than this one.

    A plan of an estimated profile is for hardware that was not there: only its batch counts.

    Args:
        plan: Whose model is known to fit.
        device: Name of the hardware, as profiles have it.
        dtype: Precision, as profiles have it.
        versions: Of the tools, as profiles have them.
        batch_size: Samples per device; None: the run does not train.

    Raises:
        PlanError: Both values of what differs.
    """
    if batch_size is not None:
        check_batch_of(plan, batch_size)
    origin = plan.origin
    if origin is None or origin.estimated:
        return
    differences = head_differences(origin, device, dtype, versions)
    if differences:
        raise PlanError(
            f"the plan was made of profile {plan.profile_digest}, which is of another run: "
            f"{differences}; plan again here"
        )

"""1F1B with a flush (PipeDream-Flush, arXiv 2006.09503).

Stage i runs S-1-i forwards ahead (warmup), then one forward and one backward in turn (steady), then
the backwards that are left (cooldown). Bubble (S-1)(F+B) as in GPipe, but stage i holds the
activations of at most S-i micro-batches. With fewer micro-batches than stages the early stages
have no steady part.
"""

from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.schedule import Schedule


def one_f_one_b(num_stages: int, num_microbatches: int, self_conditioned: bool = False) -> Schedule:
    """Stage i on device i; with self-conditioning a sweep of S ops comes first."""
    orders = []
    for stage in range(num_stages):
        warmup = min(num_stages - 1 - stage, num_microbatches)
        sweep = num_microbatches if self_conditioned else 0
        order = [Op(stage, OpKind.S, m) for m in range(sweep)]
        order += [Op(stage, OpKind.F, m) for m in range(warmup)]
        for m in range(num_microbatches - warmup):
            order += [Op(stage, OpKind.F, warmup + m), Op(stage, OpKind.B, m)]
        order += [
            Op(stage, OpKind.B, m) for m in range(num_microbatches - warmup, num_microbatches)
        ]
        orders.append(tuple(order))
    return Schedule(tuple(orders))

"""GPipe (arXiv 1811.06965): all forwards, then all backwards.

Bubble (S-1)(F+B); every stage holds the activations of all micro-batches. Ours differs: backwards
run in ascending micro-batch order, the order in which one process sums gradients.
"""

from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.schedule import Schedule


def gpipe(num_stages: int, num_microbatches: int, self_conditioned: bool = False) -> Schedule:
    """Stage i on device i; with self-conditioning a sweep of S ops comes first."""
    kinds = (OpKind.S, OpKind.F, OpKind.B) if self_conditioned else (OpKind.F, OpKind.B)
    return Schedule(
        tuple(
            tuple(Op(stage, kind, m) for kind in kinds for m in range(num_microbatches))
            for stage in range(num_stages)
        )
    )

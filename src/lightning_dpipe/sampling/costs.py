"""What one image costs on several devices: a closed-form model of time, transfers and memory.

In:     a Family, a size, Hardware, a Mode. Out: a Cost.
A device's step takes as long as its kernels (each at the efficiency of its FLOPs, see
`core.cluster.Device`) and the transfers they wait for, or as the host takes to launch them,
whichever is longer. Transfers that a method overlaps slow its kernels down.
PipeFusion is a flow shop that goes round, of patches over stages. With f_k the time of patch 0 on
stage k (it brings the text), o_k that of others, x a link's transfer and c its latency:

    period    = max(max_k f_k + (M-1) o_k, M x, sum_k (f_k + x + c))
    last step = sum_k (f_k + x + c) + (M-1) max(o_k, x)

The third term of the period is patch 0's way round: its next step waits for it.
Source: PipeFusion, arXiv 2405.14430, section 4. Changed: kernels, launches and messages cost
time, and text is worked on once a step, with the first patch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from lightning_dpipe.sampling.footprint import Memory, memory, stage_layers
from lightning_dpipe.sampling.hardware import Hardware, Span
from lightning_dpipe.sampling.modes import Mode, check_mode
from lightning_dpipe.sampling.sent import sent_bytes
from lightning_dpipe.sampling.shapes import BYTES, BlockKind, Family, Size

_PASSES = 26
"""Times a block's norms, modulations, gates and residuals read or write an activation."""

_MERGE_KERNELS = 5  # of a ring's hop: the attention, and merging its result by log-sum-exp
_MERGE_BYTES = 12  # a value: the fp32 result is read twice and written once


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One image in a mode.

    Attributes:
        mode: How.
        total_us: All steps, from noise to latent.
        free_us: The same if links cost nothing.
        busy_us: Kernels or launches of the busiest device, without waiting for others.
        sent_bytes: By axis, of the device that sends most in a step.
        flops: Of the busiest device in a step.
        memory: Of the fullest device.
    """

    mode: Mode
    total_us: float
    free_us: float
    busy_us: float
    sent_bytes: dict[str, Fraction]
    flops: int
    memory: Memory

    @property
    def transfer_share(self) -> float:
        """Of the time, what links cost."""
        return 1 - self.free_us / self.total_us

    @property
    def idle_share(self) -> float:
        """Of the time, when the busiest device does not compute but waits."""
        return 1 - self.busy_us / self.total_us


def estimate(
    family: Family, size: Size, hardware: Hardware, mode: Mode, *, steps: int | None = None
) -> Cost:
    """Predict one image.

    Args:
        family: The model.
        size: Of the image, in pixels.
        hardware: Devices and links.
        mode: How; it may use fewer devices than there are.
        steps: Solver steps; the family's usual number by default.

    Raises:
        PlanError: The mode does not fit the model, the image or the cluster.
        SpecError: The image's sides do not fit the model.
        ClusterError: The device's peak for bfloat16 is not known.
    """
    count = family.steps if steps is None else steps
    check_mode(family, size, mode, steps=count, num_devices=hardware.cluster.world_size)
    paid, free = (
        _Model(family=family, size=size, hardware=h, mode=mode, steps=count)
        for h in (hardware, hardware.with_free_links())
    )
    return Cost(
        mode=mode,
        total_us=paid.total_us(),
        free_us=free.total_us(),
        busy_us=free.busy_us(),
        sent_bytes=sent_bytes(family, size, mode),
        flops=paid.flops(),
        memory=memory(family, size, mode),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Of one patch in some blocks: kernels with the transfers they wait for, and launches."""

    gpu_us: float
    host_us: float

    @property
    def us(self) -> float:
        return max(self.gpu_us, self.host_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    family: Family
    size: Size
    hardware: Hardware
    mode: Mode
    steps: int

    @property
    def branches(self) -> int:
        """Of guidance, that each device works on."""
        return self.family.branches // self.mode.cfg

    def total_us(self) -> float:
        """All steps."""
        cfg_us = self.steps * self._cfg_us()
        if self.mode.pipefusion > 1:
            return self._pipeline_us() + cfg_us
        step = self._stage(self.family.kinds(), 1, text=True)
        if self.mode.distrifusion == 1:
            return self.steps * step.us + cfg_us
        gather = self._gather_us()
        waiting = _Work(gpu_us=step.gpu_us + gather, host_us=step.host_us)
        beside = _Work(gpu_us=self.hardware.beside_us(step.gpu_us, gather), host_us=step.host_us)
        warmup = self.mode.warmup
        return warmup * waiting.us + (self.steps - warmup) * beside.us + cfg_us

    def busy_us(self) -> float:
        """Kernels or launches of the busiest device."""
        if self.mode.pipefusion == 1:
            return self.total_us()
        whole, _ = self._stages(1)
        first, other = self._stages(self.mode.patches)
        step = max(f + (self.mode.patches - 1) * o for f, o in zip(first, other, strict=True))
        return self.mode.warmup * max(whole) + (self.steps - self.mode.warmup) * step

    def flops(self) -> int:
        """Of the busiest device in a step."""
        family, mode = self.family, self.mode
        image = -(-family.tokens(self.size) // mode.parts)
        text = self._text_rows(family.sequence_text)
        keys = family.sequence(self.size)
        blocks = [sum(family.products(k, image, text, keys)) for k in family.kinds()]
        sums = [0, *accumulate(blocks)]
        ends = [0, *accumulate(stage_layers(family.layers, mode.pipefusion))]
        most = max(sums[b] - sums[a] for a, b in pairwise(ends))
        return self.branches * most // mode.tensor

    def _pipeline_us(self) -> float:
        """Warm-up on the whole image, stage after stage; then patches go round."""
        stages, patches, warmup = self.mode.pipefusion, self.mode.patches, self.mode.warmup
        total = 0.0
        if warmup:
            whole, _ = self._stages(1)
            total += warmup * (sum(whole) + stages * sum(self._link(1)))
        if self.steps > warmup:
            first, other = self._stages(patches)
            link, latency = self._link(patches)
            way = sum(first) + stages * (link + latency)
            most = max(f + (patches - 1) * o for f, o in zip(first, other, strict=True))
            period = max(most, patches * link, way)
            total += (self.steps - warmup - 1) * period
            total += way + (patches - 1) * max(*other, link)
        return total

    def _stages(self, patches: int) -> tuple[list[float], list[float]]:
        """Time of the first and of any other patch on every stage."""
        first: list[float] = []
        other: list[float] = []
        at = 0
        kinds = self.family.kinds()
        link, _ = self._link(patches)
        messages = 2 * self.hardware.host_us(self._pipe_span())
        for layers in stage_layers(len(kinds), self.mode.pipefusion):
            for times, text in ((first, True), (other, False)):
                work = self._stage(kinds[at : at + layers], patches, text=text)
                # A stage receives the next patch and sends the last one while it computes.
                beside = work.gpu_us if patches == 1 else self.hardware.beside_us(work.gpu_us, link)
                times.append(_Work(gpu_us=beside, host_us=work.host_us + messages).us)
            at += layers
        return first, other

    def _pipe_span(self) -> Span:
        return Span(size=self.mode.pipefusion, stride=self.mode.sequence)

    def _link(self, patches: int) -> tuple[float, int]:
        """Transfer and latency of a patch between two stages."""
        span = self._pipe_span()
        rows = self.family.sequence(self.size) / (patches * self.mode.sequence)
        sent = self.branches * rows * self.family.width * BYTES
        return self.hardware.ring_us(span, sent), self.hardware.message_us(span)

    def _stage(self, kinds: Sequence[BlockKind], patches: int, *, text: bool) -> _Work:
        """One patch through some blocks."""
        works = [
            (kinds.count(kind), self._block(kind, patches, text=text))
            for kind in self.family.blocks
        ]
        return _Work(
            gpu_us=sum(count * work.gpu_us for count, work in works),
            host_us=sum(count * work.host_us for count, work in works),
        )

    def _block(self, kind: BlockKind, patches: int, *, text: bool) -> _Work:
        family, mode, device = self.family, self.mode, self.hardware.device
        image = -(-family.tokens(self.size) // (patches * mode.parts))
        has_text = text and kind.attention.has_text_rows
        rows = self._text_rows(family.sequence_text if has_text else 0)
        keys = family.sequence(self.size)
        kernels = [
            device.matrix_us(round(flops * self.branches / mode.tensor), "bfloat16")
            for flops in family.products(kind, image, rows, keys)
        ]
        values = self.branches * (image + rows) * family.width
        gpu = sum(kernels) + device.memory_us(_PASSES * values * BYTES)
        host = float(kind.kernels * device.launch_us)
        for more in (
            self._ulysses(values * BYTES),
            self._ring(kernels[0], values),
            self._tensor(values * BYTES),
        ):
            gpu, host = gpu + more.gpu_us, host + more.host_us
        return _Work(gpu_us=gpu, host_us=host)

    def _text_rows(self, text: int) -> int:
        """Text tokens a device works on: cut like the image, but all of them in DistriFusion."""
        return text if self.mode.distrifusion > 1 else -(-text // self.mode.parts)

    def _ulysses(self, sent: int) -> _Work:
        """Four exchanges a block, of queries, keys, values and the result; all are waited for."""
        span = Span(size=self.mode.ulysses, stride=1)
        if span.size == 1:
            return _Work(gpu_us=0, host_us=0)
        away = 4 * sent * (span.size - 1) / span.size
        waited = self.hardware.exchange_us(span, away) + 4 * self.hardware.message_us(span)
        return _Work(gpu_us=waited, host_us=4 * self.hardware.host_us(span))

    def _ring(self, attention_us: float, values: int) -> _Work:
        """Keys and values go round beside the attention to those that are there."""
        span = Span(size=self.mode.ring, stride=self.mode.ulysses)
        if span.size == 1:
            return _Work(gpu_us=0, host_us=0)
        hardware, hops = self.hardware, span.size - 1
        held = self.family.kv_bytes(self.size, branches=self.branches) / self.mode.sequence
        hop = hardware.ring_us(span, held) + hardware.message_us(span)
        part = attention_us / span.size
        merge = hardware.device.memory_us(values * _MERGE_BYTES)
        launches = _MERGE_KERNELS * hardware.device.launch_us + 2 * hardware.host_us(span)
        return _Work(
            gpu_us=hops * (hardware.beside_us(part, hop) - part + merge), host_us=hops * launches
        )

    def _tensor(self, sent: int) -> _Work:
        """Two all-reduces a block, each of two rounds; all are waited for."""
        span = Span(size=self.mode.tensor, stride=1)
        if span.size == 1:
            return _Work(gpu_us=0, host_us=0)
        hops = 2 * 2 * (span.size - 1)
        away = hops * sent / span.size
        waited = self.hardware.ring_us(span, away) + hops * self.hardware.message_us(span)
        return _Work(gpu_us=waited, host_us=2 * self.hardware.host_us(span))

    def _gather_us(self) -> float:
        """DistriFusion's keys and values of all blocks."""
        span = Span(size=self.mode.distrifusion, stride=1)
        sent = float(sent_bytes(self.family, self.size, self.mode)["distrifusion"])
        return self.hardware.ring_us(span, sent) + self.hardware.message_us(span)

    def _cfg_us(self) -> float:
        """The two halves tell each other their predictions, once a step."""
        if self.mode.cfg == 1:
            return 0.0
        span = Span(size=2, stride=self.mode.num_devices // 2)
        sent = float(sent_bytes(self.family, self.size, self.mode)["cfg"])
        return self.hardware.exchange_us(span, sent) + self.hardware.message_us(span)

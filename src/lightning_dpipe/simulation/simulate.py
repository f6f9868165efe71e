"""Predict one iteration: what every device does, when.

In:     Plan (with its fills), Schedule, Profile, and optionally the StepShape.
Out:    a predicted Timeline. Event-driven, integer microseconds, deterministic.

What is modelled, beside the ops and messages of `tasks`:
* A batch that was not encoded ahead: every device encodes its whole local batch first, then a
  device's first op waits for the rows that the other devices encoded for it.
* The next batch's fills run where the plan puts them and cost the profile's forward time at their
  sample count, and what starting a fill costs. Another device's samples wait for their fields.
* Encoded rows travel under cover of compute (`deliveries`): the iteration is longer only if they
  come too late for the next one. What sending costs the host is charged after the last op.
* After its last op and leftover fills a device waits for the reduction of its gradients (it starts
  with each stage's last backward, as a ring: 2(n-1)/n of the bytes), then steps its optimizer.
* All devices end together; the profile's overhead is a HOST span at the end of each.
Each device takes the times of its own kind. The loss is free, and all pipeline groups are alike.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from lightning_dpipe.core.fills import encoders, fill_slots
from lightning_dpipe.core.fleet import device_profiles
from lightning_dpipe.core.op import OpKind
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.core.timeline import Activity, FrozenWork, Span, Timeline
from lightning_dpipe.simulation.clock import Clock, Task, TaskGraph
from lightning_dpipe.simulation.deliveries import Arrivals, Deliveries
from lightning_dpipe.simulation.tasks import step_orders, task_graph


def simulate(
    plan: Plan, schedule: Schedule, profile: Profile, *, shape: StepShape | None = None
) -> Timeline:
    """Predict the timeline of one step of one pipeline group.

    Args:
        plan: Stages, devices, micro-batches and fills.
        schedule: Order of ops per device.
        profile: Costs of layers, links and the optimizer.
        shape: Batch sizes and variant; full batches in steady state by default.

    Raises:
        PlanError: The shape does not fit the plan, or groups are of unequal speed.
        ScheduleError: The ops wait for each other in a circle.
    """
    chosen = steady_shape(plan, schedule) if shape is None else shape
    graph = task_graph(plan, schedule, profile, chosen)
    slots = fill_slots(plan, profile.graph, step_orders(schedule, chosen), chosen)
    sizes = chosen.next_sizes or (0,) * plan.num_devices
    deliveries = Deliveries(plan=plan, profile=profile, sizes=sizes)
    arrivals = Arrivals(deliveries, encoders(chain.from_iterable(slots.values()), sizes))
    walk = _Walk(graph, device_profiles(plan, profile), slots, arrivals)
    for task in graph.tasks:
        walk.run(task)
    return walk.finish()


def steady_shape(plan: Plan, schedule: Schedule) -> StepShape:
    """Full batches; with fills, this batch was encoded before and the next one is encoded now."""
    sizes = (plan.batch_size,) * plan.num_devices
    return StepShape(
        sizes=sizes,
        next_sizes=sizes if plan.fills else None,
        encoded=bool(plan.fills),
        self_conditioned=any(op.kind is OpKind.S for order in schedule.orders for op in order),
    )


class _Walk:
    """Walks the graph, runs fills in their slots and writes down the spans."""

    def __init__(
        self,
        graph: TaskGraph,
        profiles: Sequence[Profile],
        slots: Mapping[tuple[int, int], Sequence[Fill]],
        arrivals: Arrivals,
    ) -> None:
        self.graph, self.profiles, self.slots, self.arrivals = graph, profiles, slots, arrivals
        self.clock = Clock(graph)
        self.num_done = [0] * graph.num_devices
        self.spans: list[Span] = []

    def run(self, task: Task) -> None:
        clock, d = self.clock, task.device
        if task.op is not None and self.num_done[d] == 0:
            self._fills(d)
        free_us, on_way_us = clock.free_us[d], clock.on_way_us(task)
        start = clock.run(task)
        self.arrivals.started(task, start)
        self._add(d, max(free_us, on_way_us), start, Activity.TRANSFER, f"wait {task.label}")
        end = start + task.length_us
        if task.op is None:
            self._add(d, start, end, task.activity, task.label)
            return
        self.spans.append(
            Span(
                device=d,
                start_us=start,
                end_us=end,
                activity=task.activity,
                label=task.label,
                op=task.op,
            )
        )
        self.num_done[d] += 1
        self._fills(d)

    def finish(self) -> Timeline:
        """Reduction, optimizer and overhead after the last op of each device."""
        clock, graph = self.clock, self.graph
        for d in range(graph.num_devices):
            if self.num_done[d] == 0:  # a device without ops still encodes its share
                self._fills(d)
            start = self.arrivals.hand_over(clock, d)
            self._add(d, start, clock.free_us[d], Activity.HOST, "send rows")
        end = max(clock.end_us() - graph.overhead_us, self.arrivals.end_us())
        for d, synced_us in enumerate(clock.synced_us()):
            free = clock.free_us[d]
            self._add(d, free, synced_us, Activity.SYNC, "gradients")
            free = max(free, synced_us)
            self._add(d, free, free + graph.optimizer_us[d], Activity.OPTIMIZER, "optimizer")
            self._add(d, end, end + graph.overhead_us, Activity.HOST, "overhead")
        return Timeline(
            num_devices=graph.num_devices,
            end_us=end + graph.overhead_us,
            spans=tuple(sorted(self.spans, key=lambda s: (s.device, s.start_us, s.end_us))),
            predicted=True,
        )

    def _fills(self, device: int) -> None:
        for fill in self.slots.get((device, self.num_done[device]), ()):
            work = FrozenWork(
                component=fill.component,
                start=fill.start,
                stop=fill.stop,
                first=fill.first,
                last=fill.last,
                owner=None if fill.home == device else fill.home,
            )
            free = self.clock.free_us[device]
            start = max(free, self.arrivals.fields_us(device, fill.home))
            self._add(device, free, start, Activity.TRANSFER, f"wait {work}")
            rows = fill.last - fill.first
            profile = self.profiles[device]
            spent = profile.forward_us(fill.component, fill.start, fill.stop, rows)
            end = start + profile.fill_us + spent
            written = self.arrivals.of.written[fill.component][fill.start : fill.stop]
            values = chain.from_iterable(written)
            self.arrivals.encoded(device, fill.home, values, (fill.first, fill.last), end)
            self.clock.free_us[device] = end
            self._add(device, start, end, Activity.FROZEN, str(work))

    def _add(self, device: int, start: int, end: int, activity: Activity, label: str) -> None:
        if end > start:
            self.spans.append(
                Span(device=device, start_us=start, end_us=end, activity=activity, label=label)
            )

"""One rank's values on their way in and out during a sampling call.

In:     the messages that will come, by channel and in order; a transport, None for one rank.
Out:    values by key. Receives are posted ahead, sends never block and are kept until a later step
        shows that they were read.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_dpipe.core.program import Channel, Message
from lightning_dpipe.runtime.transport import Handle, Transport, torch_dtype
from lightning_dpipe.sampling.routes import Key, Parcel

_KEPT_STEPS = 2


class Mail:
    """Values of one call.

    `depth` receives are posted ahead on every channel, one at least.
    """

    def __init__(
        self,
        transport: Transport | None,
        incoming: Mapping[Channel, Sequence[Parcel]],
        device: torch.device,
        *,
        depth: int = 2,
    ) -> None:
        self.transport = transport
        self.device = device
        self._here: dict[Key, Tensor] = {}
        self._queues = {channel: deque(parcels) for channel, parcels in incoming.items()}
        self._channel_of = {p.key: c for c, parcels in incoming.items() for p in parcels}
        self._posted: dict[Key, tuple[Handle, Tensor]] = {}
        self._sent: deque[tuple[int, Handle]] = deque()
        for channel in self._queues:
            for _ in range(depth):
                self._post(channel)

    def put(self, key: Key, message: Message | None, value: Tensor, step: int) -> None:
        """Hand on a value made in `step`."""
        if message is None or self.transport is None:
            self._here[key] = value
            return
        self._sent.append((step, self.transport.send(message, value.contiguous())))

    def take(self, key: Key) -> Tensor:
        """Wait for a value."""
        channel = self._channel_of.get(key)
        if channel is None:
            return self._here.pop(key)
        while key not in self._posted:
            self._post(channel)
        handle, buffer = self._posted.pop(key)
        self._post(channel)
        handle.wait()
        return buffer

    def retire(self, step: int) -> None:
        """Let go of sends of steps long past: to be at `step`, their readers have read them."""
        while self._sent and self._sent[0][0] <= step - _KEPT_STEPS:
            self._sent.popleft()[1].wait()

    def drain(self) -> None:
        """Wait for all sends.

        Raises:
            AssertionError: A value was never read: our own mistake.
        """
        while self._sent:
            self._sent.popleft()[1].wait()
        assert not self._here
        assert not self._posted
        assert not any(self._queues.values())

    def _post(self, channel: Channel) -> None:
        queue = self._queues[channel]
        if queue:
            assert self.transport is not None
            parcel = queue.popleft()
            message = parcel.message
            buffer = torch.empty(
                message.shape, dtype=torch_dtype(message.dtype), device=self.device
            )
            self._posted[parcel.key] = (self.transport.post(message, buffer), buffer)

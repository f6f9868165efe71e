"""Back-propagating inside `training_step` although Lightning clears gradients after it.

Lightning runs ``training_step``, then ``zero_grad`` (on the first micro-step of an accumulation
window only), then ``Strategy.backward``. A pipeline has its gradients when ``training_step``
returns. On a first micro-step they are set aside and put back in ``backward``; on later ones, where
nothing is cleared, the engine adds to ``p.grad`` directly: (a + b) + (c + d) is not a + b + c + d
in floating point.
"""

from collections.abc import Sequence

from torch import Tensor, nn


class GradientStash:
    """Holds one micro-step's gradients between `training_step` and `backward`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._fresh: list[Tensor | None] | None = None

    def before(self, *, first: bool) -> None:
        """Before the schedule runs: on a first micro-step drop what the last step left."""
        if first:
            for parameter in self._parameters:
                parameter.grad = None

    def after(self, *, first: bool) -> None:
        """After the schedule: hide fresh gradients from the `zero_grad` that comes now."""
        if first:
            self._fresh = [p.grad for p in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def deposit(self) -> None:
        """In `backward`: put hidden gradients in place."""
        if self._fresh is not None:
            for parameter, gradient in zip(self._parameters, self._fresh, strict=True):
                parameter.grad = gradient
            self._fresh = None

"""Whose weights are whose: what a backbone may hold so that it can be cut anywhere."""

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.spec import Layer, PipelineSpec


def check_weights(spec: PipelineSpec) -> None:
    """Refuse layers that cannot be cut: batch statistics, and trained weights in two layers.

    Raises:
        SpecError: A trained weight belongs to two layers.
        UnsupportedError: A backbone holds a BatchNorm.
    """
    owners: dict[int, str] = {}
    for backbone in spec.backbones:
        for layer in backbone.layers:
            where = f"{backbone.name}.{layer.name}"
            _refuse_batch_norm(where, layer)
            for weight in layer.parameters():
                if not weight.requires_grad:
                    continue
                other = owners.setdefault(id(weight), where)
                if other != where:
                    raise SpecError(
                        f"{other} and {where} share a trained weight of shape "
                        f"{list(weight.shape)}, and may land on two stages; compute it in one of "
                        "them and pass the result on as a named tensor"
                    )
    for component in spec.frozen:
        for layer in component.layers:
            for weight in layer.parameters():
                if id(weight) in owners:
                    raise SpecError(
                        f"{component.name}.{layer.name} is frozen but shares a weight of shape "
                        f"{list(weight.shape)} with {owners[id(weight)]}, which trains it; "
                        "give one of them a copy, or set requires_grad_(False)"
                    )


def _refuse_batch_norm(where: str, layer: Layer) -> None:
    for module in layer.modules():
        if isinstance(module, _BatchNorm):
            raise UnsupportedError(
                f"{where} contains a {type(module).__name__}, whose statistics would be those of "
                "a micro-batch instead of the batch; use GroupNorm or LayerNorm"
            )


def freeze(spec: PipelineSpec) -> None:
    """Make frozen components what they are: no weight requires a gradient, every module in eval."""
    for component in spec.frozen:
        for layer in component.layers:
            for weight in layer.parameters():
                weight.requires_grad_(False)
            for module in layer.modules():
                module.training = False

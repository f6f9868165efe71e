"""What cannot work on a pipeline, refused by name before the first message.

In:     the module, the Trainer, its callbacks and optimizers.
Out:    nothing, or an UnsupportedError that says what to do instead. All ranks see the same things
        and so refuse alike.
"""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.strategy.module import DiffusionModule

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_CALLBACKS = ("WeightAveraging", "StochasticWeightAveraging")
_PRECISIONS = ("16-mixed", "16-true", "16")
# Optimizers with a statistic over all parameters, of which a rank sees its own only, or that call
# the closure more than once.
_OPTIMIZERS = ("LBFGS", "SAM", "Prodigy", "DAdapt", "DOG", "Mechanic")


def check_module(module: LightningModule) -> None:
    """Refuse modules that the pipeline cannot run.

    Raises:
        UnsupportedError: Named in the message.
    """
    name = type(module).__name__
    if not isinstance(module, DiffusionModule):
        raise UnsupportedError(
            f"{name} is not a DiffusionModule; derive it from lightning_dpipe's DiffusionModule "
            "and describe its layers in pipeline_spec()"
        )
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{name} sets automatic_optimization = False; manual optimization cannot run on a "
            "pipeline, which steps its optimizer once per global batch: remove that line"
        )
    for step in _STEPS:
        if getattr(type(module), step) is not getattr(DiffusionModule, step):
            raise UnsupportedError(
                f"{name} overrides {step}, which a pipeline "
                "never calls: it runs the layers of pipeline_spec(). Move the work into the spec's "
                "layers and loss, or into a callback"
            )
    if is_overridden("backward", module, parent=LightningModule):
        raise UnsupportedError(
            f"{name} overrides backward, which a pipeline never calls: its stages back-propagate "
            "inside the step. Scale the loss in the spec's Loss instead"
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise UnsupportedError(
            f"{name} is wrapped by torch.compile; compile the layers' modules in configure_model() "
            "instead"
        )


def check_trainer(trainer: Any, accelerator: Any, layer_sync: Any) -> None:
    """Refuse Trainer flags that cannot be honoured.

    Raises:
        UnsupportedError: Named in the message.
    """
    precision = str(trainer.precision_plugin.precision)
    if precision in _PRECISIONS or getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise UnsupportedError(
            f'precision="{precision}" needs a gradient scaler that all stages share, which does '
            'not exist; use "bf16-mixed", "bf16-true" or "32-true"'
        )
    if layer_sync is not None:
        raise UnsupportedError(
            "sync_batchnorm=True would average statistics over stages that hold different layers; "
            "remove it (and replace BatchNorm, whose statistics would be per micro-batch)"
        )
    kind = type(accelerator).__name__
    if kind in ("MPSAccelerator", "XLAAccelerator"):
        raise UnsupportedError(
            f'accelerator {kind} has no process groups for a pipeline; use "cpu" or "gpu"'
        )
    for callback in trainer.callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in _CALLBACKS:
                raise UnsupportedError(
                    f"callback {type(callback).__name__} averages or copies the whole model, of "
                    "which a rank holds one stage; remove it, and average checkpoints instead"
                )


def check_early_encoding(trainer: Any, module: LightningModule) -> None:
    """Refuse batch hooks that would see a batch only after its frozen work was done.

    Raises:
        UnsupportedError: Named in the message.
    """
    for owner in (module, trainer.datamodule):
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            if owner is not None and is_overridden(hook, owner):
                raise UnsupportedError(
                    f"{type(owner).__name__} overrides {hook}, but BubbleFill encodes a batch one "
                    "step before that hook runs on it; move the work into the dataset, the collate "
                    "function or a frozen layer, or train without BubbleFill"
                )


def check_several(error: RuntimeError) -> None:
    """Replace Lightning's advice on several optimizers (manual optimization), which is wrong here.

    Raises:
        UnsupportedError: That is what `error` is about.
    """
    if "multiple optimizers" in str(error):
        raise UnsupportedError(
            "configure_optimizers returned several optimizers; expected exactly 1, use parameter "
            "groups for different settings"
        ) from error


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that looks at the whole model at once.

    Raises:
        UnsupportedError: Named in the message.
    """
    for base in (b for optimizer in optimizers for b in type(optimizer).__mro__):
        if base.__name__.startswith(_OPTIMIZERS):
            raise UnsupportedError(
                f"optimizer {base.__name__} looks at all parameters at once or "
                "calls the closure several times; a rank holds one stage's. Use AdamW, SGD or "
                "another optimizer that treats each parameter on its own"
            )

"""A config's model without memory for its weights: enough to count its work.

In: a composed config. Out: its PipelineSpec. Nothing is computed, downloaded or put on a device.
"""

import torch
from omegaconf import DictConfig

from lightning_dpipe.cli.parts import build_module
from lightning_dpipe.models.spec import PipelineSpec


def meta_spec(config: DictConfig) -> PipelineSpec:
    """Build ``config.model`` on the meta device and describe it.

    A module that reads its weights from files cannot do so on meta: it is built as always, its
    weights stay in host memory.

    Raises:
        DPipeError: No model is chosen, or it is no DiffusionModule.
    """
    module = build_module(config)
    # Tables of the spec (noise levels) must have values, so it is made outside of the context.
    module.prepare_spec = lambda: None  # type: ignore[method-assign]
    try:
        with torch.device("meta"):
            module.configure_model()
    except RuntimeError as error:
        if "meta device" not in str(error):
            raise
        module = build_module(config)
        module.configure_model()
        return module.spec
    del module.prepare_spec
    return module.spec

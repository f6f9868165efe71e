"""A config's model without memory for its weights: enough to count its work.

In: a composed config. Out: its PipelineSpec. Nothing is computed, downloaded or put on a device.
"""

import torch
from omegaconf import DictConfig

from lightning_dpipe.cli.parts import build_model
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.strategy.module import DiffusionModule


def meta_spec(config: DictConfig) -> PipelineSpec:
    """Build ``config.model`` on the meta device; a spec is taken as it is.

    A module that reads its weights from files cannot do so on meta: it is built as always, its
    weights stay in host memory.

    Raises:
        DPipeError: No model is chosen, or it is neither a DiffusionModule nor a PipelineSpec.
    """
    model = build_model(config)
    if isinstance(model, PipelineSpec):
        return model
    # Tables of the spec (noise levels) must have values, so it is made outside of the context.
    model.prepare_spec = lambda: None  # type: ignore[method-assign]
    try:
        with torch.device("meta"):
            model.configure_model()
    except RuntimeError as error:
        if "meta device" not in str(error):
            raise
        fresh = build_model(config)
        assert isinstance(fresh, DiffusionModule)
        fresh.configure_model()
        return fresh.spec
    del model.prepare_spec
    return model.spec

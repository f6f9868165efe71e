"""Every recipe that is small enough for a test trains the same on a pipeline as in one process."""

import pytest

from lightning_dpipe.cli.__main__ import main


@pytest.mark.parametrize(
    "overrides",
    [
        ("recipe=sd21_tiny",),
        ("recipe=sd21_tiny", "model.self_conditioning=0.5"),
        ("recipe=controlnet_tiny",),
        ("recipe=cdm_tiny",),
        ("recipe=sd21_lcm_tiny",),
        ("recipe=dit_tiny", "model.self_conditioning=0.5"),
        ("recipe=pixart_tiny",),
        ("recipe=sd3_tiny",),
        ("recipe=flux_tiny",),
        ("recipe=sd21_lora_tiny",),
    ],
    ids=" ".join,
)
def test_a_tiny_recipe_is_bit_identical_to_one_process(
    overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """With a VAE, CLIP and T5 in the bubbles, their layers cut and their samples split."""
    command = ["verify", *overrides, "trainer.devices=2", "data.batch_size=4"]
    assert main([*command, "strategy.num_microbatches=4"]) == 0
    assert "PASS (no difference allowed)" in capsys.readouterr().out

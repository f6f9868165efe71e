"""Do the recipes learn, not only run? Samples are judged by what knows nothing of the model.

    python -m benchmarks.learning [--quick] [--json]

Each run is one process on one core with the recipe's global batch; a pipeline computes the same
numbers (`python -m benchmarks.parity`).

digits    `digits_dit` with and without self-conditioning, several seeds each. A support vector
          machine that learnt the real digits reads 300 samples; the share it reads as the digit
          asked for is the accuracy, and its own on held-out real digits says what to expect of
          perfect samples. `distance` is the Frechet distance between Gaussians fitted to the pixels
          of samples and of held-out digits; that of the training digits is given beside it.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from sklearn.svm import SVC
from torch import Tensor

from benchmarks.common import OUT, Report, parser, show
from lightning_dpipe.cli.parts import build_data, build_module
from lightning_dpipe.cli.paths import config_dir
from lightning_dpipe.data.digits import NUM_CLASSES
from lightning_dpipe.sampling.grid import save_grid

SEEDS = (1, 2, 3)
PER_DIGIT = 30
Floats = npt.NDArray[np.float64]


def trained(overrides: Sequence[str], *, seed: int) -> tuple[Any, Any, DictConfig, float]:
    """Train a recipe in this process; module in eval mode, data, config, seconds."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose("config", [*overrides, f"seed={seed}"])
    L.seed_everything(seed, verbose=False)
    module, data = build_module(config), build_data(config)
    return module, data, config, fit(module, data, max_steps=config.trainer.max_steps)


def fit(module: Any, data: Any, *, max_steps: int) -> float:
    """Train in this process and leave the module in eval mode; seconds."""
    trainer = L.Trainer(
        strategy="auto", accelerator="cpu", devices=1, max_steps=max_steps,
        gradient_clip_val=1.0, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=OUT, limit_val_batches=0,
    )  # fmt: skip
    start = time.monotonic()
    trainer.fit(module, datamodule=data)
    module.eval()
    return time.monotonic() - start


def draw(module: Any, fields: Mapping[str, Tensor], config: DictConfig) -> Tensor:
    """Samples as the recipe draws them."""
    grid = config.callbacks.sample_grid
    drawn: Tensor = module.draw_samples(fields, num_steps=grid.num_steps, guidance=grid.guidance)
    return drawn


def digits(report: Report, *, quick: bool) -> None:
    """One row a run; accuracy of the samples by way of training."""
    steps = 400
    for conditioned in ("0.5", "null"):
        name = "conditioned" if conditioned != "null" else "plain"
        for seed in SEEDS[:1] if quick else SEEDS:
            recipe = [
                "recipe=digits_dit", "data.batch_size=64", f"model.self_conditioning={conditioned}",
                f"trainer.max_steps={steps}",
            ]  # fmt: skip
            module, data, config, seconds = trained(recipe, seed=seed)
            label = torch.arange(NUM_CLASSES).repeat_interleave(PER_DIGIT)
            images = draw(module, {"label": label}, config)
            judge = Judge(data)
            row = {
                "run": f"digits {name}", "seed": seed, "steps": steps, "train_s": seconds,
                "accuracy": judge.accuracy(images, label), "distance": judge.distance(images),
            }  # fmt: skip
            show(str(row))
            report.rows.append(row)
            shown = images[:: PER_DIGIT // 2].expand(-1, 3, -1, -1)
            captions = [str(int(x)) for x in label[:: PER_DIGIT // 2]]
            save_grid(OUT / f"learning_digits_{name}_{seed}.png", {"drawn": shown}, captions)
        own = [row for row in report.rows if row["run"] == f"digits {name}"]
        for figure in ("accuracy", "distance"):
            values = [row[figure] for row in own]
            report.figures |= {
                f"digits_{name}_{figure}": float(np.mean(values)),
                f"digits_{name}_{figure}_worst": max(values)
                if figure == "distance"
                else min(values),
            }
    report.figures["digits_classifier_accuracy"] = judge.held_out_accuracy
    report.figures["digits_real_distance"] = judge.real_distance
    report.bar("digits_conditioned_accuracy_worst", ">=", 0.9)
    report.bar("digits_plain_accuracy_worst", ">=", 0.9)


class Judge:
    """What real digits say about drawn ones."""

    def __init__(self, data: Any) -> None:
        data.setup()
        train, held_out = (
            x.dataset.fields for x in (data.train_dataloader(), data.val_dataloader())
        )
        self._held_out = _pixels(held_out["image"])
        pixels = _pixels(train["image"])
        self._classifier = SVC(gamma=0.001).fit(pixels, train["label"].numpy())
        self.held_out_accuracy = self.accuracy(held_out["image"], held_out["label"])
        self.real_distance = self.distance(train["image"])

    def accuracy(self, images: Tensor, label: Tensor) -> float:
        """Share of images ``[batch, 1, 8, 8]`` that are read as `label`."""
        return float((self._classifier.predict(_pixels(images)) == label.numpy()).mean())

    def distance(self, images: Tensor) -> float:
        """Frechet distance to the held-out digits, in squared grey levels of 16."""
        return frechet(_pixels(images), self._held_out)


def frechet(a: Floats, b: Floats) -> float:
    """Squared Frechet distance of the Gaussians fitted to two sets, each ``[samples, dim]``."""
    first, second = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # The eigenvalues of a product of two covariances are real and not negative.
    roots = np.sqrt(np.linalg.eigvals(first @ second).real.clip(min=0.0))
    gap = a.mean(0) - b.mean(0)
    return float(gap @ gap + np.trace(first) + np.trace(second) - 2 * roots.sum())


def _pixels(images: Tensor) -> Floats:
    """Grey levels from 0 to 16, as the set has them, ``[batch, pixels]``."""
    levels: Floats = images.clamp(-1, 1).add(1).mul(8).flatten(1).double().numpy()
    return levels


def main() -> int:
    """Run it."""
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report("learning")
    digits(report, quick=options.quick)
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

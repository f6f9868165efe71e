"""Make the estimated profiles that ship: python scripts/estimate_profiles.py (about 30 s).

Full-size Stable Diffusion 2.1 and ControlNet at 512 px on A100, bfloat16, local batch 1 to 64, from
conf/cluster/p4de_8x8.yaml. Run it again when a model, the cluster file or the roofline changes.
"""

from pathlib import Path

from omegaconf import OmegaConf

from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.jsonio import save
from lightning_dpipe.objective.presets import controlnet_spec, sd21_spec
from lightning_dpipe.profiling.roofline import count_model, roofline_profile

CONF = Path(__file__).resolve().parents[1] / "conf"


def main() -> None:
    """Write conf/profiles/<model>_a100_bf16.json."""
    file = OmegaConf.load(CONF / "cluster" / "p4de_8x8.yaml")
    cluster = Cluster.from_mapping(OmegaConf.to_container(file))  # type: ignore[arg-type]
    for name, make in (("sd21", sd21_spec), ("controlnet", controlnet_spec)):
        path = CONF / "profiles" / f"{name}_a100_bf16.json"
        save(roofline_profile(count_model(make()), cluster=cluster), path)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()

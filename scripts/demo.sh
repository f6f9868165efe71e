#!/usr/bin/env bash
# Trains the emoji recipe on two ranks of this machine: text to image, in at most six minutes.
# Arguments override the config: bash scripts/demo.sh trainer.max_steps=100 strategy.num_microbatches=4
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export OMP_NUM_THREADS=1 # one thread a rank: they share the cores

exec "$python" -m lightning_dpipe.cli train \
    recipe=emoji_unet trainer.devices=2 strategy.num_stages=2 "$@"

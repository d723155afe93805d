#!/usr/bin/env bash
# Trains configs/quickstart.yaml on the CPU, offline once set up; arguments override the config,
# e.g. `scripts/quickstart.sh --trainer.num_train_steps 60`. All output goes under .quickstart/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export HF_HUB_OFFLINE=1
# Not in the config: the host reads every value of trainer.jax_config as text, and jax wants a number here.
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4
.venv/bin/python scripts/make_corpus.py --output .quickstart/data
exec .venv/bin/levanter-diloco train_lm --config_path configs/quickstart.yaml "$@"

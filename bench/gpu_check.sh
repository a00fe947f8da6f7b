#!/usr/bin/env bash
# On a machine with an AMD or NVIDIA GPU: what the machine is, the device tests, and a few training steps per dtype
# against the CPU.  Nothing is downloaded beyond what `make setup` installs; about two minutes.
#
#   make gpu-check                     # after make setup
#   PYTHON=python3 bash bench/gpu_check.sh --models tiny --json gpu.json
#
# Exit status 0: everything holds; 1: something does not; 2: torch sees no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

"$python" -m lumen hardware
"$python" -m bench.gpu_check "$@"
"$python" -m pytest tests/device -rs

#!/bin/bash
# Whatever can be checked on one GPU, in under five minutes: the demo model and a 1B-shaped random model on CUDA with NCCL and a
# world of one: log-probs and gradients against the CPU, step time and memory against `plan`.
#
#   tests/gpu/run.sh                   on a machine with a GPU; needs Python >= 3.10 and torch with CUDA, no network
#   tests/gpu/run.sh --cpu             the same script from end to end without a GPU: only the device differs
#
# WHEELS=DIR holds wheels of what the image lacks (megatron-core, mbridge, ...); they are installed from there alone.
# PYTHON=... is the interpreter; the project's own .venv when there is one. OUT=DIR keeps the JSON result.
set -euo pipefail
cd "$(dirname "$0")/../.."

device=cuda
if [ "${1:-}" = --cpu ]; then device=cpu; elif [ $# -gt 0 ]; then echo "usage: tests/gpu/run.sh [--cpu]" >&2; exit 2; fi
if [ -z "${PYTHON:-}" ]; then if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ -n "${WHEELS:-}" ]; then
    target=${OUT:-build}/gpu-packages
    "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" --upgrade --target "$target" "$WHEELS"/*.whl
    export PYTHONPATH="$PYTHONPATH:$PWD/$target"
fi
# A GPU that hangs must not keep the machine.
exec timeout 300 "$PYTHON" tests/gpu/check.py --device "$device" ${OUT:+--json "$OUT/gpu.json"}

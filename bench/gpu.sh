#!/usr/bin/env bash
# Checks and times the Triton backend on a machine with an NVIDIA GPU, in under four minutes:
#   bench/gpu.sh [OUT]            numbers in OUT/gpu.json, the table in OUT/gpu.txt (default build/gpu)
#   bench/gpu.sh OUT --dry-run    every step on the host, in Triton's interpreter, with tiny shapes
# PYTHON names an interpreter that has torch 2.11 or later with CUDA and triton 3.6 or later (default: python3).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/gpu}
shift || true
python=${PYTHON:-python3}

missing=$("$python" - <<'PY'
import importlib.util as u
names = ("torch", "triton", "jinja2", "networkx", "numpy", "safetensors")
print(" ".join(n for n in names if u.find_spec(n) is None))
PY
)
if [ -n "$missing" ]; then
  echo "installing: $missing"
  "$python" -m pip install -q --disable-pip-version-check $missing || {
    echo "gpu.sh: these packages are missing and cannot be installed: $missing" >&2
    exit 2
  }
fi
seconds=${SECONDS_LIMIT:-235}
case " $* " in *" --dry-run "*) export TRITON_INTERPRET=1 seconds=0 ;; esac  # read when triton loads; 0 is no limit
mkdir -p "$out"
status=0
PYTHONPATH=. PYTHONUNBUFFERED=1 timeout -s INT -k 4 "$seconds" "$python" bench/gpu.py --out "$out" "$@" 2>"$out/gpu.err" || status=$?
if [ "$status" -ne 0 ]; then
  tail -n 40 "$out/gpu.err" >&2
  echo "gpu.sh: stopped with status $status; $out/gpu.json holds what was measured until then" >&2
fi
exit "$status"

#!/usr/bin/env bash
# A door to `greenfast profile fp8_sdpa --ncu`: scripts/profile_ncu.sh SHAPE [SEED [LAUNCHES]]
# LAUNCHES are made, and the last one, with warm caches, is the one profiled.
set -euo pipefail
if [ $# -lt 1 ] || [ $# -gt 3 ]; then
  echo "usage: scripts/profile_ncu.sh SHAPE [SEED [LAUNCHES]]   (as in: scripts/profile_ncu.sh mission 0 3)" >&2
  exit 2
fi
python=python3
root=$(cd "$(dirname "$0")/.." && pwd)
[ -x "$root/.venv/bin/python" ] && python="$root/.venv/bin/python"
exec "$python" -m greenfast profile fp8_sdpa --ncu --shapes "$1" --seeds "${2:-0}" --launches "${3:-3}"

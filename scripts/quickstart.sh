#!/usr/bin/env bash
# Set up and run the main job: pretrain a tiny Llama on real text, retrofit it to CR 4, export, sample, compare.
# Arguments are settings of the retrofit, e.g. ./scripts/quickstart.sh compression=dmc training=short
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_environment.sh
setup_environment train
exec .venv/bin/python scripts/quickstart.py "$@"

#!/usr/bin/env bash
# Set up and run the main job: bring SmolLM2-135M, learn gates to CR 4, compare caches in equal bytes, write a page.
# ./scripts/quickstart.sh base=tiny trains a tiny Llama from scratch instead, through all stages. Other arguments are
# settings of the retrofit, e.g. compression.target_ratio=2
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_environment.sh
setup_environment train,gguf,serve
exec .venv/bin/dmc quickstart "$@"

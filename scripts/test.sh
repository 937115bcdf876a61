#!/usr/bin/env bash
# Set up and run every test this machine can run, in TEST_PROCESSES processes; says which are left out and why. The default
# is 3: two for two cores, and one that waits for Slurm's jobs at first.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_environment.sh
setup_environment train,slurm,deepspeed,eval,serve,ray,dev
setup_vllm
exec .venv/bin/python -m pytest --numprocesses="${TEST_PROCESSES:-3}" --dist=worksteal "$@"

#!/usr/bin/env bash
# Set up and run every test this machine can run, in TEST_PROCESSES processes (2); says which are left out and why.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_environment.sh
setup_environment train,slurm,deepspeed,eval,serve,ray,dev
exec .venv/bin/python -m pytest --numprocesses="${TEST_PROCESSES:-2}" --dist=worksteal "$@"

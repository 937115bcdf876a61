#!/usr/bin/env bash
# Set up and run the tests: the quick tier (8 minutes on 2 cores, 12 at most), with --full all of them (32 to 58 minutes). Says at the end
# what was left out, and why. Further arguments go to pytest; TEST_PROCESSES is the number of processes.
#   ./scripts/test.sh            before a commit
#   ./scripts/test.sh --full     before a release
#   ./scripts/test.sh --rest=0/6 the first sixth of what the quick tier leaves out
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_environment.sh
setup_environment "$TEST_EXTRAS"
case ${1-} in
    --full) shift && setup_vllm ;;
    --rest=*) setup_vllm ;;
    *) set -- --quick "$@" ;;
esac
exec .venv/bin/python -m pytest --numprocesses="${TEST_PROCESSES:-3}" --dist=worksteal "$@"

# Sourced by quickstart.sh and test.sh: makes .venv in the project's root and installs the tested versions.
# Usage: setup_environment EXTRAS    e.g. setup_environment train,dev
setup_environment() {
    local python=${PYTHON:-python3} stamp=.venv/.installed wanted
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "error: $("$python" --version) is too old: Python >= 3.10 is needed (set PYTHON=/path/to/python)" >&2
        return 1
    }
    wanted="$1 $(cat pyproject.toml constraints.txt | cksum)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0
    echo "installing torch, transformers and the other packages of constraints.txt into .venv: some minutes" >&2
    # Torch first: without a GPU the CPU build is enough, and an unpinned torch would pull gigabytes of CUDA packages.
    if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
        if command -v nvidia-smi >/dev/null 2>&1; then
            .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
        else
            local index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu} from=()
            # Where it cannot be reached, other sources may have such a build: asking it again and again helps nobody.
            .venv/bin/python -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=10)" 2>/dev/null \
                && from=(--extra-index-url "$index")
            .venv/bin/python -m pip install -q --disable-pip-version-check "torch==$(sed -n 's/^torch==//p' constraints.txt)" "${from[@]}"
        fi
    fi
    .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$1]"
    echo "$wanted" >"$stamp"
}

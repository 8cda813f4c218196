#!/bin/sh
# Install the toolkit beside TensorRT-LLM, in one of NVIDIA's containers
# nvcr.io/nvidia/tritonserver:NN.NN-trtllm-python-py3:
#
#     sh docker/trtllm-install.sh [FOLDER]
#
# FOLDER, /opt/toolkit if none is named, becomes a Python environment that has the toolkit and sees
# what the container has. docs/tensorrt_llm.md says what stays as it is. What `python3` is here has
# to have tensorrt_llm.
set -eu
folder=${1:-/opt/toolkit}
checkout=$(cd "$(dirname "$0")/.." && pwd)
site='import sysconfig; print(sysconfig.get_path("purelib"))'

container=$(python3 -c "$site")
python3 -m venv --without-pip --system-site-packages "$folder"
python="$folder/bin/python"
# Up to 26.02 the container's packages belong to the system's Python, which the new environment sees.
# From 26.03 on they belong to the environment /opt/venv-tritonserver, and an environment made from
# that one sees the system's Python alone. This line adds them in either case, with what their own
# .pth files add.
echo "import site; site.addsitedir('$container')" > "$("$python" -c "$site")/container.pth"

if ! "$python" -c 'from importlib.metadata import version; version("tensorrt_llm")' 2> /dev/null; then
    echo "trtllm-install: $(command -v python3) has no tensorrt_llm: is this an image of" \
        "nvcr.io/nvidia/tritonserver with -trtllm-python-py3 in its tag?" >&2
    exit 1
fi

# TensorRT-LLM is compiled against one torch, and its wheel needs one version of each of these.
python3 -m pip --python "$python" list --format=freeze |
    grep -E '^(torch|torchvision|triton|transformers|numpy|mpi4py|tensorrt.*|nvidia-.*-cu1[0-9])==' \
        > "$folder/keep.txt"
# NVIDIA's images name a file in PIP_CONSTRAINT that may pin what the toolkit needs otherwise.
env -u PIP_CONSTRAINT python3 -m pip --python "$python" install -c "$folder/keep.txt" "$checkout[trtllm]"

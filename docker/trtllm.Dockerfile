# NVIDIA's container for TensorRT-LLM, with the toolkit. Build it in a checkout:
#
#     docker build -f docker/trtllm.Dockerfile -t toolkit-trtllm .
#     docker run --rm --gpus=all toolkit-trtllm
#
# The second line says what works there (`toolkit doctor`). docs/tensorrt_llm.md has the line that
# builds a deployment, and which TAG has which TensorRT-LLM: it has to be the version that the YAML
# names.
ARG TAG=26.07
FROM nvcr.io/nvidia/tritonserver:${TAG}-trtllm-python-py3

COPY pyproject.toml README.md /opt/checkout/
COPY toolkit /opt/checkout/toolkit
COPY docker/trtllm-install.sh /opt/checkout/docker/
RUN sh /opt/checkout/docker/trtllm-install.sh /opt/toolkit
ENV PATH=/opt/toolkit/bin:${PATH}
COPY configs /toolkit/configs
WORKDIR /toolkit
CMD ["toolkit", "doctor"]

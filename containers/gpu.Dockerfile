# Temper with CUDA and vLLM, which has an environment of its own.
# Not built here; only linted. Build it at the root of the repository:
#   docker build -f containers/gpu.Dockerfile -t temper:gpu .
# Start it with enough shared memory, through which weights reach servers of the same host:
#   docker run --gpus all --shm-size 64g temper:gpu temper-train ...
#
# The versions are those with which the runs on GPUs were measured: torch 2.11.0 built for CUDA 13.0,
# and vLLM 0.26.0. The wheels contain CUDA's libraries; the host needs only the driver.
FROM python:3.12-bookworm

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap libseccomp2 \
    && rm -rf /var/lib/apt/lists/*

# torch compiles layers with the C compiler of this image.
WORKDIR /opt/temper
RUN python -m venv /opt/rollout-env \
    && /opt/rollout-env/bin/pip install --no-cache-dir "vllm==0.26.0"
COPY constraints constraints
RUN pip install --no-cache-dir -c constraints/gpu.txt torch

COPY packages packages
RUN pip install --no-cache-dir -c constraints/gpu.txt ./packages/engine-api \
        "./packages/engine-fsdp[lora,liger,float8]" "./packages/trainer[fsdp,lora,ray]" \
    && /opt/rollout-env/bin/pip install --no-cache-dir --no-deps \
        ./packages/engine-api ./packages/trainer

RUN useradd --create-home --uid 1000 temper
USER 1000
WORKDIR /home/temper

CMD ["temper-train", "--help"]

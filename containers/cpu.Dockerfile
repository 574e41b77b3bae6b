# Temper without CUDA: the quickstart, tests of your own code, and the translation of old projects.
# Not built here; only linted. Build it at the root of the repository:
#   docker build -f containers/cpu.Dockerfile -t temper:cpu .
FROM python:3.11-slim-bookworm

# bubblewrap and libseccomp: the sandbox of the Python tool.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap libseccomp2 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/temper
COPY constraints constraints
COPY packages packages

# This index has builds of torch without CUDA, which pip prefers to those of the default index.
RUN pip install --no-cache-dir -c constraints/cpu.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install --no-cache-dir -c constraints/cpu.txt ./packages/engine-api \
        "./packages/engine-fsdp[lora]" "./packages/trainer[fsdp,lora,ray]" ./packages/legacy-shim

RUN useradd --create-home --uid 1000 temper
USER 1000
WORKDIR /home/temper
ENV OMP_NUM_THREADS=1

CMD ["temper-train", "--help"]

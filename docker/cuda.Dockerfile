# areal for NVIDIA GPUs, with Ray for several machines. CUDA's libraries come with torch, the driver from the
# host (NVIDIA Container Toolkit).
#   docker build --file docker/cuda.Dockerfile --tag areal:cuda .
FROM python:3.12.11-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY areal areal
COPY examples/math examples/math
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12.11-slim-bookworm
# Triton compiles its launchers with gcc when a kernel is first used. KubeRay's probes call wget.
# Versions are those of the base image's release of Debian.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev wget \
    && rm -rf /var/lib/apt/lists/*
# Where another build of torch is wanted, its index; empty: that of pip, which for x86_64 has CUDA.
ARG TORCH_INDEX=
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /tmp/wheels
# torch by itself first: the other requirements then find the pinned build in place.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --constraint /tmp/constraints.txt torch \
    && for wheel in /tmp/wheels/*.whl; do \
        pip install --no-cache-dir --constraint /tmp/constraints.txt "${wheel}[ray]" || exit 1; \
    done \
    && useradd --create-home --uid 1000 areal \
    && install --directory --owner areal /work
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
ENTRYPOINT ["areal"]
CMD ["--help"]

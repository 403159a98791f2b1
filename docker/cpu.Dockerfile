# areal on a CPU: starts the demo, or any other command of areal.
#   docker build --file docker/cpu.Dockerfile --tag areal:cpu .
FROM python:3.12.11-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY areal areal
COPY examples/math examples/math
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12.11-slim-bookworm
# An index with builds of torch without CUDA, which on x86_64 are a tenth of the size; empty: that of pip.
ARG TORCH_INDEX=
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /tmp/wheels
# torch by itself first: the other requirements then find the pinned build in place.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --constraint /tmp/constraints.txt torch \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt /tmp/wheels/*.whl \
    && useradd --create-home --uid 1000 areal \
    && install --directory --owner areal /work
USER 1000
WORKDIR /work
ENTRYPOINT ["areal"]
CMD ["demo", "--out", "/work/demo"]

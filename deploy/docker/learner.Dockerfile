# The learner and the evaluator, with the built-in language model:
#   docker build --file deploy/docker/learner.Dockerfile --build-arg ACCELERATOR=cuda13 --tag decoupled-diloco-learner .
# ACCELERATOR is cpu, tpu or cuda13. The lock pins the CPU build; plug-ins of an accelerator follow the pinned jax.
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
COPY requirements.lock ./
RUN pip install --constraint requirements.lock build hatchling
COPY . .
RUN python -m build --wheel --no-isolation --outdir /dist .

FROM python:${PYTHON_VERSION}-slim-bookworm AS environment
ARG ACCELERATOR=cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /venv
WORKDIR /source
COPY pyproject.toml requirements.lock ./
COPY tools/print_requirements.py tools/
RUN case "$ACCELERATOR" in \
        cpu) set -- learner ;; \
        tpu | cuda13) set -- learner "$ACCELERATOR" ;; \
        *) echo "ACCELERATOR=$ACCELERATOR: choose cpu, tpu or cuda13" >&2; exit 1 ;; \
    esac \
    && python tools/print_requirements.py "$@" > wanted.txt \
    && /venv/bin/pip install --constraint requirements.lock --requirement wanted.txt
COPY --from=wheel /dist/ /dist/
RUN /venv/bin/pip install --no-deps /dist/*.whl

FROM python:${PYTHON_VERSION}-slim-bookworm
LABEL org.opencontainers.image.title="decoupled-diloco learner" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 diloco \
    && useradd --uid 10001 --gid diloco --no-create-home --home-dir /data --shell /usr/sbin/nologin diloco \
    && install --directory --owner=diloco --group=diloco /data /cache
COPY --from=environment /venv /venv
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/cache/numba \
    DECOUPLED_DILOCO_LEARNER__CACHE_DIR=/cache \
    DECOUPLED_DILOCO_LEARNER__HTTP_LISTEN=0.0.0.0:9464 \
    DECOUPLED_DILOCO_EVALUATOR__CACHE_DIR=/cache \
    DECOUPLED_DILOCO_EVALUATOR__HTTP_LISTEN=0.0.0.0:9464
USER 10001:10001
# The loops of encodings, compiled for the processor of this machine; on another kind a start does it again, in seconds.
RUN ["python", "-c", "import decoupled_diloco.arrays.kernels"]
WORKDIR /data
EXPOSE 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9464/metrics', timeout=2)"]
ENTRYPOINT ["decoupled-diloco-learner"]

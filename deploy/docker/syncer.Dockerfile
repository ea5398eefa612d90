# The syncer and syncerctl, without JAX:
#   docker build --file deploy/docker/syncer.Dockerfile --tag decoupled-diloco-syncer .
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
COPY requirements.lock ./
RUN pip install --constraint requirements.lock build hatchling
COPY . .
RUN python -m build --wheel --no-isolation --outdir /dist .

FROM python:${PYTHON_VERSION}-slim-bookworm AS environment
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /venv
WORKDIR /source
COPY pyproject.toml requirements.lock ./
COPY tools/print_requirements.py tools/
RUN python tools/print_requirements.py syncer > wanted.txt \
    && /venv/bin/pip install --constraint requirements.lock --requirement wanted.txt
COPY --from=wheel /dist/ /dist/
RUN /venv/bin/pip install --no-deps /dist/*.whl

FROM python:${PYTHON_VERSION}-slim-bookworm
LABEL org.opencontainers.image.title="decoupled-diloco syncer" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 diloco \
    && useradd --uid 10001 --gid diloco --no-create-home --home-dir /data --shell /usr/sbin/nologin diloco \
    && install --directory --owner=diloco --group=diloco /data
COPY --from=environment /venv /venv
# Plaintext off loopback stays refused until TLS files or ..._INSECURE=true are given.
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/data/cache \
    DECOUPLED_DILOCO_SYNCER__LISTEN=0.0.0.0:50051 \
    DECOUPLED_DILOCO_SYNCER__ADMIN_LISTEN=0.0.0.0:50052 \
    DECOUPLED_DILOCO_SYNCER__HTTP_LISTEN=0.0.0.0:9464 \
    DECOUPLED_DILOCO_SYNCER__STATE_DIR=/data/state \
    DECOUPLED_DILOCO_SYNCER__OUTPUT_DIR=/data/output
USER 10001:10001
# The loops of a merge, compiled for the processor of this machine; on another kind a start does it again, in seconds.
RUN ["python", "-c", "import decoupled_diloco.arrays.kernels"]
WORKDIR /data
EXPOSE 50051 50052 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9464/healthz', timeout=2)"]
ENTRYPOINT ["decoupled-diloco-syncer"]

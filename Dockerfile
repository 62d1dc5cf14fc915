# Two images of a worker and its router, one of the page, and one of Prometheus:
#
#   docker build --target cpu .           on Debian, with the Triton from pip: runs anywhere
#   docker build --target gpu .           on NVIDIA's Triton image
#   docker build --target page .          the page, on any machine
#   docker build --target prometheus .    Debian's Prometheus, with our scrape configuration
#
# PIP_FLAGS are flags for pip, such as an index with another build of torch (CPU only, or your CUDA).
# VERSION goes into the image's labels; `docker buildx build --sbom=true` adds a list of its packages.

FROM scratch AS source
COPY README.md LICENSE ./
COPY engine engine
COPY client client
COPY router router
COPY serving serving
COPY model_repository model_repository
COPY ensemble ensemble
COPY services services

FROM debian:bookworm-slim AS cpu
ARG PIP_FLAGS=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl libpython3.11 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/maskserve PATH=/opt/maskserve/bin:$PATH PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
# Dependencies first: this layer stays while only the code changes.
COPY pyproject.toml constraints.txt deploy/requirements.py ./
RUN python3 -m venv $VIRTUAL_ENV \
    && pip install --no-cache-dir $PIP_FLAGS -c constraints.txt torch \
    && python3 requirements.py engine server postgres trace > requirements.txt \
    && pip install --no-cache-dir $PIP_FLAGS -c constraints.txt -r requirements.txt
COPY --from=source / ./
RUN pip install --no-cache-dir $PIP_FLAGS --no-deps .
COPY assets/models/demo /opt/models/demo
COPY assets/controlnets /opt/controlnets
COPY assets/nodes /opt/nodes
COPY assets/workflows /opt/workflows
# Triton is laid out once, here, not at each start.
ENV XDG_CACHE_HOME=/opt/cache
RUN python3 -c "from pathlib import Path; from maskserve_serving.runtime import pip_runtime; pip_runtime(Path('/opt/cache/maskserve'))" \
    && useradd --uid 10001 --create-home maskserve \
    && install -d -o maskserve /models /var/lib/maskserve /var/log/maskserve /host-tier \
    && install -d -o maskserve /opt/cache/maskserve /opt/cache/maskserve/inductor
USER maskserve
WORKDIR /var/lib/maskserve
ARG VERSION=""
LABEL org.opencontainers.image.title="maskserve cpu" \
    org.opencontainers.image.description="Worker and router on any machine" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="$VERSION"
CMD ["maskserve", "serve", "--model", "/opt/models/demo", "--host", "0.0.0.0", "--log-dir", "/var/log/maskserve"]

FROM debian:bookworm-slim AS page
ARG PIP_FLAGS=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/maskserve PATH=/opt/maskserve/bin:$PATH PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/requirements.py ./
RUN python3 -m venv $VIRTUAL_ENV \
    && python3 requirements.py web > requirements.txt \
    && pip install --no-cache-dir $PIP_FLAGS -c constraints.txt -r requirements.txt
COPY --from=source / ./
RUN pip install --no-cache-dir $PIP_FLAGS --no-deps . \
    && useradd --uid 10001 --create-home maskserve \
    && install -d -o maskserve /pictures
COPY assets/photos /pictures
USER maskserve
WORKDIR /home/maskserve
ARG VERSION=""
LABEL org.opencontainers.image.title="maskserve page" \
    org.opencontainers.image.description="The page for masked edits" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="$VERSION"
CMD ["maskserve", "web", "--host", "0.0.0.0", "--url", "routers:8081", "--images", "/pictures"]

FROM debian:bookworm-slim AS prometheus
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl prometheus \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o prometheus /prometheus
COPY deploy/prometheus.yml /etc/prometheus/prometheus.yml
COPY deploy/alerts.yml /etc/prometheus/alerts.yml
USER prometheus
ARG VERSION=""
LABEL org.opencontainers.image.title="maskserve prometheus" \
    org.opencontainers.image.description="Prometheus with the rules of maskserve" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="$VERSION"
CMD ["prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus", "--storage.tsdb.retention.time=15d"]

FROM nvcr.io/nvidia/tritonserver:26.07-py3 AS gpu
ARG PIP_FLAGS=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends curl python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/maskserve PATH=/opt/maskserve/bin:/opt/tritonserver/bin:$PATH PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/requirements.py ./
RUN python3 -m venv $VIRTUAL_ENV \
    && pip install --no-cache-dir $PIP_FLAGS -c constraints.txt torch \
    && python3 requirements.py engine postgres trace > requirements.txt \
    && pip install --no-cache-dir $PIP_FLAGS -c constraints.txt -r requirements.txt
COPY --from=source / ./
RUN pip install --no-cache-dir $PIP_FLAGS --no-deps . \
    && useradd --uid 10001 --create-home maskserve \
    && install -d -o maskserve /models /var/lib/maskserve /var/log/maskserve /host-tier
USER maskserve
WORKDIR /var/lib/maskserve
ARG VERSION=""
LABEL org.opencontainers.image.title="maskserve gpu" \
    org.opencontainers.image.description="Worker and router on hosts with GPUs" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="$VERSION"
CMD ["maskserve", "serve", "--model", "/models", "--host", "0.0.0.0", "--log-dir", "/var/log/maskserve"]

# One image; the compose file's `command` picks the service.
# The default package index serves torch with its CUDA libraries, which the CPU does not need.
# For an image of a third of the size, name an index that has CPU wheels:
#   docker compose build --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /src
RUN python -m venv /opt/nightjar
COPY pyproject.toml constraints.txt README.md LICENSE THIRD_PARTY_NOTICES.md ./
COPY nightjar nightjar
COPY planner_service planner_service
COPY worker worker
COPY memory_agent memory_agent
COPY gateway gateway
RUN /opt/nightjar/bin/pip install --no-cache-dir -c constraints.txt '.[worker,gateway,interop]'

FROM python:3.11-slim-bookworm
# `nightjar compile` builds native code.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home nightjar \
 && install --directory --owner=nightjar /cache
COPY --from=build /opt/nightjar /opt/nightjar
ENV PATH=/opt/nightjar/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NIGHTJAR_CACHE_DIR=/cache
USER 10001
ENTRYPOINT ["nightjar"]
CMD ["--help"]

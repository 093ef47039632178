# Callyard with the extras of `serve`, for a functions file that is mounted or copied to /app/functions.py.
#
#     docker build -t callyard .
#     docker run --read-only --tmpfs /tmp --stop-timeout 35 -p 127.0.0.1:8700:8700 \
#         -v "$PWD/functions.py:/app/functions.py:ro" -v "$PWD/serve.toml:/etc/callyard/serve.toml:ro" \
#         -v callyard-state:/var/lib/callyard callyard
#
# serve.toml holds the tokens (`callyard token new --tenant me --config serve.toml`) and allowed_hosts: without a token
# nothing listens beyond the container's own loopback. See docs/guides/serving.md.
ARG PYTHON=3.11-slim

FROM python:${PYTHON} AS build
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN python -m venv /opt/callyard \
    && /opt/callyard/bin/pip install --no-cache-dir --no-compile '/source[serve,http,sandbox]' \
    && /opt/callyard/bin/python -m compileall -q /opt/callyard/lib

FROM python:${PYTHON}
# A number, so that a cluster can see that it is not root.
RUN mkdir -p /app /etc/callyard /var/lib/callyard && chown 10001:10001 /var/lib/callyard
COPY --from=build /opt/callyard /opt/callyard
ENV PATH=/opt/callyard/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
USER 10001:10001
WORKDIR /app
# Idempotency keys: they must outlive the container, or a call may run twice.
VOLUME /var/lib/callyard
EXPOSE 8700 8701
# Drains for 30 s, and is gone 2 s later; the default of `docker stop` is 10 s.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=90s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8701/livez', timeout=2)"]
# Process 1 hands on signals and buries orphans itself: no init is needed.
ENTRYPOINT ["callyard", "serve"]
CMD ["/app/functions.py", "--config", "/etc/callyard/serve.toml", "--http", "0.0.0.0:8700", \
     "--admin", "0.0.0.0:8701", "--state-dir", "/var/lib/callyard", "--log-format", "json"]

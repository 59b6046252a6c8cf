# One image for all of Forebay's processes; the command says which: monitor, dispatcher, submit, ...

FROM python:3.11-slim AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# What changes least comes first, so that a change of our code does not fetch libraries again.
COPY requirements/run.txt requirements/build.txt requirements/
RUN python -m venv /opt/forebay && /opt/forebay/bin/pip install --require-hashes -r requirements/run.txt \
    && python -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY workers workers
COPY monitor monitor
COPY dispatcher dispatcher
COPY forebay forebay
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/forebay/bin/pip install --no-deps --no-index /wheels/*.whl

FROM python:3.11-slim
COPY --from=build /opt/forebay /opt/forebay
RUN useradd --system --uid 10001 --create-home forebay \
    && install -d -o forebay -g forebay -m 0700 /data
ENV PATH=/opt/forebay/bin:$PATH PYTHONUNBUFFERED=1 FOREBAY_STORAGE=/data
USER forebay
VOLUME /data
STOPSIGNAL SIGTERM
ENTRYPOINT ["forebay"]
CMD ["--help"]

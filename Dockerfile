# The commands with StableHLO: docker run --rm -v "$PWD:/data" hespas simulate step.mlir ...
FROM python:3.13-slim AS build
WORKDIR /source
COPY . .
RUN python -m pip install --no-cache-dir build && python -m build --wheel --outdir /wheels

FROM python:3.13-slim
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN python -m pip install --no-cache-dir --constraint /wheels/constraints.txt \
      "$(ls /wheels/*.whl)[stablehlo]" && rm -r /wheels \
    && useradd --create-home hespas
USER hespas
WORKDIR /data
ENTRYPOINT ["hespas"]
CMD ["--help"]

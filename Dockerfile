# The judge for CI, without a GPU:
#   docker build -t greenfast --build-arg TORCH_INDEX_URL=URL .
#   docker run --rm -v "$PWD:/work" greenfast judge my_kernel --require build,resources,correctness,evidence
# TORCH_INDEX_URL: an index with CPU builds of torch, from PyTorch's installation page; without it a CUDA build is installed.
FROM python:3.12-slim

ARG TORCH_INDEX_URL=""
COPY . /src
RUN pip install --no-cache-dir torch ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} \
    && pip install --no-cache-dir "/src[judge]" \
    && rm -rf /src

RUN useradd --create-home judge
USER judge
WORKDIR /work
ENTRYPOINT ["greenfast"]
CMD ["doctor"]

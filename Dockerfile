# The judge for CI, without a GPU:
#   docker build -t greenfast --build-arg TORCH_INDEX_URL=URL .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" greenfast judge my_kernel \
#     --require build,resources,correctness,evidence
# --user: the results in the current folder are then yours.
# TORCH_INDEX_URL: an index with CPU builds of torch, from PyTorch's installation page; without it a CUDA build is installed.
FROM python:3.12-slim

ARG TORCH_INDEX_URL=""
COPY . /src
RUN pip install --no-cache-dir torch ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} \
    && pip install --no-cache-dir "/src[judge]" \
    && rm -rf /src

# Any user of --user can write the caches of compiled kernels and of matplotlib there.
ENV HOME=/tmp
USER nobody
WORKDIR /work
ENTRYPOINT ["greenfast"]
CMD ["doctor"]

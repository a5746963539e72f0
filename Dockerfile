# The demo in a container: docker build -t kafkalog-demo . && docker run --rm kafkalog-demo
FROM debian:bookworm-slim
RUN apt-get update -q && apt-get install -q -y --no-install-recommends ca-certificates git make python3
WORKDIR /kafkalog
COPY . .
RUN make demo-setup
RUN useradd --create-home demo && chown -R demo /kafkalog
USER demo
CMD ["make", "demo"]

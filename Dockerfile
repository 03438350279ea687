# docker build --build-arg VERSION=1.2.3 -t iser-target .
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /out/iser-target ./cmd/iser-target \
 && mkdir -p /out/state

# Nothing but the binary and a directory that its user may write to.
FROM scratch
COPY --from=build /out/iser-target /iser-target
COPY --from=build --chown=65532:65532 /out/state /var/lib/iser-target
USER 65532:65532
VOLUME /var/lib/iser-target
EXPOSE 3260
ENTRYPOINT ["/iser-target"]
# The configuration is mounted; examples/nat.yaml shows what advertise is for
# when the port is forwarded.
CMD ["serve", "--config", "/etc/iser-target/config.yaml"]

# docker build --build-arg VERSION=1.2.3 -t iser-target .
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=
RUN CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /out/iser-target ./cmd/iser-target \
 && mkdir -p /out/state

# Only the binary, and a directory that its user may write to.
FROM scratch
COPY --from=build /out/iser-target /iser-target
COPY --from=build --chown=65532:65532 /out/state /var/lib/iser-target
USER 65532:65532
VOLUME /var/lib/iser-target
EXPOSE 3260
# On the volume, because the root file system may be read-only.
ENV ISER_TARGET_CONTROL_SOCKET=/var/lib/iser-target/control.sock
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s CMD ["/iser-target", "portal", "list"]
ENTRYPOINT ["/iser-target"]
# Mount the configuration. examples/nat.yaml shows advertise for a forwarded port.
CMD ["serve", "--config", "/etc/iser-target/config.yaml"]

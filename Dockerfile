# docker build --build-arg VERSION=1.2.3 -t iser-target .
# The base has a tag and no digest, so that a build gets the repairs of Go 1.26 and Debian; nothing of it but the CA certificates is in the image. For a
# build that can be repeated, name a digest: docs/service.md, "Container".
ARG GO_IMAGE=golang:1.26-bookworm
# The first stage runs on the machine that builds, and compiles for the platform of the image.
FROM --platform=$BUILDPLATFORM ${GO_IMAGE} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=
ARG TARGETOS
ARG TARGETARCH
RUN CGO_ENABLED=0 GOOS=${TARGETOS} GOARCH=${TARGETARCH} go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /out/iser-target ./cmd/iser-target \
 && mkdir -p /out/state \
 && cp /etc/ssl/certs/ca-certificates.crt /out/ca-certificates.crt

# Only the binary, the CA certificates by which its commands trust other targets, and a directory that its user may write to.
FROM scratch
ARG VERSION=
ARG REVISION=
LABEL org.opencontainers.image.title="iser-target"
LABEL org.opencontainers.image.description="iSER and iSCSI target in user space"
LABEL org.opencontainers.image.source="https://github.com/iser-target/iser-target"
LABEL org.opencontainers.image.licenses="Apache-2.0"
LABEL org.opencontainers.image.documentation="https://github.com/iser-target/iser-target/tree/main/docs"
LABEL org.opencontainers.image.version="${VERSION}"
LABEL org.opencontainers.image.revision="${REVISION}"
COPY --from=build /out/iser-target /iser-target
COPY --from=build /out/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
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

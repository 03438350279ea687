#!/bin/bash
# Builds static programs, and packages of them, for each architecture:
#
#   build.sh DIRECTORY [VERSION]
#
# VERSION is that of the newest tag by default, or one that grows with the time of the
# commit. ARCHES (amd64 arm64) and FORMATS (deb rpm) choose. The same commit gives the
# same bytes.
set -euo pipefail

if [ $# -lt 1 ]; then
	sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" >&2
	exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
go=${GO:-go}

commit_time=$(git log -1 --format=%ct 2>/dev/null || echo 0)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$commit_time}
version=${2:-}
if [ -z "$version" ]; then
	version=$(git describe --tags --match 'v[0-9]*' 2>/dev/null | sed 's/^v//;s/-\([0-9]*\)-g/+\1.g/' || true)
fi
if [ -z "$version" ]; then
	version="0.0.0~git$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y%m%d%H%M%S).$(git rev-parse --short=7 HEAD)"
fi
if ! [[ $version =~ ^[0-9][0-9A-Za-z.+~]*$ ]]; then
	echo "build.sh: VERSION must begin with a digit, and have only letters, digits, '.', '+' and '~' besides, not \"$version\"" >&2
	exit 2
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
export PACKAGE_VERSION=$version PACKAGE_ROOT=$root

# What the packages of all architectures share.
CGO_ENABLED=0 $go run -trimpath ./cmd/iser-target docs "$root"
find "$root/man" -name '*.[158]' -exec gzip -9n {} +
gzip -9nc CHANGELOG.md >"$root/changelog.gz"
{
	printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: iser-target\nSource: https://github.com/iser-target/iser-target\n\nFiles: *\nCopyright: iser-target developers\nLicense: Apache-2.0\n'
	sed 's/^$/./;s/^/ /' LICENSE
} >"$root/copyright"

for arch in ${ARCHES:-amd64 arm64}; do
	CGO_ENABLED=0 GOOS=linux GOARCH=$arch $go build -trimpath -ldflags "-s -w -X main.version=$version" -o "$root/iser-target" ./cmd/iser-target
	install -m 0755 "$root/iser-target" "$out/iser-target-linux-$arch"
	for format in ${FORMATS:-deb rpm}; do
		PACKAGE_ARCH=$arch $go tool -modfile=packaging/nfpm.mod nfpm package --config packaging/nfpm.yaml --packager "$format" --target "$out"
	done
done

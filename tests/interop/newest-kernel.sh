#!/bin/bash
# Makes a machine for TestAtomic in the directory $1: that of setup.sh, which must
# exist, with the newest kernel of Debian's backports. Debian 12 has Linux 6.1, and
# RWF_ATOMIC exists since 6.11, for ext4 and XFS since 6.13.
#
# The lists and settings of apt on this machine stay as they are. What is downloaded,
# 120 MB, stays in $1 until the suite has a newer kernel.
set -Eeuo pipefail

suite=trixie-backports
dir=$1
base=${ISER_TARGET_VM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/iser-target/vm}/current
modules=(virtio_pci 9p 9pnet_virtio overlay) # for the root file system

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
work=$(mktemp -d "$dir/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/initrd/modules"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Codename: bookworm' | head -n 1) # of this machine
: "${mirror:?no package lists of Debian 12: apt-get update}"
echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/sources.list"
export APT_CONFIG=$work/apt.conf
cat >"$APT_CONFIG" <<.
Dir::Etc::SourceList "$work/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "$work/lists";
Dir::Cache "$work/cache";
APT::Sandbox::User "root";
Acquire::Retries "5";
.

apt-get -qq update
image=$(apt-cache pkgnames linux-image- | grep -xE 'linux-image-[0-9.]+\+deb13-amd64' | sort -V | tail -n 1)
release=${image#linux-image-}
initrd=$(sha256sum <"$base/initrd.img" | cut -c 1-12)
name=$release-$initrd
if [ -e "$dir/$name/done" ]; then
	ln -sfn "$name" "$dir/current"
	echo "$dir/current is $name"
	exit 0
fi

# Image and modules are one package up to Linux 6.18, and several since.
packages=("$image")
for p in "linux-binary-$release" "linux-modules-$release" "linux-base-$release"; do
	if apt-cache show "$p" >/dev/null 2>&1; then packages+=("$p"); fi
done
echo "downloading ${packages[*]}"
(cd "$work" && apt-get -qq download "${packages[@]}")
for deb in "$work"/*.deb; do
	dpkg-deb -x "$deb" "$work/root"
done
mkdir "$work/out"
mv "$(find "$work/root" -name "vmlinuz*$release" -o -path "*/modules/$release/vmlinuz" | head -n 1)" "$work/out/vmlinuz"
mkdir "$work/out/lib"
mv "$(find "$work/root" -type d -path '*/lib/modules')" "$work/out/lib/"
depmod -b "$work/out" "$release"

# The kernel unpacks both archives, and the second one replaces the modules of the first.
modprobe -d "$work/out" -S "$release" --show-depends -a "${modules[@]}" | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$work/order"
while read -r ko; do
	module=$(basename "$ko" .xz)
	xz -dc "$ko" >"$work/initrd/modules/$module"
	echo "$module" >>"$work/initrd/modules/order"
done <"$work/order"
{
	cat "$base/initrd.img"
	cd "$work/initrd"
	find . | cpio -o -H newc --quiet | gzip -1
} >"$work/out/initrd.img"
touch "$work/out/done"
rm -rf "${dir:?}/$name"
mv "$work/out" "$dir/$name"
ln -sfn "$name" "$dir/current"
for old in "$dir"/[0-9]*; do
	[ "$old" = "$dir/$name" ] || rm -rf "$old"
done
echo "$dir/current is $name"

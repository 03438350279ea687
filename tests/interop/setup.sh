#!/bin/bash
# Prepares a Debian 12 machine for the interop tests: installs what they call,
# and makes the virtual machine they boot. Needs root, Go, gcc and the network.
#
#   setup.sh            installs and builds what is missing or out of date
#   setup.sh --check    only tells (exit status 1) whether something is
#
# The machine lies in $ISER_TARGET_VM_DIR, by default
# ${XDG_CACHE_HOME:-$HOME/.cache}/iser-target/vm:
#
#   current -> KERNEL-HASH      replaced last, so it always names a whole one
#   KERNEL-HASH/vmlinuz         Debian's newest linux-image-6.1
#   KERNEL-HASH/initrd.img      busybox, the modules for the root, guest/init
#   KERNEL-HASH/lib/modules/    Debian's modules, and siw.ko, built here:
#                               Debian leaves CONFIG_RDMA_SIW off
#   KERNEL-HASH/seccomp.json    the filter that container engines set by default
#
# Nothing of the kernel is installed on the machine itself, and no daemon is
# started on it.
set -Eeuo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${ISER_TARGET_VM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/iser-target/vm}

# What the tests call on the host and, because the guest's root is the host's,
# in the guest; and what the build of one kernel module needs.
packages=(
	qemu-system-x86 busybox-static cpio kmod xz-utils util-linux
	open-iscsi rdma-core libibverbs1 ibverbs-providers ibverbs-utils rdmacm-utils perftest rpm qemu-user libiscsi-bin
	chromium fio e2fsprogs xfsprogs btrfs-progs sg3-utils ddpt sdparm multipath-tools udev systemd crun iproute2 ethtool tcpdump tshark nfs-kernel-server nfs-common
	ansible-core python3-apt strongswan-swanctl charon-systemd libstrongswan-standard-plugins nftables tgt qemu-block-extra qemu-utils nbdkit prometheus etcd-server
	lvm2 thin-provisioning-tools
	make gcc-12 bc flex bison libelf1
)

# The modules the initramfs needs to reach the root file system; the others
# are loaded from there.
root_modules=(virtio_pci 9p 9pnet_virtio overlay)

step=start
say() { printf 'setup: %s\n' "$*"; }
fail() {
	printf 'setup: %s failed (line %s)\n' "$step" "${1:-?}" >&2
	if [ -n "${log:-}" ] && [ -s "$log" ]; then
		printf 'setup: the end of %s:\n' "$log" >&2
		tail -n 40 "$log" >&2
	fi
	exit 1
}
trap 'fail $LINENO' ERR

# quietly runs a command with its output in $log, which fail shows.
quietly() { "$@" >>"$log" 2>&1; }

missing_packages() {
	local p
	for p in "${packages[@]}"; do
		case $(dpkg-query -W -f '${db:Status-Abbrev}' "$p" 2>/dev/null || true) in
		ii*) ;;
		*) printf '%s\n' "$p" ;;
		esac
	done
}

# newest_kernel prints package and version of the newest linux-image-6.1 whose
# headers and source apt knows as well, or nothing where apt has no lists.
newest_kernel() {
	local image release version
	for image in $(apt-cache pkgnames linux-image-6.1. |
		grep -xE 'linux-image-6\.1\.[0-9]+-[0-9]+-amd64' | sort -rV); do
		release=${image#linux-image-}
		version=$(apt-cache policy "$image" | awk '$1 == "Candidate:" && $2 != "(none)" { print $2 }')
		if [ -n "$version" ] && apt-cache show "linux-headers-$release=$version" \
			"linux-headers-${release%-amd64}-common=$version" "linux-source-6.1=$version" >/dev/null 2>&1; then
			printf '%s %s\n' "$image" "$version"
			return
		fi
	done
}

# name_of prints the directory name for kernel package $1, version $2: it
# changes with all that goes into the machine.
name_of() {
	local hash
	hash=$(cat "$here/setup.sh" "$here/vm/guest/init" | sha256sum | cut -c 1-12)
	printf '%s_%s_%s' "${1#linux-image-}" "$2" "$hash"
}

whole() {
	[ -s "$1/vmlinuz" ] && [ -s "$1/initrd.img" ] && [ -s "$1/seccomp.json" ] && [ -e "$1/done" ] &&
		compgen -G "$1/lib/modules/*/extra/siw.ko" >/dev/null
}

# up_to_date succeeds when nothing is to do, otherwise prints what is.
up_to_date() {
	local lacking kernel name current
	lacking=$(missing_packages)
	if [ -n "$lacking" ]; then
		say "not installed:" $lacking
		return 1
	fi
	current=$(readlink "$dir/current" || true)
	if [ -z "$current" ] || ! whole "$dir/$current"; then
		say "no machine in $dir"
		return 1
	fi
	kernel=$(newest_kernel)
	if [ -n "$kernel" ]; then
		# shellcheck disable=SC2086
		name=$(name_of $kernel)
	else # apt's lists are gone, as in a container image: only ours can be out of date
		name=${current%_*}_$(name_of x y | sed 's/.*_//')
	fi
	if [ "$current" != "$name" ]; then
		say "the machine is $current, wanted is $name"
		return 1
	fi
}

if up_to_date; then
	say "nothing to do: $dir/current is $(readlink "$dir/current")"
	exit 0
fi
[ "${1:-}" != --check ] || exit 1

step="check for root"
if [ "$(id -u)" != 0 ]; then
	say "must run as root to install packages" >&2
	exit 1
fi
step="making $dir"
mkdir -p "$dir"
exec 9>"$dir/lock"
flock 9 # another setup may be at work; then nothing is left to do
if up_to_date >/dev/null; then
	say "done by another setup"
	exit 0
fi

log=$dir/setup.log
: >"$log"
build=$(mktemp -d "$dir/build.XXXXXX")
policy=/usr/sbin/policy-rc.d
policy_is_ours=
cleanup() {
	rm -rf "$build"
	if [ -n "$policy_is_ours" ]; then rm -f "$policy"; fi
}
trap cleanup EXIT

export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
apt() { quietly apt-get -q -y -o Acquire::Retries=5 -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=300 "$@"; }

step="apt-get update"
say "$step"
apt update

lacking=$(missing_packages)
if [ -n "$lacking" ]; then
	step="installing packages"
	say "$step:" $lacking
	# Installing open-iscsi, rdma-core, strongSwan, tgt and etcd must not start anything here, now or
	# at the next boot. What was there before is left as it was.
	if [ ! -e "$policy" ]; then
		policy_is_ours=yes
		printf '#!/bin/sh\nexit 101\n' >"$policy"
		chmod 755 "$policy"
	fi
	# shellcheck disable=SC2086
	apt install --no-install-recommends $lacking
	if grep -qx open-iscsi <<<"$lacking" && [ -d /run/systemd/system ]; then
		quietly systemctl disable --now iscsid.socket iscsid.service open-iscsi.service || true
	fi
	if grep -qx charon-systemd <<<"$lacking" && [ -d /run/systemd/system ]; then
		quietly systemctl disable --now strongswan.service || true
	fi
	if grep -qx tgt <<<"$lacking" && [ -d /run/systemd/system ]; then
		quietly systemctl disable --now tgt.service || true
	fi
	if grep -qx etcd-server <<<"$lacking" && [ -d /run/systemd/system ]; then
		quietly systemctl disable --now etcd.service || true
	fi
	if [ -n "$policy_is_ours" ]; then
		rm -f "$policy"
		policy_is_ours=
	fi
fi

step="looking for a kernel in apt's lists"
read -r image version < <(newest_kernel) || true
if [ -z "${image:-}" ]; then
	say "apt knows no linux-image-6.1.*-amd64 with its headers and source; Debian 12 with its security updates is needed" >&2
	exit 1
fi
release=${image#linux-image-} # 6.1.0-56-amd64, as uname -r
abi=${release%-amd64}
name=$(name_of "$image" "$version")
out=$build/out
mkdir "$out"

# The headers and the source must be those of the image, to the letter. The tools of
# linux-kbuild may be newer, as the headers' dependency on them says: Debian publishes
# those of the next version before its image is signed.
step="downloading $image $version, its headers and its source"
say "$step"
cd "$build"
apt download golang-github-containers-common \
	"$image=$version" \
	"linux-headers-$release=$version" \
	"linux-headers-$abi-common=$version" \
	linux-kbuild-6.1 \
	"linux-source-6.1=$version"

step="unpacking $image"
say "$step"
quietly dpkg-deb -x "$build/${image}_"*.deb "$build/image"
mv "$build/image/boot/vmlinuz-$release" "$out/vmlinuz"
mv "$build/image/lib" "$out/lib"

# The package would have the network plugins of an engine installed.
step="unpacking seccomp.json"
quietly dpkg-deb -x "$build"/golang-github-containers-common_*.deb "$build/containers"
mv "$build/containers/usr/share/containers/seccomp.json" "$out/"

step="unpacking the kernel headers"
say "$step"
for p in linux-headers linux-kbuild; do
	for deb in "$build/$p"-*.deb; do
		quietly dpkg-deb -x "$deb" "$build/headers"
	done
done
headers=$build/headers/usr/src/linux-headers-$release
# The packages name each other by absolute paths.
sed -i "s,/usr/src/,$build/headers/usr/src/,g" "$headers/Makefile"
for link in scripts tools; do
	for d in "$build"/headers/usr/src/linux-headers-*; do
		if [ -L "$d/$link" ]; then
			ln -sfn "$build/headers/usr/lib/linux-kbuild-6.1/$link" "$d/$link"
		fi
	done
done

step="unpacking siw from linux-source-6.1"
say "$step"
quietly dpkg-deb -x "$build/linux-source-6.1_"*.deb "$build/source"
siw=$build/linux-source-6.1/drivers/infiniband/sw/siw
quietly tar -C "$build" -xf "$build/source/usr/src/linux-source-6.1.tar.xz" \
	linux-source-6.1/drivers/infiniband/sw/siw

step="building siw.ko"
say "$step"
quietly make -C "$headers" M="$siw" CONFIG_RDMA_SIW=m CC=gcc-12 modules
mkdir "$out/lib/modules/$release/extra"
mv "$siw/siw.ko" "$out/lib/modules/$release/extra/"

step="running depmod"
quietly depmod -b "$out" "$release"

step="making the initramfs"
say "$step"
initrd=$build/initrd
mkdir -p "$initrd/bin" "$initrd/modules"
cp /bin/busybox "$initrd/bin/"
cp "$here/vm/guest/init" "$initrd/init"
chmod 755 "$initrd/init"
# modprobe lists the modules in the order in which they must be loaded.
for m in "${root_modules[@]}"; do
	modprobe -d "$out" -S "$release" --show-depends "$m"
done 2>>"$log" | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$build/order"
while read -r ko; do
	cp "$ko" "$initrd/modules/"
	basename "$ko" >>"$initrd/modules/order"
done <"$build/order"
(cd "$initrd" && find . | cpio -o -H newc --quiet | gzip -1) >"$out/initrd.img" 2>>"$log"

step="putting the machine into place"
printf '%s %s\n' "$image" "$version" >"$out/done"
rm -rf "${dir:?}/$name"
mv "$out" "$dir/$name"
ln -s "$name" "$build/current"
mv -T "$build/current" "$dir/current"
for old in "$dir"/6.1.*; do
	[ "$old" = "$dir/$name" ] || rm -rf "$old"
done
say "done: $dir/current is $name"

#!/bin/bash
# Builds (once) a User-Mode Linux kernel with Soft-RoCE from Debian's kernel source and prints its path.
# Needs gcc, make, bc, xz and Debian's archive; installs nothing. About 1.9 GB of scratch space while it runs.
# Two runs at a time are fine: the second waits for the first.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${RDMA_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pdctl/rdma-vm}
src=linux-source-6.12
recipe=2                                        # raise it when what is done below changes the kernel
key=$({ echo $src $recipe; cat "$here/uml.config"; } | sha256sum | cut -c1-12)
out=$cache/linux-$key
if [ -x "$out" ]; then echo "$out"; exit; fi

mkdir -p "$cache"
exec 9> "$cache/lock"
flock 9
if [ -x "$out" ]; then echo "$out"; exit; fi
exec 3>&1 1>&2                                  # only the path goes to stdout
work=$(mktemp -d "$cache/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
chmod 755 .
apt-cache show $src > /dev/null 2>&1 || apt-get update
tools=
for t in flex bison; do command -v $t > /dev/null || tools=yes; done
apt-get -q download $src ${tools:+flex bison m4 libfl2 libsigsegv2}
mkdir x
for f in *.deb; do dpkg -x "$f" x; done
if [ -n "$tools" ]; then                        # unpacked beside the source, not installed
  export PATH=$work/x/usr/bin:$PATH M4=$work/x/usr/bin/m4
  export BISON_PKGDATADIR=$work/x/usr/share/bison LD_LIBRARY_PATH=$work/x/usr/lib/x86_64-linux-gnu
fi
tar xf x/usr/src/$src.tar.xz
cd $src
# Room for a process's registers: 2,696 bytes are too few on a CPU with AMX, where the guest then dies at once.
registers=arch/x86/um/user-offsets.c
sed -i 's/HOST_FP_SIZE, 2696/HOST_FP_SIZE, 12288/' $registers
grep -q 'HOST_FP_SIZE, 12288' $registers || { echo "$registers is not as expected"; exit 1; }
make -s ARCH=um KCONFIG_ALLCONFIG="$here/uml.config" allnoconfig
for option in RDMA_RXE INFINIBAND_USER_ACCESS HOSTFS OVERLAY_FS VETH NET_SCH_NETEM; do
  grep -q "^CONFIG_$option=y" .config || { echo "CONFIG_$option did not stick"; exit 1; }
done
make -s ARCH=um -j"$(nproc)" linux > "$cache/build.log" 2>&1 || { tail -30 "$cache/build.log"; exit 1; }
strip -o "$out.tmp" linux
mv "$out.tmp" "$out"
echo "$out" >&3

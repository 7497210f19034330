#!/bin/bash
# Installs what the guest and its kernel's build need, with apt as root. Where that may not be, or the guest cannot
# run, says why on stdout and exits with status 1.
set -u
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "the guest is for Linux on x86-64"; exit 1; }
[ "$(id -u)" -eq 0 ] || { echo "the guest needs root"; exit 1; }
command -v apt-get > /dev/null || { echo "the guest's kernel is built from Debian's source, and there is no apt-get"; exit 1; }

missing=()
need() { # PROGRAM-OR-FILE PACKAGE
  command -v "$1" > /dev/null || [ -e "$1" ] || missing+=("$2")
}
need gcc gcc
need make make
need bc bc
need xz xz-utils
need ip iproute2
need ib_write_bw perftest
need /usr/lib/x86_64-linux-gnu/libibverbs.so.1 libibverbs1
need /usr/lib/x86_64-linux-gnu/libibverbs ibverbs-providers
[ "${#missing[@]}" -eq 0 ] && exit 0
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -q && apt-get install -y -q --no-install-recommends "${missing[@]}"; } >&2 && exit 0
echo "not installed: ${missing[*]}"
exit 1

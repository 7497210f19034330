#!/bin/bash
# Unpacks (once) Debian's pyverbs and prints the folder to put on PYTHONPATH, with nothing else in it. Prints an
# empty line where this Python is another version than Debian's own. Installs nothing.
set -euo pipefail
cache=${RDMA_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pdctl/rdma-vm}
if [ "$(python3 -c 'import sys; print(sys.version_info[:2])')" != "$(/usr/bin/python3 -c 'import sys; print(sys.version_info[:2])')" ]; then
  echo
  exit
fi
out=$cache/pyverbs
if [ ! -d "$out" ]; then
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/pyverbs.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  cd "$work"
  { apt-cache show python3-pyverbs > /dev/null 2>&1 || apt-get update; apt-get -q download python3-pyverbs; } >&2
  dpkg -x python3-pyverbs_*.deb x
  mkdir only
  mv x/usr/lib/python3/dist-packages/pyverbs only/
  mv -T only "$out" 2> /dev/null || [ -d "$out" ]
fi
echo "$out"

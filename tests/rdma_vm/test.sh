#!/bin/bash
# test.sh PYTHON [PYTEST-ARGUMENT...]   every test of real verbs, in one run of the guest.
# test.sh --bench PYTHON                the transport beside ib_write_bw.
set -u
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.." || exit 1
bench=
[ "$1" = --bench ] && { bench=yes; shift; }
python=$1
shift
if ! why=$("$here/prepare.sh"); then
  echo "real RDMA verbs skipped: $why"
  exit 0
fi
export PATH=$(dirname "$(realpath -s "$python")"):$PATH
[ -z "$bench" ] || exec "$here/run.sh" -m 2G "$python" tests/bench/rdma.py
[ $# -gt 0 ] || set -- tests/contract tests/transfer tests/rdma_vm
exec "$here/run.sh" -m 3G -t 1500 "$python" -m pytest -m rdma -p no:cacheprovider -o timeout=300 "$@"

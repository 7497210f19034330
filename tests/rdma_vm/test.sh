#!/bin/bash
# test.sh PYTHON [PYTEST-ARGUMENT...]   every test of real verbs, in one run of the guest.
set -u
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.." || exit 1
python=$1
shift
if ! why=$("$here/prepare.sh"); then
  echo "tests of RDMA skipped: $why"
  exit 0
fi
export PATH=$(dirname "$(realpath -s "$python")"):$PATH
[ $# -gt 0 ] || set -- tests/contract tests/transfer tests/rdma_vm
exec "$here/run.sh" -m 3G -t 1500 "$python" -m pytest -m rdma -p no:cacheprovider "$@"

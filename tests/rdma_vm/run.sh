#!/bin/bash
# run.sh [-m MEMORY] [-t SECONDS] COMMAND...
#
# Runs COMMAND, in this directory, in a User-Mode Linux guest with two Soft-RoCE devices: rxa (10.77.1.1) and
# rxb (10.77.1.2), joined by a veth pair. The guest sees this machine's files as they are, and what it writes is
# thrown away, except in $RDMA_OUT (/out in the guest). Needs root, ptrace, libibverbs and iproute2.
# Exit status: the command's own; 124 it timed out; 125 the guest did not start, or died.
set -u
here=$(cd "$(dirname "$0")" && pwd)
memory=2G limit=600
while getopts m:t: option; do
  case $option in
    m) memory=$OPTARG ;;
    t) limit=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))

kernel=$("$here/build_kernel.sh") || exit 125
pyverbs=$("$here/pyverbs.sh") || exit 125       # empty: this Python cannot load Debian's
out=${RDMA_OUT:-$(mktemp -d)}
mkdir -p "$out"
rm -f "$out"/{status,log,console}
: > "$out/log"
{
  printf 'export PATH=%q HOME=%q PYTHONPATH=%q\n' "$PATH" "$HOME" "$pyverbs${PYTHONPATH:+:$PYTHONPATH}"
  printf 'export RDMA_VM=1 RDMA_VM_PYVERBS=%q PYTHONDONTWRITEBYTECODE=1\n' "$pyverbs"
  printf '. %q || exit 125\n' "$here/two_hosts.sh"
  printf 'cd %q || exit 125\nexec' "$PWD"
  printf ' %q' "$@"
  echo
} > "$out/command.sh"

shm=/dev/shm                                    # the guest's memory is a file in TMPDIR
[ -w $shm ] || shm=/tmp
cpu=$(taskset -cp $$ | sed 's/.*[ ,-]//')       # on one core: unpinned, the guest is about ten times slower
tail -n +1 -f -s 0.2 "$out/log" &
tail=$!
TMPDIR=$shm taskset -c "$cpu" timeout -k 5 "$limit" "$kernel" mem="$memory" \
  root=/dev/root rootfstype=hostfs rootflags=/ ro quiet init=/bin/bash OUT="$out" \
  con=null con0=null,fd:1 -- "$here/guest_init.sh" < /dev/null > "$out/console" 2>&1
guest=$?
sleep 0.3
kill $tail
wait $tail 2> /dev/null

if [ -s "$out/status" ]; then
  status=$(cat "$out/status")
else
  status=125
  [ $guest = 124 ] && status=124
  echo "run.sh: the guest ended with status $guest; its console says:" >&2
  tail -25 "$out/console" >&2
fi
[ -n "${RDMA_OUT:-}" ] || rm -rf "$out"
exit "$status"

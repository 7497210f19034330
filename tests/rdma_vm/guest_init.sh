#!/bin/bash
# First process of the guest. Its root is the machine's own, read-only through hostfs; a tmpfs laid over it takes
# what is written. OUT comes from the kernel's command line.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

power_off() { sync; echo o > /proc/sysrq-trigger; sleep 9; }
die() { echo "guest_init: $*"; power_off; }

mount -t proc proc /proc
mount -t tmpfs tmp /mnt || die "no tmpfs"
mkdir /mnt/machine /mnt/upper /mnt/work /mnt/root
mount -t hostfs -o ro none /mnt/machine || die "no hostfs"
mount -t overlay -o lowerdir=/mnt/machine,upperdir=/mnt/upper,workdir=/mnt/work root /mnt/root || die "no overlay"

root=/mnt/root
mkdir -p $root/proc $root/sys $root/dev $root/run $root/out
mount -t proc proc $root/proc
mount -t sysfs sys $root/sys
mount -t devtmpfs dev $root/dev
mkdir -p $root/dev/shm $root/dev/pts
mount -t tmpfs shm $root/dev/shm
mount -t devpts -o ptmxmode=666 pts $root/dev/pts
mount -t tmpfs run $root/run
mount -t hostfs -o "$OUT" none $root/out || die "no hostfs for $OUT"
ln -sf pts/ptmx $root/dev/ptmx
ln -sf /proc/self/fd $root/dev/fd
for stream in stdin:0 stdout:1 stderr:2; do ln -sf /proc/self/fd/${stream#*:} $root/dev/${stream%:*}; done

chroot $root /bin/bash /out/command.sh > $root/out/log 2>&1 < /dev/null
echo $? > $root/out/status
power_off

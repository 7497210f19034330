# Sourced in the guest. Two "hosts": Soft-RoCE devices rxa (10.77.1.1) and rxb (10.77.1.2) on the ends of a veth
# pair, in one network namespace, as Soft-RoCE listens in the first one only. The rules keep what goes to our own two
# addresses off the loopback device: it crosses the pair, where tests delay, drop and cut it.
[ -e /proc/sys/kernel/printk ] && echo 3 > /proc/sys/kernel/printk
ip link set lo up
ip link add va type veth peer name vb
ip addr add 10.77.1.1/24 dev va
ip addr add 10.77.1.2/24 dev vb
ip link set va mtu 4200 up                      # room for RDMA's largest packets, 4096 bytes
ip link set vb mtu 4200 up
for name in all va vb; do
  echo 0 > /proc/sys/net/ipv4/conf/$name/rp_filter
  echo 1 > /proc/sys/net/ipv4/conf/$name/accept_local
done
ip rule add pref 100 lookup local
ip rule del pref 0
ip rule add pref 10 iif lo to 10.77.1.2 lookup 10
ip route add 10.77.1.2 dev va src 10.77.1.1 table 10
ip rule add pref 11 iif lo to 10.77.1.1 lookup 11
ip route add 10.77.1.1 dev vb src 10.77.1.2 table 11
rdma link add rxa type rxe netdev va
rdma link add rxb type rxe netdev vb
for device in rxa rxb; do                       # the IPv4 GID comes a moment later
  for _ in $(seq 100); do
    grep -q ffff:0a4d /sys/class/infiniband/$device/ports/1/gids/1 && break
    sleep 0.05
  done
done

"""What runs on the hosts: router, worker front, engine core. Knows nothing of pdctl or SSH."""

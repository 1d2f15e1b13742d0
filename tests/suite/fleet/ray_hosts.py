"""A Ray cluster of several hosts on this machine, on the loopback interface; each has one logical GPU.

    python ray_hosts.py N

Prints its address; then a line of input with a host's number ends that host at once. The end of input ends all.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

LOOPBACK = "127.0.0.2"  # 127.0.0.1 is what a driver takes for its own outward address
head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": LOOPBACK, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args=head)
hosts = [
    cluster.add_node(
        num_cpus=1,
        num_gpus=1,
        node_name=f"host{i}",
        node_ip_address=LOOPBACK,
        resources={"host_exclusive": 1},
        object_store_memory=80 << 20,
    )
    for i in range(int(sys.argv[1]))
]
print(f"address {cluster.address}", flush=True)
for line in sys.stdin:
    cluster.remove_node(hosts[int(line)], allow_graceful=False)
    print("ended", flush=True)
cluster.shutdown()

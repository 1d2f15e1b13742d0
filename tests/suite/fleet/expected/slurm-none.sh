#!/bin/bash
exec /py -P -m kernelmark.suite.fleet.task '/shared/my home/fleet/r1/order.json' --into '/shared/my home/fleet/r1/deliveries' --shard "$SLURM_ARRAY_TASK_ID" --node "$SLURMD_NODENAME"

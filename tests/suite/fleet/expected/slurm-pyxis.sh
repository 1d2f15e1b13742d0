#!/bin/bash
export KERNELMARK_IMAGE_DIGEST=sha256:0000000000000000000000000000000000000000000000000000000000000000
exec srun '--container-image=registry.example:5000#kernelmark/h100@sha256:0000000000000000000000000000000000000000000000000000000000000000' '--container-mounts=/shared/my home/fleet/r1:/shared/my home/fleet/r1' --no-container-mount-home /py -P -m kernelmark.suite.fleet.task '/shared/my home/fleet/r1/order.json' --into '/shared/my home/fleet/r1/deliveries' --shard "$SLURM_ARRAY_TASK_ID" --node "$SLURMD_NODENAME"

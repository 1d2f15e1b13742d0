#!/bin/bash
export APPTAINERENV_KERNELMARK_IMAGE_DIGEST=sha256:0000000000000000000000000000000000000000000000000000000000000000
exec apptainer exec --nv --containall --bind '/shared/my home/fleet/r1:/shared/my home/fleet/r1' docker://registry.example:5000/kernelmark/h100@sha256:0000000000000000000000000000000000000000000000000000000000000000 /py -P -m kernelmark.suite.fleet.task '/shared/my home/fleet/r1/order.json' --into '/shared/my home/fleet/r1/deliveries' --shard "$SLURM_ARRAY_TASK_ID" --node "$SLURMD_NODENAME"

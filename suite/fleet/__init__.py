"""One run over many machines. An engine brings shards to hosts; nothing here schedules, queues or transports.

The task is always `kernelmark run --shard i/n` (`task.py`). Delivery is at least once: what comes back is checked
by its hash and taken in once (`collect.py`), and what is missing is asked for again (`drive.py`).
"""

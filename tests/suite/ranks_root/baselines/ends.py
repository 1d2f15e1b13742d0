"""Sums over ranks whose last rank ends in every way there is, in every stage."""

import os
import signal
import sys
import time

import torch.distributed as dist

REQUIRES = ("torch",)
STAGES = {
    "verify": "verify",
    "warm_up": "warm_up",
    "sample": "sample",
    "verify_again": "verify_again",
}


def total(x):
    out = x.clone()
    dist.all_reduce(out)
    return out


def last():
    return dist.get_rank() == dist.get_world_size() - 1


def inside(name, frame):
    while frame is not None:
        code = frame.f_code
        if code.co_name == name and code.co_filename.endswith("measure/stages.py"):
            return True
        frame = frame.f_back
    return False


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def in_stage(name, act):
    """Acts when a call is made in that stage; "build": before any; "gather": while ranks' inputs are gathered."""

    def factory(case):
        if last() and name == "build":
            act()
        if last() and name == "gather":
            dist.all_gather = lambda *arguments, **named: act()

        def call(x):
            if last() and name in STAGES and inside(STAGES[name], sys._getframe()):
                act()
            return total(x)

        return call

    return factory


def fails_after_warm_up(case):
    def call(x):
        out = total(x)
        if last() and inside("warm_up", sys._getframe()):
            fail()
        return out

    return call


def sleep():
    time.sleep(600)


def fail():
    raise ValueError("no such luck")


def of(call):
    return lambda case: call


def skips(x):
    out = total(x)
    if last():
        out[-8:] = x[-8:]
    return out


def refuses(case):
    if last():
        raise NotImplementedError("only on Sundays")
    return total


IMPLEMENTATIONS = {
    "total": {
        "plain": of(total),
        "skips": of(skips),
        "refuses": refuses,
        **{f"killed_in_{x}": in_stage(x, kill) for x in ("build", "gather", *STAGES)},
        **{f"hangs_in_{x}": in_stage(x, sleep) for x in ("build", *STAGES)},
        "fails_after_warm_up": fails_after_warm_up,
        "fails_in_sample": in_stage("sample", fail),
    }
}

"""Sums over ranks of which one ends in every way there is, in every stage: the last, and where killed any."""

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
    return is_it("last")


def is_it(which):
    """Whether this rank is the first, the middle one or the last."""
    world = dist.get_world_size()
    return dist.get_rank() == {"first": 0, "middle": world // 2, "last": world - 1}[which]


def inside(name, frame):
    while frame is not None:
        code = frame.f_code
        if code.co_name == name and code.co_filename.endswith("measure/stages.py"):
            return True
        frame = frame.f_back
    return False


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def in_stage(name, act, which="last"):
    """A rank acts when a call is made in that stage; "build": before any; "gather": while inputs are gathered."""

    def factory(case):
        if is_it(which) and name == "build":
            act()
        if is_it(which) and name == "gather":
            dist.all_gather = lambda *arguments, **named: act()

        def call(x):
            if is_it(which) and name in STAGES and inside(STAGES[name], sys._getframe()):
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
        **{
            f"{which}_killed_in_{x}": in_stage(x, kill, which)
            for which in ("first", "middle", "last")
            for x in ("build", "gather", *STAGES)
        },
        **{f"hangs_in_{x}": in_stage(x, sleep) for x in ("build", *STAGES)},
        "fails_after_warm_up": fails_after_warm_up,
        "fails_in_sample": in_stage("sample", fail),
    }
}

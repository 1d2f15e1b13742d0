"""The same servers measured by kernelmark, guidellm, AIPerf and vLLM's client in turns: what each says of them.

    python tests/serving/agreement.py FOLDER RECORD [ROUNDS]

FOLDER holds the packages of each tool in a folder of its name, as `pip install --target` leaves them: `guidellm`,
`aiperf`, `vllm`; one that is not there is left out. RECORD (JSON) gets every request's times; `docs/serving.py`
makes a table of it. ROUNDS (default 5) is how often all of them are run on each server and load. Run by
`make agreement`; about a quarter of an hour, and more on a machine that has other work.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import servers
from kernelmark.registry.importers import formats
from kernelmark.suite.workloads._serving import latencies
from kernelmark.suite.workloads._serving.children import Clients, Running
from kernelmark.suite.workloads._serving.load import Load
from kernelmark.suite.workloads._serving.messages import Planted, Seen, Task

INPUT, OUTPUT = 32, 16
REQUESTS = 60
WARM = 6
"""Requests before each load, of which no tool reports anything."""
USERS, RATE = 2, 6
LOADS = {
    "closed": Load("closed", 0.0, USERS, REQUESTS, INPUT, OUTPUT, "fixed", servers.VOCABULARY - 1),
    "constant": Load("constant", float(RATE), 0, REQUESTS, INPUT, OUTPUT, "fixed", servers.VOCABULARY - 1),
}
PLAN = Planted(first_ms=200, token_ms=20)
SERVERS: Mapping[str, Callable[[], Running]] = {
    "planted": lambda: servers.planted(PLAN),
    "model": servers.small,
}
TIMEOUT_S = 300

Times = dict[str, list[float]]
"""By name of a time, ms of each request."""
Tool = Callable[[Path, Running, str, Path], Times]


def ours(server: Running, load: Load, seed: int) -> Times:
    """By the client and the definitions of the workload `serve`."""
    asked = load.draw(seed)
    begin = time.monotonic_ns() + 1_000_000_000
    task = Task(
        server.host, server.port, server.path, server.model, asked, load.users, begin, 60.0, 120.0, server.words,
        dict(server.extra),
    )  # fmt: skip
    (result,) = Clients([task]).results()
    if (ended := latencies.outcomes(result.seen)) != {"ok": len(asked)}:
        raise SystemExit(f"requests of ours ended otherwise than well: {ended}")
    several: Mapping[str, Callable[[Seen], float | None]] = {
        "first token": lambda x: latencies.first_token(x, since_sent=True),
        "time a token": latencies.token_time,
        "end to end": lambda x: latencies.whole(x, since_sent=True),
        "last token": last_token,
    }
    return {name: [y for x in result.seen if (y := of(x)) is not None] for name, of in several.items()}


def last_token(seen: Seen) -> float | None:
    """ms from the first byte sent to the last chunk with text: where vLLM's client stops."""
    return None if seen.last is None or seen.sent is None else (seen.last - seen.sent) * latencies.MS


NAMES = {
    "ttft from sending": "first token",
    "tpot": "time a token",
    "request from sending": "end to end",
    "last token from sending": "last token",
}
"""What the importers call the times that are compared here."""


def imported(name: str, file: Path) -> Times:
    """What a tool's file says, as `kernelmark import` reads it."""
    (results,), _ = formats.read(name, file)
    found: Times = {}
    for one in results.benchmarks:
        for ends, shown in NAMES.items():
            if one.name.endswith(ends):
                found[shown] = list(one.samples_ms)
    return found


class Failed(Exception):
    """A tool ended otherwise than well; the message is what it said last."""


def run(packages: Path, argv: list[str], folder: Path) -> None:
    """A tool in a process of its own that sees its own packages first."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{packages}:{os.environ.get('PYTHONPATH', '')}",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    done = subprocess.run(
        [sys.executable, *argv], env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise Failed((done.stderr or done.stdout)[-2000:])


def guidellm(packages: Path, server: Running, kind: str, folder: Path) -> Times:
    """guidellm's `run` on prompts from a file."""
    profile = f"kind=concurrent,streams={USERS}" if kind == "closed" else f"kind=constant,rate={RATE}"
    target = f"http://{server.host}:{server.port}"
    run(packages, [
        "-m", "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={target},model={server.model},request_format=/v1/completions",
        "--profile", profile,
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=json_file,path={folder / 'guidellm.jsonl'}",
        "--tokenizer", f"kind=hf_auto,model={folder / 'tokenizer'}",
        "--output", f"kind=json,path={folder / 'guidellm.json'}",
    ], folder)  # fmt: skip
    return imported("guidellm", folder / "guidellm.json")


def aiperf(packages: Path, server: Running, kind: str, folder: Path) -> Times:
    """AIPerf's `profile`, tokens by the server's own count."""
    load = ["--concurrency", f"{USERS}"]
    if kind == "constant":
        load = ["--request-rate", f"{RATE}", "--request-rate-mode", "constant"]
    run(packages, [
        "-m", "aiperf", "profile", "--ui", "none", "--model", server.model, *load,
        "--url", f"http://{server.host}:{server.port}", "--endpoint-type", "completions", "--streaming",
        "--input-file", str(folder / "aiperf.jsonl"), "--custom-dataset-type", "single-turn",
        "--use-server-token-count", "--tokenizer", str(folder / "tokenizer"), "--use-legacy-max-tokens",
        "--extra-inputs", "ignore_eos:true", "--request-count", f"{REQUESTS}",
        "--output-artifact-dir", str(folder / "aiperf"),
    ], folder)  # fmt: skip
    return imported("aiperf", folder / "aiperf" / "profile_export.jsonl")


VLLM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` runs, without the command line around it, which loads the engine."""


def vllm(packages: Path, server: Running, kind: str, folder: Path) -> Times:
    """`vllm bench serve --save-detailed`. Its file has no time a token of a request, but what makes one."""
    load = ["--max-concurrency", f"{USERS}"]
    if kind == "constant":  # `--burstiness` of a gamma distribution that is all but constant
        load = ["--request-rate", f"{RATE}", "--burstiness", "1000000"]
    run(packages, [
        "-c", VLLM, "--backend", "openai", "--base-url", f"http://{server.host}:{server.port}", *load,
        "--model", server.model, "--tokenizer", str(folder / "tokenizer"), "--dataset-name", "custom",
        "--dataset-path", str(folder / "vllm.jsonl"), "--skip-chat-template", "--custom-output-len", f"{OUTPUT}",
        "--num-prompts", f"{REQUESTS}", "--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-result",
        "--save-detailed", "--result-dir", str(folder), "--result-filename", "vllm.json",
    ], folder)  # fmt: skip
    found = imported("vllm-bench", folder / "vllm.json")
    both = zip(found["first token"], found["last token"], strict=True)
    return found | {"time a token": [(last - first) / (OUTPUT - 1) for first, last in both]}


TOOLS: Mapping[str, Tool] = {
    "guidellm": guidellm,
    "aiperf": aiperf,
    "vllm": vllm,
}


def version(packages: Path, name: str) -> str:
    """A tool's version, from the name of its metadata's folder."""
    (found,) = packages.glob(f"{name}-*.dist-info")
    return found.name.removesuffix(".dist-info").partition("-")[2]


def inputs(folder: Path, seed: int) -> None:
    """The prompts as each tool reads them, and a tokenizer of our server's words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(servers.VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder / "tokenizer")
    prompts = [" ".join(f"t{x}" for x in one.prompt) for one in LOADS["closed"].draw(seed)]
    forms: Mapping[str, Callable[[str], object]] = {
        "guidellm": lambda x: {"prompt": x, "prompt_tokens_count": INPUT, "output_tokens_count": OUTPUT},
        "aiperf": lambda x: {"text": x, "output_length": OUTPUT},
        "vllm": lambda x: {"prompt": x, "output_tokens": OUTPUT},
    }
    for name, form in forms.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(form(x)) + "\n" for x in prompts))


def main(packages: Path, record: Path, rounds: int) -> None:
    """All rounds, the tools in another order in each."""
    tools = {name: tool for name, tool in TOOLS.items() if (packages / name).is_dir()}
    generator = random.Random(1)
    found: list[object] = []
    said = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "versions": {name: version(packages / name, name) for name in tools},
        "load": {"input": INPUT, "output": OUTPUT, "requests": REQUESTS, "users": USERS, "rate": RATE},
        "planted": {"first_ms": PLAN.first_ms, "token_ms": PLAN.token_ms},
        "runs": found,
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    for number in range(rounds):
        for kind_of_server, start in SERVERS.items():
            server = start()
            try:
                for kind in LOADS:
                    order = ["kernelmark", *tools]
                    generator.shuffle(order)
                    for name in order:
                        one: dict[str, object] = {"server": kind_of_server, "load": kind, "round": number}
                        try:
                            times, truth = measured(server, kind, name, tools, packages, number)
                        except (Failed, subprocess.TimeoutExpired) as error:
                            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
                            found.append(one | {"tool": name, "failed": True, "ms": {}})
                        else:
                            print(*one.values(), name, {x: len(y) for x, y in times.items()}, flush=True)
                            found.append(one | {"tool": name, "ms": short(times), "server_ms": short(truth)})
            finally:
                server.stop()
            record.write_text(json.dumps(said, separators=(",", ":")) + "\n")


def short(times: Times) -> Times:
    """Values as a record has them."""
    return {name: [float(f"{x:.6g}") for x in values] for name, values in times.items()}


def measured(
    server: Running, kind: str, name: str, tools: Mapping[str, Tool], packages: Path, number: int
) -> tuple[Times, Times]:
    """One load by one tool, a few requests of ours before it; and the server's own account of it."""
    ours(server, Load("closed", 0.0, USERS, WARM, INPUT, OUTPUT, "fixed", servers.VOCABULARY - 1), 1000 + number)
    before = len(server.get("/written"))
    if name == "kernelmark":
        found = ours(server, LOADS[kind], number)
    else:
        with tempfile.TemporaryDirectory() as folder:
            inputs(Path(folder), number)
            found = tools[name](packages / name, server, kind, Path(folder))
    # A tool may ask a little before its load, to see whether the server is there.
    account = server.get("/written")[before:][-REQUESTS:]
    ms = latencies.MS
    return found, {
        "first token": [(first - came) * ms for came, first, _ in account],
        "time a token": [(last - first) * ms / (OUTPUT - 1) for _, first, last in account],
        "end to end": [(last - came) * ms for came, _, last in account],
        "last token": [(last - came) * ms for came, _, last in account],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 5)

"""Plans that a rule draws: the files are what it gives, and hold what was asked for."""

from __future__ import annotations

from collections import Counter

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.record import Header
from kernelmark.suite import plan as plans
from kernelmark.suite import shapes
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import Model

OWN = Catalog.default()
SHAPES = plans.load("shapes", OWN, "cuda")
WIDTHS = plans.load("widths", OWN, "cuda")


@pytest.mark.parametrize("kind", ["shapes", "widths"])
def test_a_frozen_plan_is_what_its_rule_draws(kind):
    text = (plans.FILES / f"{plans.LATEST[kind]}.toml").read_text()
    assert text == shapes.text(kind, OWN)
    assert f"seed {shapes.SEED}" in text


@pytest.mark.parametrize(
    ("given", "says"), [([], "arguments are required: kind"), (["forms"], "choose from 'shapes', 'widths'")]
)
def test_a_plan_that_no_rule_draws_is_wrong_usage(capsys, given, says):
    with pytest.raises(SystemExit) as end:
        shapes.main(given)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_another_seed_draws_other_cases():
    other = {x.case.name for x in shapes.widths(OWN, shapes.SEED + 1)}
    assert len(other & {x.name for x in WIDTHS.cases}) < 20


def test_the_plain_name_is_the_latest():
    assert SHAPES.name == "shapes-2"
    assert {x.name for x in plans.load("shapes-2", OWN, "cuda").cases} == {x.name for x in SHAPES.cases}


def test_the_first_shapes_have_gradients_alone_that_are_computed_before():
    """All else is the same, in the same order."""
    pairs = list(zip(plans.load("shapes-1", OWN, "cuda").cases, SHAPES.cases, strict=True))
    other = [(a, b) for a, b in pairs if a != b]
    assert len(other) == 6
    assert {(a.operator, a.pass_, b.pass_) for a, b in other} == {
        ("fused_linear_cross_entropy", "backward", "forward_backward")
    }
    assert all(a.axes == b.axes and a.dtype == b.dtype for a, b in other)


def test_shapes_are_calls_of_all_models_that_are_asked_for():
    assert 140 <= len(SHAPES.cases) <= 160
    assert {y for x in SHAPES.models.values() for y in x} == set(shapes.MODELS)
    published = {x for model in OWN.architectures.values() for x in model.configurations}
    assert set(shapes.MODELS) <= published
    counts = Counter(x.operator for x in SHAPES.cases)
    assert set(counts) == set(shapes.PEERS) == set(SHAPES.peers)
    assert min(counts.values()) >= shapes.LEAST
    options = {f"{x}={y}" for case in SHAPES.cases for x, y in case.options.items()}
    assert options >= {"storage=bshd", "storage=packed", "storage=bhsd", "sinks=True", "cap=50", "page=64"}
    assert {x.dtype for x in SHAPES.cases} == {"bf16", "fp16"}
    assert {x.pass_ for x in SHAPES.cases} == {"forward", "backward", "forward_backward"}
    assert any(x.axes.get("Sk", 0) > x.axes["S"] for x in SHAPES.cases if x.operator == "attention")


def test_twins_differ_in_storage_or_length_alone():
    alone = {f"{x.operator}/{x.name}": x for x in SHAPES.cases if f"{x.operator}/{x.name}" not in SHAPES.models}
    assert {(x.pass_, x.options["storage"], x.axes["S"]) for x in alone.values()} == {
        (pass_, storage, S)
        for pass_ in ("forward", "backward")
        for storage, S in (("bhsd", 4096), ("bshd", 4096), ("packed", 4096), ("bshd", 5000), ("bshd", 5120))
    }


def test_widths_are_no_round_numbers():
    sizes = [x.axes.get("D") or x.axes.get("V") or x.axes["N"] for x in WIDTHS.cases if x.operator != "rope"]
    assert len(WIDTHS.cases) == shapes.WIDTHS
    assert sum(x % 8 != 0 for x in sizes) > len(sizes) / 2
    assert min(sizes) < 10
    assert max(sizes) > 100_000


def test_widths_are_held_against_every_peer_but_max_autotune():
    names = {x.implementation.name for x in WIDTHS.cells(OWN, "cuda", ())}
    assert {"kernelmark", "torch", "torch_compile", "liger", "quack", "vllm", "flashinfer"} <= names
    assert "torch_compile_max_autotune" not in names
    before = plans.load("widths-1", OWN, "cuda")
    assert [x.name for x in before.cases] == [x.name for x in WIDTHS.cases]


def test_a_run_of_a_part_says_whose_calls_it_has():
    part = plans.load("shapes", OWN, "cuda", ["rope"])
    assert set(part.peers) == {"rope"}
    assert part.models.keys() <= {f"rope/{x.name}" for x in part.cases}
    asked = part.request(())
    header = Header(
        2, "r", "2026-11-22T00:00:00Z", "0", None, None, part.name, 1, 3, "cuda", "k", {}, {}, request=asked
    )
    assert plans.Plan.of(header) == part


@pytest.mark.parametrize(
    ("peers", "said"),
    [('attention = ["flash"]', "unknown peer of attention 'flash'"), ('gelu = ["torch"]', "unknown operator of")],
)
def test_a_peer_that_does_not_exist_is_refused(peers, said):
    text = (
        f'[peers]\n{peers}\n[[cases]]\noperator = "attention"\naxes = {{ B = 1, H = 1, Hkv = 1, S = 8, D = 64 }}\n'
    )
    with pytest.raises(InputError, match=said):
        plans.parse(text, "mine", OWN)


def test_decoding_leaves_out_what_was_done_before():
    """Whisper's encoder; its decoder's keys are as many as there are frames."""
    import random

    whisper = OWN.architectures["whisper"]
    found = list(shapes.decoded(whisper, "whisper-large-v3", 8, 224, random.Random(3)))
    assert {x.name for x in found} == {"norm", "attention", "cross_attention", "activation"}
    assert {x.axes["S"] for x in found if x.operator == "attention_decode"} == {224, 1500}


# Billions of parameters as their authors state them.
COUNTED = {
    "gemma-2-9b": 9.24, "gemma-2-27b": 27.23, "gemma-3-4b": 3.88, "gemma-3-27b": 27.01, "starcoder2-3b": 3.03,
    "starcoder2-15b": 15.96, "falcon-h1-7b": 7.58, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
    "deepseek-v3": 671.0, "vit-l": 0.304, "dit-xl": 0.675, "whisper-large-v3": 1.55,
}  # fmt: skip


def counted(name, c):
    """The weights of matrices, of tables and of what the published model has beside the parts, by hand."""
    if name == "deepseek-v3":
        own = c.nope + c.rotary
        attention = c.width * (c.q_rank + c.kv_rank + c.rotary) + c.q_rank * c.heads * own
        attention += c.kv_rank * c.heads * (c.nope + c.value) + c.heads * c.value * c.width
        experts = (c.experts + c.shared) * 3 * c.width * c.expert_hidden + c.experts * c.width
        return (
            c.layers * attention
            + c.dense * 3 * c.width * c.hidden
            + (c.layers - c.dense) * experts
            + (2 * c.vocabulary * c.width)
        )
    if name.startswith(("vit", "dit")):
        more = 6 * c.width * c.width if name.startswith("dit") else 0
        return c.layers * (4 * c.width**2 + 2 * c.width * c.hidden + more)
    if name.startswith("whisper"):
        feed = 2 * c.width * c.hidden
        return c.layers * (4 * c.width**2 + feed) + c.layers * (8 * c.width**2 + feed) + c.vocabulary * c.width
    attention = 2 * c.width * (c.heads + c.kv_heads) * c.head
    if name.startswith("starcoder2"):
        tables = 2 if name.endswith("15b") else 1
        return c.layers * (attention + 8 * c.width**2) + tables * c.vocabulary * c.width
    if name.startswith("gpt-oss"):
        experts = c.experts * (3 * c.hidden + 1) * c.width
        return c.layers * (attention + experts) + 2 * c.vocabulary * c.width
    feed = 3 * c.width * c.hidden
    if name.startswith("falcon"):
        inner = c.scan_heads * c.scan_head
        scan = c.width * (2 * inner + 2 * c.groups * c.state + c.scan_heads) + inner * c.width
        return c.layers * (attention + feed + scan) + 2 * c.vocabulary * c.width
    return c.layers * (attention + feed) + c.vocabulary * c.width


@pytest.mark.parametrize("name", COUNTED)
def test_configurations_count_as_published(name):
    """Within a hundredth: norms, biases and positions are left out."""
    (model,) = (x for x in OWN.architectures.values() if name in x.configurations)
    assert not isinstance(model, Model)
    found = counted(name, model.configurations[name]) / 1e9
    assert found == pytest.approx(COUNTED[name], rel=0.012)

"""Our rotary positions and cache in one kernel."""

import pytest
import torch
from kernelmark.kernels.position.rope_cache_write import rope_cache_write

SMALL = {"B": 3, "Sq": 1, "H": 3, "Hkv": 1, "S": 40, "D": 12}


@pytest.mark.parametrize(
    ("axes", "dtype", "options"),
    [
        (SMALL, "fp32", {}),
        (SMALL, "bf16", {"layout": "interleaved"}),
        ({"B": 2, "Sq": 3, "H": 10, "Hkv": 5, "S": 33, "D": 128}, "fp16", {}),
        ({"B": 1, "Sq": 2, "H": 2, "Hkv": 2, "S": 20, "D": 6}, "fp32", {"layout": "interleaved"}),
    ],
)
def test_agrees(agrees, axes, dtype, options):
    agrees("rope_cache_write", axes, dtype, page=16, **options)


def test_agrees_with_strides(agrees):
    """Heads before tokens, numbers that lie apart, every second head of a cache, a part of a table."""
    agrees(
        "rope_cache_write", SMALL, page=16, change=lambda given: {"q": torch.randn(3, 3, 1, 12).transpose(1, 2)}
    )
    agrees(
        "rope_cache_write", SMALL, page=16, change=lambda given: {"k": torch.randn(3, 1, 12, 1).transpose(2, 3)}
    )
    agrees(
        "rope_cache_write",
        SMALL,
        page=16,
        change=lambda given: {
            "v_cache": torch.randn(9, 16, 2, 12)[:, :, ::2],
            "block_table": given["block_table"].repeat(1, 2)[:, 3:],
        },
    )


def given(**other):
    inputs = {
        "q": torch.ones(2, 1, 4, 8), "k": torch.ones(2, 1, 2, 8), "v": torch.ones(2, 1, 2, 8),
        "cos": torch.ones(20, 4), "sin": torch.zeros(20, 4),
        "k_cache": torch.zeros(3, 16, 2, 8), "v_cache": torch.zeros(3, 16, 2, 8),
        "block_table": torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        "lengths": torch.tensor([17, 3], dtype=torch.int32),
    }  # fmt: skip
    return inputs | other


def test_nothing_else_is_written():
    inputs = given()
    rope_cache_write(**inputs)
    for cache in (inputs["k_cache"], inputs["v_cache"]):
        assert cache.sum((2, 3)).nonzero().tolist() == [[1, 0], [2, 2]]
    none = given(
        q=torch.ones(0, 1, 4, 8), k=torch.ones(0, 1, 2, 8), v=torch.ones(0, 1, 2, 8),
        block_table=torch.zeros(0, 2, dtype=torch.int32), lengths=torch.zeros(0, dtype=torch.int32),
    )  # fmt: skip
    assert rope_cache_write(**none).shape == (0, 1, 4, 8)


@pytest.mark.parametrize(
    ("error", "message", "other"),
    [
        (ValueError, r"q has shape \(2, 1, 4, 7\), expected an even", {"q": torch.ones(2, 1, 4, 7)}),
        (ValueError, r"k has shape \(2, 2, 2, 8\)", {"k": torch.ones(2, 2, 2, 8)}),
        (TypeError, "v has dtype torch.float16", {"v": torch.ones(2, 1, 2, 8).half()}),
        (ValueError, r"cos has shape \(20, 3\), expected \(20, 4\)", {"cos": torch.ones(20, 3)}),
        (ValueError, r"k_cache has shape \(3, 16, 1, 8\)", {"k_cache": torch.zeros(3, 16, 1, 8)}),
        (
            ValueError,
            "v_cache has stride 2 in its last dimension",
            {"v_cache": torch.zeros(3, 16, 2, 16)[..., ::2]},
        ),
        (TypeError, "block_table has dtype torch.int64", {"block_table": torch.zeros(2, 2, dtype=torch.int64)}),
        (ValueError, r"lengths has shape \(3,\)", {"lengths": torch.ones(3, dtype=torch.int32)}),
        (ValueError, "layout is 'other'", {"layout": "other"}),
    ],
)
def test_wrong_arguments(error, message, other):
    with pytest.raises(error, match=message):
        rope_cache_write(**given(**other))


def test_registration():
    torch.library.opcheck(torch.ops.kernelmark.rope_cache_write.default, (*given().values(), "half"))

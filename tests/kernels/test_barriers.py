"""What lies over a barrier, in lines of PTX as Triton 3.6 writes them."""

from __future__ import annotations

import pytest

from .barriers import laid_over

BARRIERS = """
	add.s32 	%r6011, %r6122, 172032;
	@%p707 mbarrier.init.shared::cta.b64 [%r6011], 1;
	add.s32 	%r6012, %r6122, 172040;
	@%p707 mbarrier.init.shared::cta.b64 [%r6012], 1;
	add.s32 	%r6100, %r6122, 180000;
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("@%p730 st.shared.b32 [ %r6011 + 0 ], %r6116;", {172032}),
        ("ld.shared.b32 	%r93, [global_smem+172032];", {172032}),
        ("st.shared.v2.b32 	[global_smem+172036], {0, 16843009};", {172032, 172040}),
        ("ld.shared.v4.b32 	{%r1, %r2, %r3, %r4}, [global_smem+172024];", {172032}),
        ("st.shared.b32 	[global_smem+172048], 33686018;", set()),
        ("st.shared.b32 	[global_smem+172028], 33686018;", set()),
        ("@%p730 st.shared.b32 [ %r6100 + 0 ], %r6116;", set()),
        ("st.shared.b32 	[%r77], %r6116;", set()),  # wherever that is
        ("mbarrier.try_wait.parity.shared.b64 complete, [%r6011], %r6400;", set()),
    ],
)
def test_laid_over(line, found):
    assert laid_over(BARRIERS + line) == found


def test_a_barrier_that_is_not_found():
    with pytest.raises(ValueError, match="2 of 3 barriers found"):
        laid_over(BARRIERS + "mbarrier.init.shared::cta.b64 [%rd7], 1;")

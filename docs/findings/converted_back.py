"""ptxas 12.8: fp32 to E4M3 and back, with the 8-bit numbers stored too, gives some numbers of another register.

Needs a GPU that has E4M3 (compute capability 8.9 or later): it compares what a kernel converts back with what
the same 8-bit numbers are. Without one it only compiles. The way out is to round in fp32, by adding and taking
away what leaves three binary digits of a fraction (`on_e4m3` in `kernels/_common.py`).
"""

# mypy: ignore-errors  # Triton's language has types of its own

import sm90
import torch
import triton
import triton.language as tl


@triton.jit
def there_and_back(x, small, back, n, BLOCK: tl.constexpr):
    """x in E4M3, stored, and the same in fp32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n, 0.0).to(tl.float32)
    rounded = value.to(tl.float8e4nv)
    tl.store(small + at, rounded, at < n)
    tl.store(back + at, rounded.to(tl.float32), at < n)


def show() -> bool | None:
    """Prints the effect; whether this device has it, None where none can tell."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        signature = {"x": "*bf16", "small": "*fp8e4nv", "back": "*fp32", "n": "i32"}
        sm90.compiled(there_and_back, signature, {"BLOCK": 1024}, ("x", "small", "back"), num_warps=4)
        print("compiles; whether numbers are wrong only a GPU of compute capability 8.9 or later can show")
        return None
    wrong = 0
    for block in (256, 512, 1024, 2048, 4096):
        x = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
        small = torch.empty(x.shape, device="cuda", dtype=torch.float8_e4m3fn)
        back = torch.empty(x.shape, device="cuda", dtype=torch.float32)
        there_and_back[(x.numel() // block,)](x, small, back, x.numel(), BLOCK=block, num_warps=4)
        wrong += int((small.float() != back).sum())
    print(f"numbers that differ from their own 8 bits: {wrong} of {5 << 20}")
    return wrong > 0


if __name__ == "__main__":
    print(sm90.versions())
    show()

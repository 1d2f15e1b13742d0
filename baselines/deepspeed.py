"""DeepSpeed: its fused Adam, its Triton operators for Hugging Face models, and its engine around one of them, with
states on the device or on the host (ZeRO-Offload).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from . import _transformers_models
from ._terms import Call, forcing

REQUIRES = ("deepspeed",)
ENVIRONMENT = "deepspeed"
DEVICES = ("cuda",)
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""The environment variable that says what extensions are compiled for."""


def rms_norm(case: Any) -> Call:
    """`fused_rms_norm`, of rows of at most 2048."""
    from deepspeed.ops.triton_ops.fused_rms_norm import fused_rms_norm

    if case.axes["D"] > 2048:
        raise NotImplementedError("fused_rms_norm takes rows of at most 2048")
    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("fused_rms_norm takes fp16 and bf16 only")
    return lambda x, weight, eps: fused_rms_norm(x, weight, eps)


def swiglu(case: Any) -> Call:
    """`deepspeed.ops.triton_ops.swiglu_triton.swiglu`."""
    from deepspeed.ops.triton_ops.swiglu_triton import swiglu as function

    return lambda gate, up: function(gate, up)


def rope(case: Any) -> Call:
    """`fused_apply_rotary_pos_emb`, Hugging Face's form: cos and sin are doubled to it inside the call."""
    import torch
    from deepspeed.ops.triton_ops.fused_rotary_pos_emb import fused_apply_rotary_pos_emb

    if case.options["layout"] != "half":
        raise NotImplementedError("fused_apply_rotary_pos_emb has the half layout only")
    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("fused_apply_rotary_pos_emb takes fp16 and bf16 only")

    def conversion(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        return tuple(torch.cat((x, x), -1)[None] for x in (cos, sin))

    def call(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        return fused_apply_rotary_pos_emb(q, k, *conversion(q, k, cos, sin, layout))

    return forcing(call, conversion)


def adamw(case: Any) -> Call:
    """The kernel of `deepspeed.ops.adam.FusedAdam`, compiled with nvcc at its first use.

    As with PyTorch's, the optimizer's own work around it on the host is left out.
    """
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.adam.fused_adam import multi_tensor_applier

    if case.options["state"] != "plain":
        raise NotImplementedError("FusedAdam keeps its moments in the parameters' dtype and no masters")
    optimizer: Any = None

    def call(
        params: Any,
        grads: Any,
        exp_avgs: Any,
        exp_avg_sqs: Any,
        masters: Any,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        nonlocal optimizer
        if optimizer is None:
            with _launched():
                optimizer = FusedAdam(params)
        multi_tensor_applier(
            optimizer.multi_tensor_adam,
            optimizer._dummy_overflow_buf,
            [grads, params, exp_avgs, exp_avg_sqs],
            lr, beta1, beta2, eps, step, optimizer.adam_w_mode, 1, weight_decay,
        )  # fmt: skip

    return call


class _Engine(_transformers_models.Training):
    """`deepspeed.initialize` of a model of Transformers' own class, ZeRO stage 1, or 2 with states on the host.

    `stored` by its configuration: moments, masters and sums of gradients in bf16 (`bf16_optimizer_states`), or in
    fp32, as by default and always on the host.
    """

    def __init__(self, offload: bool) -> None:
        super().__init__()
        self.stored: tuple[str, ...] = ("master32",) if offload else ("plain", "master32")
        self._offload = offload
        self._engine: Any = None

    def start(self, stored: str, batch: int, accumulation: int, clip: float, adamw: Mapping[str, float]) -> None:
        """The engine of the model that was built last, in a group of one process."""
        import deepspeed
        import torch
        from torch import distributed

        if self._engine is not None:
            self._engine.destroy()
        device = next(self._model.parameters()).device
        if not distributed.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = distributed.HashStore()  # type: ignore[attr-defined]  # documented, and left out of `__all__`
            distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        self._wide = next(self._model.parameters()).dtype == torch.float32
        if self._wide and stored != "plain":
            raise NotImplementedError("weights in fp32 are their own masters")
        config = configuration(stored, self._offload, self._wide, batch, accumulation, clip, adamw)
        with _launched():
            self._engine, *_ = deepspeed.initialize(model=self._model, config=config, dist_init_required=False)
        self._call = self._engine

    def backward(self, loss: Any) -> None:
        """Gradients of a micro-batch, which the engine divides by their number."""
        self._engine.backward(loss)

    def update(self) -> None:
        """Clips and updates after a step's last micro-batch."""
        self._engine.step()

    def gradient(self, parameter: Any) -> Any:
        """Before clipping."""
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)


@contextlib.contextmanager
def _launched() -> Iterator[None]:
    """What its launcher sets, and its engine looks for when it begins; and architectures as what compiles its
    kernels reads them: numbers, "9.0" for "9.0a".
    """
    given = {"LOCAL_RANK": "0"}
    if architectures := os.environ.get(ARCHITECTURES):
        given[ARCHITECTURES] = re.sub(r"(?<=\d)[af]\b", "", architectures)
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def configuration(
    stored: str, offload: bool, wide: bool, batch: int, accumulation: int, clip: float, adamw: Mapping[str, float]
) -> dict[str, Any]:
    """What its file of settings would say. `wide`: weights in fp32."""
    betas = (adamw["beta1"], adamw["beta2"])
    given = {"lr": adamw["lr"], "betas": betas, "eps": adamw["eps"], "weight_decay": adamw["weight_decay"]}
    narrow = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    zero: dict[str, Any] = {"stage": 0 if wide else 1}
    if offload:
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": not wide, **(narrow if stored == "plain" and not wide else {})},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": given},
        "steps_per_print": 1 << 30,
    }


def train(case: Any) -> _Engine:
    """Its engine, states on the device."""
    return _engine(case, offload=False)


def train_offload(case: Any) -> _Engine:
    """The same with states and update on the host."""
    return _engine(case, offload=True)


def _engine(case: Any, offload: bool) -> _Engine:
    if case.world > 1:
        raise NotImplementedError(
            "DeepSpeed's ranks are started by its own launcher; here it trains in one process"
        )
    return _Engine(offload)


IMPLEMENTATIONS = {
    "adamw": {"deepspeed": adamw},
    "rms_norm": {"deepspeed": rms_norm},
    "rope": {"deepspeed": rope},
    "swiglu": {"deepspeed": swiglu},
    "train": {"deepspeed_engine": train, "deepspeed_offload": train_offload},
}

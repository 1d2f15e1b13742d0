"""What is read from a profiler's trace, on literal events."""

from __future__ import annotations

from pathlib import Path

import kernelmark.suite
import pytest
from kernelmark.registry.store.record import Case
from kernelmark.suite.run.profile import STEP, Light, launches, names, over_launches, speed_of_light, summarized


def event(name, category, ts, dur, tid=1):
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "tid": tid}


def test_kernels_of_a_device():
    trace = {
        "traceEvents": [
            event(STEP, "user_annotation", 0, 50),
            event(STEP, "user_annotation", 50, 50),
            event("_norm_forward", "kernel", 10, 20),
            event("_norm_forward", "kernel", 60, 20),
            event("nvjet_tst_128x256", "kernel", 40, 50),  # 20 of it beside the norm on another stream
            event("Memcpy DtoD", "gpu_memcpy", 90, 10),
            event("aten::mm", "cpu_op", 0, 99),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found = summarized(trace, 2, {"_norm_forward"}, "cuda")
    assert (found.steps, found.step_ms, found.gap_ms) == (2, 0.05, 0.01)
    assert [(x.name, x.kind, x.calls) for x in found.kernels] == [
        ("nvjet_tst_128x256", "product", 0.5),
        ("_norm_forward", "ours", 1.0),
        ("Memcpy DtoD", "copy", 0.5),
    ]
    assert [x.ms for x in found.kernels] == [0.025, 0.02, 0.005]
    assert found.kernels[0].share == 0.5
    assert found.ms("ours") == 0.02


def test_work_after_the_host_was_done_is_part_of_the_step():
    trace = {"traceEvents": [event(STEP, "user_annotation", 0, 10), event("late", "kernel", 30, 10)]}
    assert summarized(trace, 1, (), "cuda").step_ms == 0.04


def test_operators_of_a_cpu_without_what_they_call():
    trace = {
        "traceEvents": [
            event(STEP, "user_annotation", 100, 100),
            event("aten::linear", "cpu_op", 100, 60),
            event("aten::mm", "cpu_op", 110, 40),
            event("aten::gelu", "cpu_op", 170, 10),
            event("aten::gelu", "cpu_op", 170, 10, tid=2),
            event("aten::mm", "cpu_op", 10, 40),  # warming up
        ]
    }
    found = summarized(trace, 1, (), "cpu")
    assert [(x.name, x.kind, x.ms) for x in found.kernels] == [
        ("aten::mm", "product", 0.04),
        ("aten::linear", "other", 0.02),
        ("aten::gelu", "other", 0.01),
    ]
    assert found.gap_ms == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_tem_fused_addmm_gelu_4", "product"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_nn_align8>", "product"),
        ("triton_poi_fused_mm_t_1", "other"),
        ("triton_red_fused__log_softmax_mm_prepare_softmax_online_5", "other"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "other"),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90", "other"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "other"),
    ],
)
def test_what_is_named_after_a_product(name, kind):
    trace = {"traceEvents": [event(STEP, "user_annotation", 0, 50), event(name, "kernel", 10, 20)]}
    assert [x.kind for x in summarized(trace, 1, (), "cuda").kernels] == [kind]


def test_a_trace_without_steps():
    with pytest.raises(ValueError, match="no steps"):
        summarized({"traceEvents": []}, 1, (), "cuda")


def test_our_kernels_are_known_by_their_functions():
    house = Path(kernelmark.suite.__path__[0]).parent
    found = names([house / "kernels"])
    assert {"_cross_entropy_forward", "fetch"} & found
    assert not {"rms_norm", "attention"} & found


def test_a_file_that_is_broken_is_another_rows(tmp_path):
    (tmp_path / "broken.py").write_text("def broken(")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "mine.py").write_text("@triton.jit\ndef mine(x):\n    pass\n")
    assert names([tmp_path]) == {"mine"}


@pytest.mark.parametrize(("ours", "kind"), [({"kernel"}, "ours"), ({"_norm"}, "other")])
def test_the_profiler_has_no_name_for_a_function_called_kernel(ours, kind):
    trace = {"traceEvents": [event(STEP, "user_annotation", 0, 10), event("Kernel", "kernel", 0, 10)]}
    assert [x.kind for x in summarized(trace, 1, ours, "cuda").kernels] == [kind]


def test_what_nsight_compute_says():
    text = (
        "==PROF== Connected to process 7\n"
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","norm","Memory Throughput","%","91.5"\n'
        '"0","norm","Compute (SM) Throughput","%","12.25"\n'
        '"0","norm","Duration","ns","1,204,250"\n'
        '"0","norm","Waves Per SM","","1.55"\n'
        '"0","norm","Registers Per Thread","register/thread","96"\n'
        '"0","norm","","",""\n'
        '"1","gemm","Compute (SM) Throughput","%","80"\n'
        '"1","gemm","Achieved Occupancy","%","24.5"\n'
        '"1","gemm","L2 Cache Throughput","%","77.5"\n'
    )
    assert speed_of_light(text) == (
        Light("norm", us=1204.25, compute=12.25, memory=91.5, registers=96.0, waves=1.55),
        Light("gemm", compute=80.0, occupancy=24.5, l2=77.5),
    )
    assert speed_of_light("==ERROR== ERR_NVGPUCTRPERM") == ()


def test_launches_of_one_kernel_count_by_their_time():
    first, second = Light("norm", us=1.0, memory=40.0, waves=1.0), Light("norm", us=3.0, memory=80.0)
    found = over_launches([first, Light("gemm", compute=80.0), second])
    assert found == {"norm": Light("norm", us=2.0, memory=70.0, waves=1.0), "gemm": Light("gemm", compute=80.0)}


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIterator)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda>",
        "triton_poi_fused_clone_3",
        "triton_poi_fused__to_copy_transpose_11",
    ],
)
def test_kernels_that_only_lay_out_are_copies(name):
    trace = {"traceEvents": [event(STEP, "user_annotation", 0, 10), event(name, "kernel", 1, 5)]}
    assert [x.kind for x in summarized(trace, 1, (), "cuda").kernels] == ["copy"]
    trace["traceEvents"][1]["name"] = "triton_poi_fused_add_clone_3"  # computes besides
    assert [x.kind for x in summarized(trace, 1, (), "cuda").kernels] == ["other"]


def test_a_profile_as_a_line_of_a_journal():
    trace = {"traceEvents": [event(STEP, "user_annotation", 0, 10), event("a\n" + "b" * 900, "kernel", 1, 5)]}
    case = Case("train", "tiny", {}, {}, "bf16", "program", "5bec", 1, 1)
    line = launches(summarized(trace, 1, (), "cuda"), case, "torch")
    assert (line.operator, line.case, line.implementation, line.gap_ms) == ("train", "tiny", "torch", 0.005)
    assert [(x.name[:3], len(x.name), x.calls, x.ms) for x in line.kernels] == [("a b", 200, 1.0, 0.005)]

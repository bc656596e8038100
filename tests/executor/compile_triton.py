"""Compile Triton's kernels for GPUs that are not there; print what the compiler tells.

    TRITON_INTERPRET=0 python -m tests.executor.compile_triton [FILE.json]

Per program: bytes of shared memory, and the number of Hopper's matrix instructions
(wgmma) and of older ones (mma).
"""

import json
import re
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from areal_dta.executor.fused import operators, programs
from areal_dta.executor.kernels import triton_backward, triton_forward
from areal_dta.executor.kernels.triton_tree import choose_tiling

INTS = ("num_queries", "num_path", "path_start", "list_stride", "num_rows",
        "num_tiles", "num_elements", "table_stride")  # fmt: skip
POINTERS = {"last_ptr": "*i64", "depth_ptr": "*i64", "list_ptr": "*i32",
            "count_ptr": "*i32", "lse_ptr": "*fp32", "delta_ptr": "*fp32",
            "path_grad_k_ptr": "*fp32", "path_grad_v_ptr": "*fp32",
            "partial_ptr": "*fp32"}  # fmt: skip


def compiled(program, constants, capability: int, warps: int, stages: int):
    """Compile for bf16; pointers and strides are multiples of 16, as in a model."""
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(program.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name in INTS:
            signature[name] = "i32"
            if name in ("num_elements", "table_stride"):  # multiples of 16, too
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif name.endswith("_strides"):
            signature[name] = ("i32", "i32")
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in (0, 1)}
        else:
            signature[name] = POINTERS.get(name, "*bf16")
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(program, signature, values, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return compile_source(source, GPUTarget("cuda", capability, 32), options)


def fused_layers():
    """Compile RMSNorm, SwiGLU and rotary embeddings as Qwen3 of 8B and 32B has them."""
    double = {"DOUBLE": False}
    swiglu = double | {"SIZE": operators._SWIGLU_ELEMENTS}
    heads = {"NUM_Q": 64, "PADDED_Q": 64, "NUM_K": 8, "PADDED_K": 8}
    for capability in (90, 80):
        for width in (128, 4096, 5120):
            x = torch.empty(1, width, dtype=torch.bfloat16, device="meta")
            sizes = operators._norm_sizes(x)
            warps = operators._norm_warps(sizes)
            norm = {"EPS": 1e-6} | sizes
            yield fused(programs.rms_norm, norm, capability, warps)
            norm |= {"NEEDS_WEIGHT": True}
            yield fused(programs.rms_norm_backward, norm, capability, warps)
        yield fused(programs.swiglu, swiglu, capability, 4)
        yield fused(programs.swiglu_backward, swiglu, capability, 4)
        for backward in (False, True):
            turn = heads | double | {"HALF": 64, "PADDED": 64, "BACKWARD": backward}
            yield fused(programs.rotate, turn, capability, 4)


def fused(program, constants, capability: int, warps: int):
    result = compiled(program, constants, capability, warps, 2)
    ptx = result.asm["ptx"]
    return {
        "program": program.__name__,
        "capability": capability,
        **{k: v for k, v in constants.items() if k in ("WIDTH", "ROWS", "BACKWARD")},
        "warps": warps,
        "shared_bytes": result.metadata.shared,
        # registers that do not fit go to memory and back
        "local_bytes": local_bytes(ptx),
        "wide_loads": ptx.count("ld.global.v4") + ptx.count("ld.global.v2"),
    }


def local_bytes(ptx: str) -> int:
    found = re.findall(r"\.local\s+\.align\s+\d+\s+\.b8\s+\S+\[(\d+)\]", ptx)
    return sum(map(int, found))


def main() -> None:
    found = []
    for capability, width, num_rows in [
        (90, 128, 8192),
        (90, 128, 256),
        (80, 128, 256),
    ]:
        q = torch.empty(1, 16, 1, width, dtype=torch.bfloat16, device="meta")
        tiling = choose_tiling(num_rows, 8, q)
        common = {
            "GROUP": 2,
            "SCALE": width**-0.5,
            "SOFTCAP": 0.0,
            "WINDOW": 0,
            "WIDTH": width,
            "PADDED": width,
            "UPCAST": False,
        }
        rows = {"BLOCK_M": tiling.rows, "BLOCK_N": tiling.keys}
        keys = {"BLOCK_M": tiling.backward_rows, "BLOCK_N": tiling.backward_keys}
        for program, sizes, warps in [
            (triton_forward.forward, rows, tiling.warps),
            (triton_backward.backward_rows, rows, tiling.warps),
            (triton_backward.backward_keys, keys, tiling.backward_warps),
        ]:
            result = compiled(program, common | sizes, capability, warps, tiling.stages)
            ptx = result.asm["ptx"]
            row = {"program": program.__name__, "capability": capability} | sizes
            row |= {"head_dim": width, "warps": warps, "stages": tiling.stages}
            row |= {"shared_bytes": result.metadata.shared}
            row |= {"wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync")}
            found.append(row)
            print(json.dumps(row), flush=True)
    for row in fused_layers():
        found.append(row)
        print(json.dumps(row), flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()

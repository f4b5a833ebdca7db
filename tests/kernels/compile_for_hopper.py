"""Compiles the kernels of chained steps for a Hopper GPU, which need not be there.

Prints a line for each; ends with an error where one cannot be compiled, or wants more memory than a
program has. `test_compilation.py` runs this, for it must not be in Triton's interpreter.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from caldera.rollout.native.cuda import (
    attention_kernels,
    chained,
    chained_kernels,
    divisions,
    graphs,
    step_kernels,
)

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232448
HALF = "*bf16"
POINTERS = {
    "pointers": "*i64", "inputs": "*i32", "tables": "*i32", "newest": "*i64",
    "letters": "*i32", "next_letter": "*i32", "answers": "*i32",
    "partial": "*fp32", "weight": HALF, "parts": "*fp32",
}  # fmt: skip
FLOATS = ("epsilon", "scale")
NUMBERS = ("size", "width", "span", "columns", "window")
POINTER_NAMES = (
    "query", "key", "value", "cosine", "sine", "query_norm", "key_norm", "values", "bias", "out",
    "embedding", "hidden", "normed", "both",
)  # fmt: skip


def type_of(name: str) -> str:
    if name in POINTER_NAMES or name in POINTERS:
        return POINTERS.get(name, HALF)
    return "fp32" if name in FLOATS else "i32"


def compile_kernel(
    kernel: Any, constants: dict[str, Any], types: dict[str, str] | None = None, **options: Any
) -> None:
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = (
            "constexpr" if name in constants else (types or {}).get(name, type_of(name))
        )
        if name not in constants and signature[name] != "fp32":  # as addresses and sizes here are
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options={"enable_fp_fusion": True, **options})
    shared = compiled.metadata.shared
    sys.stdout.write(f"{kernel.__name__} {options} {shared} bytes\n")
    assert shared <= SHARED_MEMORY, (kernel.__name__, constants, shared)


def compile_attention() -> None:
    for width, is_preloaded in ((64, True), (64, False), (128, True)):
        most = 1024 if is_preloaded else 4096
        programs = [each for each, _ in attention_kernels.PLANS if each <= most] + [most]
        for plan in {attention_kernels.plan(each, 1, width) for each in programs}:
            constants = {
                "HEADS": 2, "GROUP": 7, "GROUP_PADDED": 16, "WIDTH": width, "WIDTH_PADDED": width,
                "PAGE": 16, "KEYS": plan.keys, "SPLITS": plan.splits, "WINDOWED": False,
                "ROTATED": True, "NORMED": width == 128, "PRELOADED": is_preloaded, "CHAINED": 1,
            }  # fmt: skip
            if width == 64:
                constants |= {"query_norm": None, "key_norm": None}
            types = {"scale": "fp32", "weight": "*fp32"}
            if plan.splits == 1:
                types |= {"partial": HALF, "weight": HALF}
            compile_kernel(
                attention_kernels.attention_kernel, constants, types,
                num_warps=plan.warps, num_stages=plan.stages,
            )  # fmt: skip


def compile_strips() -> None:
    for strips in divisions.STRIPS:
        rows = max(8, strips.most)
        for strip, gated in ((strips.inward, False), (strips.gates, True)):
            constants = {
                "K": 896, "COLUMNS": strip.columns, "ROWS": rows, "DEPTH": strip.depth,
                "SLABS": 0 if strip.stages else divisions.SLABS, "GATED": gated,
                "BIASED": not gated, "STAGES": strip.stages, "CHAINED": 1,
            }  # fmt: skip
            constants |= {"bias": None} if gated else {}
            compile_kernel(chained_kernels.product_kernel, constants, num_warps=strip.warps)
        for strip, depth in ((strips.outward, 896), (strips.down, 4864)):
            constants = {
                "K": depth, "COLUMNS": strip.columns, "ROWS": rows, "DEPTH": strip.depth,
                "CHAINED": 1,
            }  # fmt: skip
            compile_kernel(chained_kernels.parts_kernel, constants, num_warps=strip.warps)


def compile_tiles() -> None:
    tiles = [
        ("INWARD", divisions.INWARD, 896), ("OUTWARD", divisions.OUTWARD, 896),
        ("OUTWARD", divisions.OUTWARD[:1], 576), ("DOWN", divisions.DOWN, 4864),
    ]  # fmt: skip
    for name, every, depth in tiles:
        for tile in every:
            constants = {
                "K": depth, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
                "BIASED": name == "INWARD", "STAGES": tile.stages, "CHAINED": 1,
            }  # fmt: skip
            constants |= {} if name == "INWARD" else {"bias": None}
            types = {"out": "*fp32"} if tile.parts > 1 else {}
            compile_kernel(chained_kernels.tile_kernel, constants, types, num_warps=tile.warps)


def compile_the_rest() -> None:
    widths = {"WIDTH": 896, "WIDTH_PADDED": 1024}
    types = {"scale": HALF}
    letters = {"PAGE": 16, "FIELDS": graphs.FIELDS, "INPUTS": graphs.INPUTS}
    for width in (1024, 8192):
        constants = {**letters, "WIDTH": width - 128, "WIDTH_PADDED": width}
        warps = chained.begin_warps(width)
        compile_kernel(chained_kernels.begin_kernel, constants, types, num_warps=warps)
    types_of_places = {"tokens": "*i64", "places": "*i64"}
    constants = {**letters, "BLOCK": 128}
    compile_kernel(step_kernels._begin_kernel, constants, types_of_places, num_warps=4)
    for parts, when in ((1, 1), (7, 2)):
        constants = {**widths, "PARTS": parts, "PARTS_PADDED": 8 if parts > 1 else 1}
        parts_type = {} if parts > 1 else {"parts": HALF}
        compile_kernel(
            chained_kernels.settle_kernel, {**constants, "CHAINED": when}, types | parts_type,
            num_warps=8,
        )  # fmt: skip
    compile_kernel(chained_kernels.gate_kernel, {"BLOCK": 1024, "CHAINED": 1}, num_warps=4)
    constants = {"WIDTH": 64, "WIDTH_PADDED": 64, "SPLITS": 16, "CHAINED": 1}
    compile_kernel(attention_kernels._combine_kernel, constants, {"weight": "*fp32"}, num_warps=1)
    for raw, with_letters in ((False, True), (True, True), (True, False)):
        constants = {
            "TILE": step_kernels.TILE, "RAW": raw, "LETTERS": graphs.LETTERS,
            "CHAINED": with_letters,
        }  # fmt: skip
        constants |= {} if with_letters else {"next_letter": None}
        types = {"logits": HALF, "found": "*fp32", "out": "*i32"}
        compile_kernel(step_kernels._tile_kernel, constants, types, num_warps=8)
        constants |= {"TILES": 64, "GROUP": constants.pop("TILE") // 64}
        constants |= {} if with_letters else {"answers": None}
        compile_kernel(step_kernels._choose_kernel, constants, types, num_warps=8)


if __name__ == "__main__":
    compile_attention()
    compile_strips()
    compile_tiles()
    compile_the_rest()

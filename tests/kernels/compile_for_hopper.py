"""Compiles the kernels of PDL steps for a Hopper GPU, which need not be there.

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
    graphs,
    pdl_kernels,
    pdl_steps,
    step_kernels,
    tile_config,
)
from caldera.rollout.native.sampler import TILE

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232448
HALF = "*bf16"
POINTERS = {
    "pointers": "*i64", "inputs": "*i32", "tables": "*i32", "newest": "*i64",
    "messages": "*i32", "next_message": "*i32", "replies": "*i32",
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
                "ROTATED": True, "NORMED": width == 128, "PRELOADED": is_preloaded, "PDL": 1,
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


def compile_layer_tiles() -> None:
    for layer_tiles in tile_config.LAYER_TILES:
        rows = max(8, layer_tiles.most)
        for tile, gated in ((layer_tiles.qkv_proj, False), (layer_tiles.gate_up_proj, True)):
            constants = {
                "K": 896, "COLUMNS": tile.columns, "ROWS": rows, "DEPTH": tile.depth,
                "SLABS": 0 if tile.stages else tile_config.SLABS, "GATED": gated,
                "BIASED": not gated, "STAGES": tile.stages, "PDL": 1,
            }  # fmt: skip
            constants |= {"bias": None} if gated else {}
            compile_kernel(pdl_kernels.product_kernel, constants, num_warps=tile.warps)
        for tile, depth in ((layer_tiles.o_proj, 896), (layer_tiles.down_proj, 4864)):
            constants = {
                "K": depth, "COLUMNS": tile.columns, "ROWS": rows, "DEPTH": tile.depth,
                "PDL": 1,
            }  # fmt: skip
            compile_kernel(pdl_kernels.split_k_kernel, constants, num_warps=tile.warps)


def compile_tiles() -> None:
    tiles = [
        ("QKV_TILES", tile_config.QKV_TILES, 896), ("O_TILES", tile_config.O_TILES, 896),
        ("O_TILES", tile_config.O_TILES[:1], 576), ("DOWN_TILES", tile_config.DOWN_TILES, 4864),
    ]  # fmt: skip
    for name, every, depth in tiles:
        for tile in every:
            constants = {
                "K": depth, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
                "BIASED": name == "QKV_TILES", "STAGES": tile.stages, "PDL": 1,
            }  # fmt: skip
            constants |= {} if name == "QKV_TILES" else {"bias": None}
            types = {"out": "*fp32"} if tile.split_k > 1 else {}
            compile_kernel(pdl_kernels.tile_kernel, constants, types, num_warps=tile.warps)


def compile_the_rest() -> None:
    widths = {"WIDTH": 896, "WIDTH_PADDED": 1024}
    types = {"scale": HALF}
    messages = {"PAGE": 16, "FIELDS": graphs.FIELDS, "INPUTS": graphs.INPUTS}
    for width in (1024, 8192):
        constants = {**messages, "WIDTH": width - 128, "WIDTH_PADDED": width}
        warps = pdl_steps.begin_warps(width)
        compile_kernel(pdl_kernels.begin_kernel, constants, types, num_warps=warps)
    types_of_places = {"tokens": "*i64", "places": "*i64"}
    constants = {**messages, "BLOCK": 128}
    compile_kernel(step_kernels._begin_kernel, constants, types_of_places, num_warps=4)
    for parts, when in ((1, 1), (7, 2)):
        constants = {**widths, "PARTS": parts, "PARTS_PADDED": 8 if parts > 1 else 1}
        parts_type = {} if parts > 1 else {"parts": HALF}
        compile_kernel(
            pdl_kernels.add_norm_kernel, {**constants, "PDL": when}, types | parts_type,
            num_warps=8,
        )  # fmt: skip
    compile_kernel(pdl_kernels.gate_kernel, {"BLOCK": 1024, "PDL": 1}, num_warps=4)
    constants = {"WIDTH": 64, "WIDTH_PADDED": 64, "SPLITS": 16, "PDL": 1}
    compile_kernel(attention_kernels._combine_kernel, constants, {"weight": "*fp32"}, num_warps=1)
    for raw, with_mailbox in ((False, True), (True, True), (True, False)):
        constants = {
            "TILE": TILE, "RAW": raw, "MESSAGES": graphs.MESSAGES,
            "PDL": with_mailbox,
        }  # fmt: skip
        constants |= {} if with_mailbox else {"next_message": None}
        types = {"logits": HALF, "found": "*fp32", "out": "*i32"}
        compile_kernel(step_kernels._tile_kernel, constants, types, num_warps=8)
        constants |= {"TILES": 64, "GROUP": constants.pop("TILE") // 64}
        constants |= {} if with_mailbox else {"replies": None}
        compile_kernel(step_kernels._choose_kernel, constants, types, num_warps=8)


if __name__ == "__main__":
    compile_attention()
    compile_layer_tiles()
    compile_tiles()
    compile_the_rest()

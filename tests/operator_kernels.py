"""The kernels that the operator's GPU tests launch, to compile where there is no GPU.

    TILELANG_CACHE_DIR=... PYTHONPATH=kernel:.:tests python tests/operator_kernels.py

fills the cache on disk. But for the sweep over drawn calls, which takes both tiles, the tests'
batches are small enough for the narrow one.
"""

from functools import partial

import torch
from test_operator import HQ, HV
from test_operator_sweep import GPU_VARIANTS, WIDE_VARIANTS, Variant

from gdn_prefill import operator_forward
from gdn_prefill.dispatch import PRODUCTS
from gdn_prefill.kernels.preprocess import OperatorPreprocessConfig
from gdn_prefill.kernels.preprocess_fused import PASS_CONFIGS, operator_preprocess_kernel
from gdn_prefill.operator_forward import NARROW_TILE
from gdn_prefill.preprocess import HEAD_DIM
from gdn_prefill.specialisations import THREE_SEGMENTS, Specialisation
from gdn_prefill.split import CorePlan
from gdn_prefill.variants import Usage, compile_variant, operator_variants

FP32, BF16, FP16 = "float32", "bfloat16", "float16"
PACKED = {"cu_seqlens": "int32"}
STATE = {"initial_state": FP32}

# Of test_operator_gpu.py, and the layer of examples/gdn_layer.py.
USAGES = (
    Usage(),
    Usage(**STATE),
    Usage(l2norm=True),
    Usage(**PACKED),
    Usage(**PACKED, l2norm=True),
    Usage(**PACKED, kept_states="h"),
    Usage(**PACKED, **STATE),
    Usage(**PACKED, **STATE, l2norm=True),
    Usage(**PACKED, **STATE, l2norm=True, state_v_first=True),
    Usage(**PACKED, **STATE, l2norm=True, state_v_first=True, kept_states="h"),
    Usage(**PACKED, l2norm=True, state_v_first=True, gate="raw"),
    *(Usage(**PACKED, initial_state=dtype, final_state=dtype) for dtype in (BF16, FP16)),
    *(
        Usage(
            cu_seqlens="int64",
            **STATE,
            l2norm=True,
            state_v_first=True,
            gate="raw",
            dt_bias=True,
            gate_dtype=dtype,
            beta="sigmoid",
            beta_dtype=dtype,
        )
        for dtype in (FP32, BF16)
    ),
)
OTHER_HEADS = (Usage(**PACKED, l2norm=True), Usage(l2norm=True))
FP16_USAGES = (Usage(**PACKED, l2norm=True), Usage(l2norm=True))


def of_variant(variant: Variant, plans: list[CorePlan]) -> tuple[Specialisation, ...]:
    """Both stages of a call of test_operator_sweep.py."""
    gate, _, rest = variant.gate.partition(" ")
    final = None if variant.final == "none" else variant.final_dtype
    layouts = dict.fromkeys(operator_forward.inverse_layout(plan) for plan in plans)
    preprocess = [
        OperatorPreprocessConfig(
            *variant.heads,
            dtype=operator_forward.dtype_name(variant.dtype),
            gate=gate,
            gate_dtype=operator_forward.dtype_name(variant.gate_dtype),
            dt_bias=gate == "raw" and not rest,
            beta="twice_sigmoid" if variant.beta == "twice" else variant.beta,
            beta_dtype=operator_forward.dtype_name(variant.beta_dtype),
            l2norm=variant.l2norm,
            cu_seqlens=operator_forward.dtype_name(variant.packed),
            inverse=inverse,
        )
        for inverse in layouts
    ]
    kernels = [
        operator_forward.Kernel(operator_preprocess_kernel, config, PASS_CONFIGS)
        for config in preprocess
    ]
    kept = variant.kept_dtype if variant.kept else None
    for plan in plans:
        kernels += operator_forward.forward_kernels(
            plan,
            *variant.heads,
            variant.dtype,
            variant.l2norm,
            variant.packed is not None,
            variant.initial,
            final,
            kept,
            variant.v_first,
        ).values()
    return tuple(
        Specialisation(config.name, partial(factory, config), dict(pass_configs))
        for factory, config, pass_configs in kernels
    )


def narrow_plans(variant: Variant) -> list[CorePlan]:
    """The plans by which the dispatch runs such calls, as they are small."""
    plans = [CorePlan(NARROW_TILE)]
    twice = variant.beta == "twice"
    fixed = operator_forward.is_fixed(variant.batch_invariant, bool(variant.kept), twice)
    if not fixed and variant.packed is None:
        plans.append(CorePlan(NARROW_TILE, THREE_SEGMENTS, PRODUCTS))
    return plans


def kernels() -> list[Specialisation]:
    """None twice."""
    items = [
        *operator_variants([(HQ, HV)], (BF16,), USAGES),
        *operator_variants([(HQ, HV)], (FP16,), FP16_USAGES),
        *operator_variants([(2, 8)], (BF16,), OTHER_HEADS),
    ]
    narrow = [item for item in items if getattr(item.build.args[0], "block_dv", 64) == 64]
    for variant in GPU_VARIANTS:
        narrow += of_variant(variant, narrow_plans(variant))
    wide = [item for v in WIDE_VARIANTS for item in of_variant(v, [CorePlan(HEAD_DIM)])]
    return list({item.name: item for item in narrow + wide}.values())


def main() -> None:
    items = kernels()
    for number, item in enumerate(items, 1):
        compile_variant(item)
        print(f"{number}/{len(items)} {item.name}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

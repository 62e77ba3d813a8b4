"""How to apply each operator that has a rule to random operands."""

from gradprune.passes.registry import rules
from gradprune.passes.rules.opaque import OPAQUE
from tests.passes.catalogue import backwards, indexing, pointwise, products, reductions, views
from tests.passes.catalogue.cases import CASES

__all__ = ["CASES", "UNTRIED", "backwards", "indexing", "pointwise", "products", "reductions", "views"]

UNTRIED = {
    # Python functions; conversions and creation of other front ends; numbers that only a trace has
    *(name for name in rules() if not name.startswith("aten.") or name == "aten._local_scalar_dense.default"),
    # no kernel on a CPU, or none that takes these arguments directly
    *(name for name in rules() if "cudnn" in name or "_flash_attention_backward" in name or "efficient" in name),
    "aten._fused_rms_norm_backward.default",
    "aten._reshape_alias.default",
    "aten.addbmm.default",
    "aten.convolution.default",
    "aten._convolution.default",
    "aten.rrelu_with_noise_backward.default",
    "aten.as_strided_scatter.default",
    *OPAQUE,
}

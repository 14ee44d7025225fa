"""The order of HLO's attributes in the methods that take them as positional arguments."""

from __future__ import annotations

from typing import Final

_PLACES: Final = (
    "input_batch_dimension", "input_feature_dimension", "kernel_input_feature_dimension",
    "kernel_output_feature_dimension", "output_batch_dimension", "output_feature_dimension",
    "input_spatial_dimensions", "kernel_spatial_dimensions", "output_spatial_dimensions",
)  # fmt: skip
_GROUPS: Final = ("feature_group_count", "batch_group_count", "precision_config")
# For each operation, the names of its attributes in the order of the method's arguments.
ATTRIBUTES: Final[dict[str, tuple[str, ...]]] = {
    "Reshape": ("sizes", "dimensions", "inferred_dimension"),
    "DynamicReshape": ("sizes",),
    "Broadcast": ("sizes",),
    "BroadcastInDim": ("sizes", "dimensions"),
    "Gather": (
        "offset_dims", "collapsed_slice_dims", "start_index_map", "index_vector_dim",
        "indices_are_sorted", "slice_sizes",
    ),
    "Scatter": (
        "update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims",
        "index_vector_dim", "indices_are_sorted", "unique_indices",
    ),
    "Conv": (
        "window_strides", "feature_group_count", "batch_group_count", "padding", "precision_config"
    ),
    "ConvWithGeneralPadding": ("window_strides", "padding", *_GROUPS),
    "ConvWithGeneralDimensions": (
        "window_strides", *_PLACES, "padding", *_GROUPS
    ),
    "ConvGeneral": ("window_strides", "padding", *_PLACES, *_GROUPS),
    "ConvGeneralDilated": (
        "window_strides", "padding", "lhs_dilation", "rhs_dilation", *_PLACES, *_GROUPS
    ),
    "Convert": ("to_type",),
    "BitcastConvert": ("to_type",),
    "Pad": ("config",),
    "MaxPool": (
        "kernel_size", "stride", "batch_dimension", "feature_dimension", "spatial_dimensions",
        "padding",
    ),
    "Select": (),
    "Transpose": ("permutation",),
    "TriangularSolve": ("left_side", "lower", "unit_diagonal", "transpose_a"),
    "Clamp": (),
    "GetTupleElement": ("index",),
    "GetDimensionSize": ("dimension",),
    "SetDimensionSize": ("dimension",),
    "Rev": ("dimensions",),
}  # fmt: skip

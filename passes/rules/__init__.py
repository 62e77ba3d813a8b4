"""Transfer rules, one file per operator family. Importing this package fills the table in `registry`."""

from gradprune.passes.rules import (
    arithmetic,
    backward,
    choice,
    compare,
    creation,
    gathers,
    matmul,
    numbers,
    opaque,
    orders,
    powers,
    reductions,
    scatters,
    slices,
    unary,
    views,
)

__all__ = [
    "arithmetic",
    "backward",
    "choice",
    "compare",
    "creation",
    "gathers",
    "matmul",
    "numbers",
    "opaque",
    "orders",
    "powers",
    "reductions",
    "scatters",
    "slices",
    "unary",
    "views",
]

"""Rows by group, as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def groups_of(group_id: Tensor) -> tuple[Tensor, Tensor]:
    """The groups there are, ascending [G], and the number in [0, G) of each row's [rows]."""
    unique: Any = group_id.unique  # torch has no type for it
    groups, group = unique(return_inverse=True)
    return groups, group

"""Values of a user's code as JSON can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Return a value with numbers, texts and lists in place of NumPy's and torch's."""
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    tensor = isinstance(value, np.generic | np.ndarray) or type(value).__module__ == "torch"
    return value.tolist() if tensor and hasattr(value, "tolist") else value

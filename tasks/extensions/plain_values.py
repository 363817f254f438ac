"""Values of a user's code as JSON can hold them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Return a value with numbers, texts and lists in place of NumPy's and torch's."""
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    np = sys.modules.get("numpy")  # where nobody has imported it, no value is NumPy's
    tensor = type(value).__module__ == "torch" or (
        np and isinstance(value, np.generic | np.ndarray)
    )
    return value.tolist() if tensor and hasattr(value, "tolist") else value

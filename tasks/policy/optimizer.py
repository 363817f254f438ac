"""AdamW (arXiv 1711.05101) that trains without torch's compiler. Torch only."""

from __future__ import annotations

from typing import Any

import torch


def _plain(method: Any) -> Any:
    """Return a method without torch's wrapper that imports the compiler, as long as torch itself.

    The wrappers tell the compiler to leave these methods alone, should it compile what calls them.
    Nothing here is compiled but attention on a GPU.
    """
    return method.__wrapped__


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, to the digit."""

    add_param_group = _plain(torch.optim.AdamW.add_param_group)
    zero_grad = _plain(torch.optim.AdamW.zero_grad)
    state_dict = _plain(torch.optim.AdamW.state_dict)
    load_state_dict = _plain(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(_plain(torch.optim.AdamW.step))

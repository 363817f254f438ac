"""In which way the transformers engine samples a policy: over which cache, with what cares.

The ragged session (cache.py) is right for the families of RAGGED, each tried in a test. All others
are sampled over transformers' own caches (own_cache.py).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from tasks.engines.transformers.own_cache import Abilities

LOG = logging.getLogger(__name__)
RAGGED = {  # families of full attention, or of windows that they tell their attention
    *("apertus", "arcee", "aria_text", "bitnet", "cohere", "cohere2", "cohere2_moe"),
    *("cwm", "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe"),
    *("flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2"),
    *("gpt_oss", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "laguna", "llama", "mellum"),
    *("minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat"),
    *("nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2"),
    *("qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2"),
    "vaultgemma",
}
KINDS = {"full_attention", "sliding_attention"}  # of layers that its cache holds
WHOLE = Abilities(cached=False, padded=False)
ONE_BY_ONE = Abilities(several=False)
EQUAL = Abilities(padded=False)
ABILITIES = {  # of families whose own pass cannot do all
    "recurrent_gemma": WHOLE,  # it keeps its state in its modules
    "xlstm": WHOLE,  # its cache has another shape than its state
    # a token's position depends on how many of the tokens before are the pad token
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), WHOLE),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "xmod"), WHOLE),
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), ONE_BY_ONE),
    **dict.fromkeys(("roformer", "trocr"), EQUAL),
    # they scale queries by their place in the cache
    **dict.fromkeys(("inkling_text", "llama4_text"), EQUAL),
}


def is_ragged(config: Any) -> bool:
    """Return whether the ragged session is right for a policy of this config."""
    text = config.get_text_config(decoder=True)
    return text.model_type in RAGGED and KINDS.issuperset(getattr(text, "layer_types", None) or ())


def abilities_of(config: Any) -> Abilities:
    """Return what the own pass of a family can do."""
    return ABILITIES.get(config.get_text_config(decoder=True).model_type, Abilities())


@cache
def say(family: str, abilities: Abilities) -> None:
    """Say once how the policies of a family are sampled, and why."""
    how = "over transformers' own caches"
    if not abilities.cached:
        how = "without a cache, the whole context for each token, which is slow"
    elif not abilities.several:
        how += ", and what is new in a context is computed a token at a time"
    LOG.warning(
        "the policy (%s) is sampled %s: the faster cache of keys and values is right for families "
        "of full attention or known windows (tasks/engines/transformers/ways.py, RAGGED)",
        family,
        how,
    )

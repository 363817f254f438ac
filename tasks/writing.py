"""How texts are written in the world's scripts."""

from __future__ import annotations

# Scripts that put no space between words, for a character class of the package ``regex``.
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"

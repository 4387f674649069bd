"""Words that names in files have in place of today's, whatever the model: TensorFlow's for norms, torch's before parametrizations."""

from __future__ import annotations

import re

WORDS = (
    (re.compile(r"LayerNorm\.gamma(?!\w)"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta(?!\w)"), "LayerNorm.bias"),
    (re.compile(r"\.weight_g(?!\w)"), ".parametrizations.weight.original0"),
    (re.compile(r"\.weight_v(?!\w)"), ".parametrizations.weight.original1"),
    (re.compile(r"^(model\.language_model|language_model\.model)\.model(?!\w)"), "model.language_model"),
)
"""What transformers replaces in the names of every file that it loads (the "legacy" entries of `transformers/conversion_mapping.py`)."""


def todays_words(name: str) -> str:
    """A name with today's words in place of older ones.

    >>> todays_words("bert.embeddings.LayerNorm.gamma"), todays_words("conv.weight_g")
    ('bert.embeddings.LayerNorm.weight', 'conv.parametrizations.weight.original0')
    """
    for expression, word in WORDS:
        name = expression.sub(word, name, count=1)
    return name

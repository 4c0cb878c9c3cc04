"""HarnessLM by itself, with scores that no model gave."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.evaluate.harness.lm import NEVER, HarnessLM
from lt2_platform.evaluate.harness.votes import Voted


def test_what_is_no_number_is_never_chosen_and_counted():
    """lm-eval takes the largest by argmax, and numpy's takes a NaN for that."""
    nothing: Any = None
    lm = HarnessLM(nothing, ByteTokenizer(), max_length=64, batch_size=4)
    given = iter([(-2.0, False), (math.nan, False), Voted(math.nan, True, (math.nan, -1.0))])
    lm.score = lambda pairs: dict(zip(pairs, given, strict=True))
    found = lm._loglikelihood_tokens([(("what", text), [1], [place]) for place, text in enumerate("abc")])
    assert found == [(-2.0, False), NEVER, NEVER]
    assert int(np.argmax([score for score, _ in found])) == 0
    assert lm.problems == {"not_a_number": 2}

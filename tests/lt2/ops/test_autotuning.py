"""fla's autotuning: once per machine and kernel, never again because documents are packed otherwise.

Packed rows reach fla flattened to B·L tokens, so from batch to batch only the number of documents changes. What this
reads in fla's source is what keeps that from tuning anew.
"""

import importlib.util
import re
from pathlib import Path

import pytest

FAMILIES = ("common", "delta_rule", "gated_delta_rule", "gla", "kda", "nsa", "simple_gla", "utils/cumsum.py")
LENGTHS = {"T", "L", "N", "NT", "NS", "total_tokens", "num_seqs", "cu_seqlens", "max_seqlen"}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla is not installed")


def fla() -> Path:
    spec = importlib.util.find_spec("fla")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.mark.parametrize("family", FAMILIES)
def test_no_autotuner_is_keyed_by_a_length_or_a_number_of_documents(family):
    found = 0
    place = fla() / "ops" / family
    for file in place.rglob("*.py") if place.is_dir() else [place]:
        for key in re.findall(r"\bkey=\[([^\]]*)\]", file.read_text()):
            names = set(re.findall(r"\w+", key))
            found += 1
            assert not names & LENGTHS, f"{file}: {names}"
    assert found


def test_results_are_kept_in_tritons_cache_folder():
    """Which every rank of a machine, and every later start, reads."""
    settings = (fla() / "utils/env.py").read_text()
    assert re.search(r"FLA_CACHE_RESULTS = os.getenv..FLA_CACHE_RESULTS., .1.. == .1.", settings)
    for name in ("gated_delta_rule/wy_fast.py", "common/chunk_delta_h.py", "common/chunk_o.py", "kda/wy_fast.py"):
        content = (fla() / "ops" / name).read_text()
        assert content.count("**autotune_cache_kwargs") == content.count("autotune(") > 0, name

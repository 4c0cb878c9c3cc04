"""Which mixer runs where, against the placements of the paper's Table 3 written out by hand."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lt2.config import ModelConfig
from lt2.layout import draw_layers, layout, realised_ratio, weights_per_layer

SIZES = {"vocab_size": 23, "dim": 16, "num_heads": 2, "ffn_hidden": 24}
HYBRID = {"type": "hybrid", "attention": {"type": "full"}, "mixer": {"type": "gdn"}}


def config(n_layers: int, n_loops: int = 2, **fields) -> ModelConfig:
    return ModelConfig.model_validate({**SIZES, "n_layers": n_layers, "n_loops": n_loops, "layout": fields})


def attention(made: ModelConfig, **options) -> list[list[int]]:
    """Of each loop, the layers that run full attention."""
    schedule = layout(made, **options)
    assert {len(row) for row in schedule} == {made.n_layers}
    return [[layer for layer, spec in enumerate(row) if spec.type == "full"] for row in schedule]


@pytest.mark.parametrize(
    ("ratio", "pattern", "n_layers", "layers"),
    [
        ("1:4", "interleave", 20, [4, 9, 14, 19]),
        ("1:4", "bookend", 20, [0, 1, 18, 19]),
        ("1:4", "front", 20, [0, 1, 2, 3]),
        ("1:4", "back", 20, [16, 17, 18, 19]),
        ("1:1", "interleave", 6, [1, 3, 5]),
        ("1:1", "bookend", 6, [0, 1, 5]),  # the odd one is at the bottom
        ("2:3", "interleave", 10, [3, 4, 8, 9]),
        ("1:4", "interleave", 8, [4]),  # a period that is cut off has no attention
        ("1:4", "bookend", 8, [0]),
        ("1:4", "back", 8, [7]),
        ("1:0", "interleave", 3, [0, 1, 2]),
        ("0:1", "interleave", 3, []),
        ("0:1", "bookend", 3, []),
    ],
)
def test_a_hybrid_over_depth_has_attention_in_these_layers_of_every_loop(ratio, pattern, n_layers, layers):
    made = config(n_layers, n_loops=3, **HYBRID, ratio=ratio, pattern=pattern)
    assert attention(made) == [layers] * 3
    assert {spec.type for row in layout(made) for spec in row} <= {"full", "gdn"}


def test_a_ratio_that_the_depth_has_no_room_for():
    for ratio in ("2:4", "1:4"):
        with pytest.raises(ValidationError, match=f"ratio {ratio} over 4 layers leaves no attention layer; .* least 5"):
            config(4, **HYBRID, ratio=ratio)
    assert attention(config(5, **HYBRID, ratio="2:4")) == [[4]] * 2


@pytest.mark.parametrize(
    ("ratio", "n_layers", "text"),
    [("1:4", 20, "4 of 20 layers"), ("1:6", 20, "2 of 20 layers (1:9 for 1:6)"), ("2:8", 10, "2 of 10 layers")],
)
def test_what_became_of_a_ratio(ratio, n_layers, text):
    assert realised_ratio(ratio, n_layers) == text


def test_a_schedule_over_loops_has_one_mixer_in_each():
    windows = [{"type": "full"}, {"type": "window", "window": 8}, {"type": "window", "window": 4}]
    made = config(4, n_loops=3, type="loops", mixers=windows)
    assert [[getattr(spec, "window", None) for spec in row] for row in layout(made)] == [[None] * 4, [8] * 4, [4] * 4]
    assert [len(specs) for specs in weights_per_layer(made)] == [1] * 4  # masks over the same weights
    with pytest.raises(ValidationError, match="3 entries for n_loops 2"):
        config(4, n_loops=2, type="loops", mixers=windows)


def test_kept_layers_are_those():
    kept = {"type": "kept", "attention": {"type": "full"}, "mixer": {"type": "gdn"}}
    assert attention(config(5, **kept, kept=[3, 0])) == [[0, 3]] * 2
    assert attention(config(5, **kept, kept=[3, 0]), draw=[1]) == [[1]] * 2
    for both in (False, True):
        held = weights_per_layer(config(5, **kept, kept=[3, 0], both=both))
        assert [len(specs) for specs in held] == [1 + both] * 5
    for wrong in ([5], [-1], [1, 1]):
        with pytest.raises(ValidationError, match="give different ones of 0 to 4"):
            config(5, **kept, kept=wrong)


def test_a_random_layout_draws_its_share_anew_each_step():
    made = config(10, type="random", attention={"type": "full"}, mixer={"type": "gdn"}, fraction=0.3)
    draws = [draw_layers(made.layout, 10, step) for step in range(300)]
    assert all(len(set(draw)) == 3 and draw == tuple(sorted(draw)) for draw in draws)
    assert draws == [draw_layers(made.layout, 10, step) for step in range(300)]
    counts = [sum(layer in draw for draw in draws) for layer in range(10)]
    assert min(counts) > 50  # 90 ± 8 each, were they drawn evenly
    assert max(counts) < 130
    assert attention(made) == [list(draws[0])] * 2  # without a draw, step 0's
    assert [len(specs) for specs in weights_per_layer(made)] == [2] * 10  # any layer may run either

"""Options of `trainer.diloco`: their rules, each in one sentence."""

import pytest

from levanter_diloco.options.config import DiLoCoConfig
from levanter_diloco.options.outer import SgdConfig


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sync_period": 0}, "sync_period (0) must be at least 1; 100 works."),
        ({"sync_period": -5}, "sync_period (-5) must be at least 1; 100 works."),
        ({"num_fragments": 0}, "num_fragments (0) must be at least 1 (vanilla); 1 works."),
        ({"mixing_alpha": -0.1}, "mixing_alpha (-0.1) must lie in [0, 1]; 0.5 works."),
        ({"mixing_alpha": 1.5}, "mixing_alpha (1.5) must lie in [0, 1]; 0.5 works."),
        ({"mixing_alpha": float("nan")}, "mixing_alpha (nan) must lie in [0, 1]; 0.5 works."),
        ({"partition": "rows"}, "partition (rows) must be one of layers, balanced; layers works."),
        ({"wire": "fp8"}, "wire (fp8) must be one of f32, bf16, int8, int4, e3m0; f32 works."),
        ({"wire_block": 7}, "wire_block (7) must be even and at least 2; 256 works."),
        ({"wire_block": 0}, "wire_block (0) must be even and at least 2; 256 works."),
        ({"wire_rounding": "up"}, "wire_rounding (up) must be one of nearest, stochastic; nearest works."),
        ({"error_feedback": True}, "error_feedback (True) must be false with wire f32; wire: int4 works."),
        ({"island_data": "split"}, "island_data (split) must be one of shared, sharded; shared works."),
        (
            {"island_data": [{"web": 1.0}, {"web": 0.0}]},
            "island_data ([{'web': 1.0}, {'web': 0.0}]) must give each island weights that are finite numbers of at "
            "least 0, not all 0; [{'web': 1.0}, {'code': 1.0}] works.",
        ),
        (
            {"island_data": [{"web": float("nan"), "code": 1.0}]},
            "island_data ([{'web': nan, 'code': 1.0}]) must give each island weights that are finite numbers of at "
            "least 0, not all 0; [{'web': 1.0}, {'code': 1.0}] works.",
        ),
        (
            {"island_data": []},
            "island_data ([]) must give each island weights that are finite numbers of at least 0, not all 0; "
            "[{'web': 1.0}, {'code': 1.0}] works.",
        ),
        ({"drop_rate": 1.5}, "drop_rate (1.5) must lie in [0, 1]; 0.1 works."),
        ({"drop_rate": float("nan")}, "drop_rate (nan) must lie in [0, 1]; 0.1 works."),
        ({"join_moments": "old"}, "join_moments (old) must be one of fresh, copied; fresh works."),
        ({"weights": "equal"}, "weights (equal) must be one of uniform, tokens; uniform works."),
        ({"weights": []}, "weights ([]) must be finite numbers of at least 0, not all 0; [1.0, 2.0] works."),
        (
            {"weights": [0.0, 0.0]},
            "weights ([0.0, 0.0]) must be finite numbers of at least 0, not all 0; [1.0, 2.0] works.",
        ),
        (
            {"weights": [1.0, float("inf")]},
            "weights ([1.0, inf]) must be finite numbers of at least 0, not all 0; [1.0, 2.0] works.",
        ),
        *(
            (
                {"schedule_islands": counts},
                f"schedule_islands ({counts}) must be [step, count] pairs from step 0 on, the steps rising, the "
                "counts at least 1; [[0, 1], [100, 2]] works.",
            )
            for counts in ([], [[1, 2]], [[0, 2], [0, 3]], [[0, 2], [5, 0]], [[0, 2, 3]], [[0, 1], [9, 2], [5, 1]])
        ),
        ({"guard_factor": 1.0}, "guard_factor (1.0) must be finite and above 1; 10 works."),
        ({"guard_factor": float("nan")}, "guard_factor (nan) must be finite and above 1; 10 works."),
        (
            {"guard": False, "guard_factor": 10.0},
            "guard_factor (10.0) must be left out while guard is false; guard: true works.",
        ),
        ({"islands_per_slot": 0}, "islands_per_slot (0) must be at least 1; 2 works."),
        ({"ici_islands": 0}, "ici_islands (0) must be at least 1, or -1 to infer it; 2 works."),
        ({"ici_islands": -2}, "ici_islands (-2) must be at least 1, or -1 to infer it; 2 works."),
        ({"dcn_islands": 0}, "dcn_islands (0) must be at least 1, or -1 to infer it; 2 works."),
        (
            {"sync_period": 10, "overlap_steps": 10},
            "overlap_steps (10) must be at least 0 and below the effective period (10 steps); 9 works.",
        ),
        (
            {"overlap_steps": -1},
            "overlap_steps (-1) must be at least 0 and below the effective period (100 steps); 99 works.",
        ),
        (
            # The effective period counts: 37*round(100/37) = 111, not 100.
            {"num_fragments": 37, "overlap_steps": 111},
            "overlap_steps (111) must be at least 0 and below the effective period (111 steps); 110 works.",
        ),
    ],
)
def test_rule_broken_names_option_value_rule_and_a_value_that_works(options: dict, sentence: str):
    with pytest.raises(ValueError) as error:
        DiLoCoConfig(**options)
    assert str(error.value) == f"trainer.diloco.{sentence}"


@pytest.mark.parametrize(
    "options",
    [
        {"sync_period": 1},
        {"sync_period": 1, "num_fragments": 5, "overlap_steps": 4},
        {"mixing_alpha": 0},
        {"mixing_alpha": 1},
        {"ici_islands": -1},
        {"drop_rate": 1, "weights": [0.0, 1.0], "schedule_islands": [[0, 1]], "guard_factor": 1.5},
        {"outer": SgdConfig(learning_rate=0.0, momentum=0.0)},
    ],
)
def test_edges_of_the_legal_range_work(options: dict):
    DiLoCoConfig(**options)

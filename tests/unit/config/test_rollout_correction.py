"""Reading the keys of rollout correction, its presets, and what is refused."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from caldera.config.rollout_correction import (
    ROLLOUT_CORRECTION_PRESETS,
    RS_STATISTICS,
    Rejection,
    RolloutCorrectionConfig,
    WeightBounds,
    check_rollout_correction,
    parse_rejections,
    parse_weight_bounds,
    rollout_correction_preset,
)
from caldera.errors import ConfigError

KEY = "algorithm.rollout_correction"
LN2 = math.log(2)
LN4 = math.log(4)


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (2, WeightBounds(None, 2.0)),
        (2.5, WeightBounds(None, 2.5)),
        ("2.5", WeightBounds(None, 2.5)),
        (" 1e1 ", WeightBounds(None, 10.0)),
        ("0.5_5.0", WeightBounds(0.5, 5.0)),
        ("0.5_5", WeightBounds(0.5, 5.0)),
        ("1e-3_1e3", WeightBounds(0.001, 1000.0)),
    ],
)
def test_weight_bounds(threshold: object, expected: WeightBounds) -> None:
    assert parse_weight_bounds(threshold) == expected


def rejection(statistic: str, lower: float, upper: float) -> Rejection:
    return Rejection(statistic, pytest.approx(lower), pytest.approx(upper))  # type: ignore[arg-type]


@pytest.mark.parametrize("statistic", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_k1_has_bounds_of_the_ratio_turned_around(statistic: str) -> None:
    assert parse_rejections(statistic, "0.5_4.0") == [rejection(statistic, -LN4, LN2)]
    assert parse_rejections(statistic, 4.0) == [rejection(statistic, -LN4, LN4)]
    assert parse_rejections(statistic, "4") == [rejection(statistic, -LN4, LN4)]


@pytest.mark.parametrize("statistic", [name for name in RS_STATISTICS if "k1" not in name])
def test_k2_and_k3_have_an_upper_bound(statistic: str) -> None:
    for threshold in (0.01, "0.01", ["0.01"], [0.01]):
        assert parse_rejections(statistic, threshold) == [Rejection(statistic, -math.inf, 0.01)]


@pytest.mark.parametrize("threshold", ["0.5_2.0, 0.01", ["0.5_2.0", 0.01], (2.0, "0.01"), "2,0.01"])
def test_one_bound_for_each_statistic(threshold: object) -> None:
    expected = [rejection("token_k1", -LN2, LN2), Rejection("seq_max_k3", -math.inf, 0.01)]
    assert parse_rejections("token_k1, seq_max_k3", threshold) == expected


@pytest.mark.parametrize("threshold", [3.0, "3", [3.0]])
def test_one_bound_for_all_statistics(threshold: object) -> None:
    third = rejection("token_k1", -math.log(3), math.log(3))
    assert parse_rejections("token_k1,token_k2", threshold) == [
        third,
        Rejection("token_k2", -math.inf, 3.0),
    ]


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"rollout_is": "batch"}, "rollout_is='batch'", "token, sequence"),
        ({"rollout_is": "token", "rollout_is_threshold": None},
         "rollout_is_threshold=None", "positive number"),
        ({"rollout_is": "token", "rollout_is_threshold": True},
         "rollout_is_threshold=True", "positive number"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"},
         "rollout_is_threshold='two'", "'lo_hi'"),
        ({"rollout_is": "token", "rollout_is_threshold": "1_2_3"},
         "rollout_is_threshold='1_2_3'", "'lo_hi'"),
        ({"rollout_is": "token", "rollout_is_threshold": 0},
         "rollout_is_threshold=0", "greater than 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "nan"},
         "rollout_is_threshold='nan'", "finite"),
        ({"rollout_is": "token", "rollout_is_threshold": "-0.5_2.0"},
         "rollout_is_threshold='-0.5_2.0'", "greater than 0"),
        ({"rollout_is": "sequence", "rollout_is_threshold": "2.0_2.0"},
         "rollout_is_threshold='2.0_2.0'", "lo must be smaller than hi"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0},
         "rollout_rs='seq_max_k1'", ", ".join(RS_STATISTICS)),
        ({"rollout_rs": "token_k1,", "rollout_rs_threshold": 2.0},
         "rollout_rs='token_k1,'", "'' is not one of"),
        ({"rollout_rs": "token_k2,token_k2", "rollout_rs_threshold": 2.0},
         "rollout_rs='token_k2,token_k2'", "twice"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold=null", "needs a bound"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "2.0,1.0,0.5"},
         "rollout_rs_threshold='2.0,1.0,0.5'", "3 bounds for the 2 statistics"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": [2.0, 3.0]},
         "rollout_rs_threshold=[2.0, 3.0]", "takes 1 or 1"),
        ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.5_2.0"},
         "rollout_rs_threshold='0.5_2.0'", "upper bound alone"),
        ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": -0.1},
         "rollout_rs_threshold=-0.1", "greater than 0"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5},
         "rollout_rs_threshold=0.5", "above 1, or 'lo_hi'"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"},
         "rollout_rs_threshold='2.0_0.5'", "lo must be smaller than hi"),
    ],
)  # fmt: skip
def test_refused_values(values: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_rollout_correction(RolloutCorrectionConfig(**values))
    assert str(raised.value).startswith(f"{KEY}.{key}: ")
    assert words in str(raised.value)


def test_thresholds_of_what_is_off_are_not_read() -> None:
    check_rollout_correction(
        RolloutCorrectionConfig(rollout_is_threshold=None, rollout_rs_threshold="nonsense")
    )


def test_a_bound_that_cuts_weights_of_1_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_rollout_correction(
            RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="0.5_5.0")
        )
        check_rollout_correction(
            RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.0)
        )
        assert caplog.messages == []
        check_rollout_correction(
            RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=0.55)
        )
    assert f"{KEY}.rollout_is_threshold=0.55" in caplog.messages[0]


@pytest.mark.parametrize("name", ROLLOUT_CORRECTION_PRESETS)
def test_presets_do_what_their_names_say(name: str) -> None:
    preset = rollout_correction_preset(name)
    check_rollout_correction(preset)
    assert preset.bypass_mode == name.startswith("bypass")
    assert preset.loss_type == ("reinforce" if "_pg_" in name else "ppo_clip")
    geo, k3 = "geo_rs" in name, "k3_rs" in name
    statistic = "seq_mean_k1" if geo else "seq_mean_k3" if k3 else None
    assert preset.rollout_rs == ("seq_sum_k1" if name == "decoupled_seq_is_rs" else statistic)
    if "token" in name:
        assert preset.rollout_is == "token"
    elif "seq_" in name or name == "bypass_pg_is":
        assert preset.rollout_is == "sequence"
    else:
        assert preset.rollout_is is None
    assert isinstance(preset.rollout_is_threshold, str) == ("icepop" in name)


def test_there_are_nineteen_presets() -> None:
    assert len(ROLLOUT_CORRECTION_PRESETS) == 19
    assert rollout_correction_preset("disabled") == RolloutCorrectionConfig()


def test_a_preset_is_a_copy() -> None:
    rollout_correction_preset("decoupled_token_is").rollout_is_threshold = 9.0
    assert rollout_correction_preset("decoupled_token_is").rollout_is_threshold == 2.0


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"preset='decoupled_token': takes one of disabled, .*"):
        rollout_correction_preset("decoupled_token")
    with pytest.raises(ConfigError, match=r"did you mean bypass_ppo_clip\?$"):
        rollout_correction_preset("bypas_ppo_clip")

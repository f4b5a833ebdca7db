r"""The last `\boxed` of a solution."""

from __future__ import annotations

import pytest

from caldera.reward_score.hendrycks_math import last_boxed


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{5}$.", "5"),
        (r"$\fbox{5}$", "5"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} and {more}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # an escaped brace opens nothing
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        (r"$\boxed 5$", "5"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{1} \boxedminus", "1"),  # another command
        (r"\boxed{1} and then \boxed{2", None),  # cut off
        (r"\boxed{\}", None),
        (r"\boxed", None),
        ("5", None),
        ("", None),
    ],
)
def test_last_boxed(solution: str, answer: str | None) -> None:
    assert last_boxed(solution) == answer

from __future__ import annotations

import pytest

from caldera.sandbox.inside.testing import names_of_modules, names_of_the_program


@pytest.mark.parametrize(
    ("tests", "names"),
    [
        ("assert square(3) == 9", {"square"}),
        ("assert sorted(set(pick([1]))) == [1] and len(pick([])) == 0", {"pick"}),
        ("assert pow(2, 3) == 8", {"pow"}),
        ("assert str(pow(2, 3)) == '8'", {"pow"}),
        ("assert abs(sum(range(3)) - 3) < 1e-6", {"sum"}),
        ("assert sorted([2, 1]) == [1, 2]", {"sorted"}),
        ("assert len(sorted([2, 1])) == 2", {"len", "sorted"}),
        ("try:\n    max([])\nexcept ValueError:\n    pass", {"max"}),
        ("def check(candidate):\n    assert candidate(range(3)) == 3\ncheck(sum)", {"sum"}),
        ("def check(f):\n    x = [f(y) for y in 'ab']\n    assert x\ncheck(x)", {"x"}),
        ("assert bisect([1, 2], 2) == 2", {"bisect"}),
        ("assert math.isclose(half(1), 0.5)", {"half"}),
        ("import helper\nfrom re import match as m\nassert m('a', helper.x)", set()),
        ("def helper(x):\n    global kept\n    kept = x\n", set()),
        ("assert 1 + 1 == 2", set()),
    ],
)
def test_names_that_tests_use_and_do_not_define_are_the_programs(
    tests: str, names: set[str]
) -> None:
    assert names_of_the_program(tests) == names


def test_modules_are_known_by_their_attributes() -> None:
    assert names_of_modules("assert math.isclose(f(1), 1) and bisect([1])") == {"math"}
    assert names_of_modules("math = 1\nassert math.real == f()") == set()

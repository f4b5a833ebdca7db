"""The GSM8K scorer, on answers of the data set itself and on forms that models write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from caldera.errors import ConfigError
from caldera.reward_score import default_compute_score
from caldera.reward_score.gsm8k import compute_score, extract_answer

# Twenty answers of the GSM8K test set, each with its number as data preparation writes it.
# From openai/grade-school-math, Copyright (c) 2021 OpenAI, MIT License.
ANSWERS = [
    (
        "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\n"
        "She makes 9 * 2 = $<<9*2=18>>18 every day at the farmer\u2019s market.\n"
        "#### 18",
        "18",
    ),
    (
        "It takes 2/2=<<2/2=1>>1 bolt of white fiber\n"
        "So the total amount of fabric is 2+1=<<2+1=3>>3 bolts of fabric\n"
        "#### 3",
        "3",
    ),
    (
        "He sprints 3*3=<<3*3=9>>9 times\nSo he runs 9*60=<<9*60=540>>540 meters\n#### 540",
        "540",
    ),
    (
        "When Raymond's son was born Samantha was 23 - 6 = <<23-6=17>>17 years old.\n"
        "Thus it has been 31 - 17 = <<31-17=14>>14 years since Raymond's son was born.\n"
        "#### 14",
        "14",
    ),
    (
        "His first 3 customers buy 3 * 1 = <<3*1=3>>3 DVDs.\n"
        "His next 2 buy 2 * 2 = <<2*2=4>>4 DVDs.\n"
        "He sells a total of 3 + 4 + 0 = <<3+4+0=7>>7 DVDs.\n"
        "#### 7",
        "7",
    ),
    (
        "The candle burns for 5 - 1 = <<5-1=4>>4 hours.\n"
        "Thus, the candle will be 2 * 4 = <<2*4=8>>8 centimeters shorter.\n"
        "#### 8",
        "8",
    ),
    (
        "Let X be the original price of the book. The discounted price is X - X*25% "
        "= $19.50.\n"
        "Combining like terms, we get .75X = $19.50\n"
        "Dividing both sides by .75, we get X = $26.\n"
        "#### 26",
        "26",
    ),
    (
        "3 * (16.50 + 22.50 + 42) = $<<3*(16.50+22.50+42)=243>>243\n"
        "Mishka spent $243 on clothing.\n"
        "#### 243",
        "243",
    ),
    (
        "He traveled 20 miles + 15 miles = <<20+15=35>>35 miles not counting the "
        "distance between stops.\n"
        "Henry traveled 60 miles - 35 miles = <<60-35=25>>25 miles between his first "
        "and second stop.\n"
        "#### 25",
        "25",
    ),
    (
        "He spends 10*.5=<<10*.5=5>>5 hours per day\n"
        "That means he spends 5*7=<<5*7=35>>35 hours per week\n"
        "#### 35",
        "35",
    ),
    (
        "Let x be the number of silver coins Gretchen has\n"
        "Gretchen has x+30 gold coins.\n"
        "x+x+30=110\n"
        "2*x=80\n"
        "x=<<40=40>>40\n"
        "Gretchen has 40+30=<<40+30=70>>70 gold coins\n"
        "#### 70",
        "70",
    ),
    (
        "He scored 4*.25=<<4*.25=1>>1 point more in the second 20 minutes\n"
        "So he scored 4+1=<<4+1=5>>5 points in the second 20 minutes\n"
        "So in total, he scored 4+5=<<4+5=9>>9 points in the 40 minutes\n"
        "#### 9",
        "9",
    ),
    (
        "Jean has 30 - 2 = <<30-2=28>>28 lollipops\n"
        "Jean can fill up 28 / 2 = <<28/2=14>>14 bags with lollipops\n"
        "#### 14",
        "14",
    ),
    (
        "It costs him $14 to go to the movies because 7 + 7 = <<7+7=14>>14\n"
        "He can go to the movies 3 times because 42 / 14 = <<42/14=3>>3\n"
        "#### 3",
        "3",
    ),
    (
        "-48 + 21 + (-3) = <<-48+21+(-3)=-30>>-30\n"
        "-30/3 = <<-30/3=-10>>-10 degrees\n"
        "The average highest temperature recorded in Southlandia, Northlandia, and "
        "Midlandia is -10 degrees Fahrenheit.\n"
        "#### -10",
        "-10",
    ),
    (
        "Amount raised by all students was 175,000-50,000 = "
        "<<175000-50000=125000>>125,000 dollars.\n"
        "Amount raised by each student was 125,000/20 = <<125000/20=6250>>6,250 dollars.\n"
        "#### 6,250",
        "6250",
    ),
    (
        "In the second week, Boris produces 8,000/2 = <<8000/2=4000>>4,000 bars of "
        "chocolate.\n"
        "In the third week, Boris produces 8,000*3 = <<8000*3=24000>>24,000 bars of "
        "chocolate.\n"
        "In the first three weeks, Boris produces 8,000+4,000+24,000 = "
        "<<8000+4000+24000=36000>>36,000 bars of chocolate\n"
        "In the fourth week, Boris produces 50,000-36,000 = "
        "<<50000-36000=14000>>14,000 bars of chocolate.\n"
        "#### 14,000",
        "14000",
    ),
    (
        "Walter collects $500 + $1500 + $200 = $<<500+1500+200=2200>>2,200 he "
        "collects from everyone for charity.\n"
        "His lawyer has offered to donate 3 times that amount, $2,200 x 3 = "
        "$<<3*2200=6600>>6,600 that Walter's lawyer is going to donate.\n"
        "#### 6,600",
        "6600",
    ),
    (
        "Start = +<<2=2>>2 degrees\n"
        "Drop 8 degrees = 2 - 8 = -6 degrees\n"
        "Increase 3 degrees = -6 + 3 = -3 degrees\n"
        "It was -3 degrees Celsius in the morning.\n"
        "#### -3",
        "-3",
    ),
    (
        "His loan is worth 250,000*.4=$<<250000*.4=100000>>100,000\n"
        "That means he uses 100,000*.6=$<<100000*.6=60000>>60,000 to pay off debts\n"
        "So he has 100,000-60,000=$<<100000-60000=40000>>40,000 leftover\n"
        "#### 40,000",
        "40000",
    ),
]


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize(("answer", "number"), ANSWERS)
def test_the_data_set_scores_full_marks_on_itself(answer: str, number: str, method: str) -> None:
    assert compute_score(answer, number, method=method) == 1.0
    assert compute_score(answer, number + "1", method=method) == 0.0


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_training_solutions_score_full_marks(method: str) -> None:
    path = Path(__file__).parents[2] / "data" / "scorers" / "gsm8k.jsonl"
    solutions = [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()]
    numbers = [solution.rpartition("#### ")[2] for solution in solutions]
    assert len(solutions) == 37
    for solution, number in zip(solutions, numbers, strict=True):
        assert compute_score(solution, number, method=method) == 1.0
        assert compute_score(solution, f"1{number}", method=method, format_score=0.1) == 0.1


def test_the_slice_has_the_forms_that_matter() -> None:
    assert len(ANSWERS) == 20
    assert sum("," in answer.split("####")[1] for answer, _ in ANSWERS) == 4
    assert sum(number.startswith("-") for _, number in ANSWERS) == 2
    assert any(len(answer) > 300 for answer, _ in ANSWERS)


@pytest.mark.parametrize(
    ("solution", "strict", "flexible"),
    [
        ("#### 1,234,567", "1234567", "1234567"),
        ("#### -42", "-42", "-42"),
        ("#### 3.75", "3.75", "3.75"),
        ("#### -1,000.5", "-1000.5", "-1000.5"),
        ("first #### 5, no: #### 6", "6", "6"),
        ("#### 18 and 3 to spare", "18", "3"),
        ("The answer is 1,250.", None, "1250"),
        ("It costs $18.", None, "18"),
        ("#### $18", None, "18"),  # strictly, the number follows at once
        ("####18", None, "18"),
        ("The answer is 18, or so I think ...", None, "18"),
        ("nothing, at all ... - .", None, None),
        ("", None, None),
    ],
)
def test_extract_answer(solution: str, strict: str | None, flexible: str | None) -> None:
    assert extract_answer(solution, "strict") == strict
    assert extract_answer(solution, "flexible") == flexible


def test_only_the_last_300_characters_count() -> None:
    answer = "#### 18"
    assert compute_score(answer + "x" * (300 - len(answer)), "18") == 1.0
    assert compute_score(answer + "x" * (301 - len(answer)), "18") == 0.0


def test_scores_can_be_chosen() -> None:
    assert compute_score("#### 18", "18", format_score=0.1, score=2.0) == 2.0
    assert compute_score("#### 19", "18", format_score=0.1, score=2.0) == 0.1
    assert compute_score("eighteen", "18", format_score=0.1, score=2.0) == 0.0


def test_numbers_are_compared_as_text() -> None:
    assert compute_score("#### 2.50", "2.5") == 0.0
    assert compute_score("#### 1000", "1,000") == 1.0
    assert compute_score("#### 7", 7) == 1.0


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'loose'.*strict or flexible"):
        compute_score("#### 7", "7", method="loose")


def test_it_serves_its_data_source() -> None:
    assert default_compute_score("openai/gsm8k", "#### 7", "7") == 1.0
    assert default_compute_score("openai/gsm8k", "so 7", "7", method="flexible") == 1.0

"""Columns that the reward needs are missed before the run begins, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from caldera.config import PPOTrainerConfig
from caldera.data import RLHFDataset
from caldera.demo.arithmetic import build_tokenizer
from caldera.errors import ConfigError, DataError
from caldera.reward import BatchRewardManager, NaiveRewardManager
from caldera.reward_score import default_compute_score, register_scorer
from caldera.trainer.ppo.columns import check_columns

SOURCE, TRUTH = "data_source", "reward_model"
ROW = {
    "prompt": [{"role": "user", "content": "1+1="}],
    SOURCE: "caldera/arithmetic",
    TRUTH: {"ground_truth": "2"},
}
EVERY = {(column, file) for column in (SOURCE, TRUTH) for file in ("train", "val")}


def own_score(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return 1.0


class Own(NaiveRewardManager):
    """A manager that the user derived."""


class OwnData(RLHFDataset):
    """A data set that may add columns to its rows."""


class Case:
    """A run whose files lack columns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = PPOTrainerConfig()
        self.config.data.train_files = [str(folder / "train.jsonl")]
        self.config.data.val_files = [str(folder / "val.jsonl")]
        self.config.data.dataloader_num_workers = 0
        self.tokenizer = build_tokenizer()
        self.manager: Any = NaiveRewardManager(self.tokenizer, 0)
        self.kind = RLHFDataset
        self.agents = False

    def missed(self, column: str, file: str) -> bool:
        """Whether the check misses the column in that file; it is in the other one."""
        other = {"train": "val", "val": "train"}[file]
        self.write(other, ROW)
        self.write(file, {name: value for name, value in ROW.items() if name != column})
        try:
            self.check()
        except DataError as error:
            told = f"data.{file}_files: {self.folder}/{file}.jsonl has no column '{column}', "
            assert str(error).startswith(told)
            assert "custom_reward_function.path=" in str(error)
            assert "reward_model.enable=True" in str(error)
            return True
        return False

    def write(self, file: str, *rows: dict[str, Any]) -> None:
        (self.folder / f"{file}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def check(self) -> None:
        data = self.config.data
        train, val = (
            self.kind(f, self.tokenizer, data) for f in (data.train_files, data.val_files)
        )
        check_columns(self.config, self.manager, train, val, self.agents)

    def all_missed(self) -> set[tuple[str, str]]:
        return {(column, file) for column, file in EVERY if self.missed(column, file)}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize("kind", [NaiveRewardManager, BatchRewardManager])
def test_managers_need_both_columns_of_both_files(case: Case, kind: Any) -> None:
    case.manager = kind(case.tokenizer, 0)
    assert case.all_missed() == EVERY


def test_the_key_of_the_source_is_heeded(case: Case) -> None:
    case.config.data.reward_fn_key = "source"
    with pytest.raises(DataError, match=r"has no column 'source', which picks the scorer"):
        case.write("train", ROW)
        case.write("val", ROW)
        case.check()


def test_a_function_of_ones_own_needs_neither(case: Case) -> None:
    case.manager = NaiveRewardManager(case.tokenizer, 0, own_score)
    assert case.all_missed() == set()
    for file in ("train", "val"):
        case.write(file, {"prompt": "1+1="})
    case.check()


def test_files_that_are_not_read(case: Case) -> None:
    trainer = case.config.trainer
    trainer.val_before_train, trainer.test_freq = False, -1
    assert case.all_missed() == {(SOURCE, "train"), (TRUTH, "train")}
    trainer.val_only = True
    assert case.all_missed() == {(SOURCE, "val"), (TRUTH, "val")}


def test_a_reward_model_needs_no_columns_to_train_unless_it_is_served(case: Case) -> None:
    case.config.reward_model.enable = True
    assert case.all_missed() == {(SOURCE, "val"), (TRUTH, "val")}
    case.config.reward_model.rollout.name = "vllm"
    assert case.all_missed() == EVERY


def test_whoever_else_scores_needs_neither(case: Case) -> None:
    case.manager = Own(case.tokenizer, 0)
    assert case.all_missed() == set()
    case.manager = NaiveRewardManager(case.tokenizer, 0)
    case.agents = True
    assert case.all_missed() == set()


def test_a_data_set_of_ones_own_may_add_them(case: Case) -> None:
    case.kind = OwnData
    assert case.all_missed() == set()


@pytest.mark.parametrize("file", ["train", "val"])
def test_a_data_source_without_scorer_is_named_with_its_file(case: Case, file: str) -> None:
    case.write("train", ROW)
    case.write("val", ROW)
    case.write(file, ROW, {**ROW, SOURCE: "my/larger"})
    with pytest.raises(ConfigError) as raised:
        case.check()
    told = str(raised.value)
    assert told.startswith(
        f"data.{file}_files: {case.folder}/{file}.jsonl, with data_source 'caldera/arithmetic', "
        "'my/larger': no scorer serves the data source 'my/larger' (known: "
    )
    assert "openai/gsm8k" in told
    assert "custom_reward_function.path" in told and "custom_reward_function.name" in told


def test_a_data_source_needs_no_scorer_where_none_is_asked(case: Case) -> None:
    case.write("train", {**ROW, SOURCE: "my/larger"})
    case.write("val", {**ROW, SOURCE: "my/larger"})
    for manager, agents in (
        (NaiveRewardManager(case.tokenizer, 0, own_score), False),
        (Own(case.tokenizer, 0), False),
        (NaiveRewardManager(case.tokenizer, 0), True),
    ):
        case.manager, case.agents = manager, agents
        case.check()


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        ({TRUTH: {"style": "rule"}}, {}, r"no ground truth .* scorer needs: row 1 of"),
        ({TRUTH: None}, {}, r"no ground truth .* scorer needs: row 1 of .*val.jsonl"),
        ({SOURCE: None}, {}, r"'data_source' .* holds no text in row 1 of .*val.jsonl \(None\)"),
        ({SOURCE: "searchR1_nq"}, {}, r"with data_source .*'searchR1_nq': the ground truth of a"),
        ({SOURCE: "apps"}, {}, r"with data_source .*'apps': "),
        ({SOURCE: "openai/gsm8k"}, {"method": "x"}, r"reward_kwargs\.method='x': the scorer of"),
        ({"extra_info": 3}, {}, r"row 1 of .*val.jsonl: extra_info must be a dict, not a int"),
        ({"prompt": [{"role": "user", "content": "1+1" * 300}]}, {}, r"row 1 of .*: the prompt h"),
    ],
)
def test_rows_that_no_answer_could_be_scored_for(
    case: Case, change: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    case.write("train", ROW)
    case.write("val", ROW, {**ROW, **change})
    case.manager = NaiveRewardManager(case.tokenizer, 0, **options)
    with pytest.raises((ConfigError, DataError), match=told):
        case.check()


def test_options_of_a_scorer_are_tried(case: Case) -> None:
    case.write("train", {**ROW, SOURCE: "openai/gsm8k"})
    case.write("val", {**ROW, SOURCE: "openai/gsm8k"})
    case.manager = NaiveRewardManager(case.tokenizer, 0, method="flexible")
    case.check()
    case.manager = NaiveRewardManager(case.tokenizer, 0, method="lenient")
    with pytest.raises(ConfigError, match=r"train\.jsonl.*method='lenient'.*strict or flexible"):
        case.check()


TRUTHS: dict[str, Any] = {
    "null": {"ground_truth": None},
    "nan": {"ground_truth": float("nan")},
    "blank": {"ground_truth": " "},
    "no key": {"style": "rule"},
    "empty": {},
    "no struct": None,
}


def checked(case: Case, rows: list[dict[str, Any]]) -> None:
    """The check of a run whose training file has these rows behind a good one."""
    good = {"prompt": [{"role": "user", "content": "1+1="}], SOURCE: "openai/gsm8k",
            TRUTH: {"ground_truth": "2"}}  # fmt: skip
    lines = {"train": [good, *({**good, **row} for row in rows)], "val": [good]}
    sets = []
    for name, of_file in lines.items():
        file = case.folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in of_file))
        sets.append(case.kind(str(file), case.tokenizer, case.config.data))
    check_columns(case.config, case.manager, sets[0], sets[1], case.agents)


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("source", ["openai/gsm8k", "math_dapo", "searchR1_nq", "codecontests"])
def test_scorers_need_a_ground_truth(case: Case, source: str, truth: str) -> None:
    row = {SOURCE: source, TRUTH: TRUTHS[truth]}
    case.config.data.train_files = [str(case.folder / "train.jsonl")]
    with pytest.raises(DataError) as told:
        checked(case, [row] * 7)
    message = str(told.value)
    assert message.startswith(f"data.train_files: 7 of the rows of data_source {source!r} have no")
    assert "'reward_model'" in message and "custom_reward_function.path" in message
    assert f"row 1 of {case.folder}/train.jsonl, row 2" in message and "and 2 more" in message


def test_a_null_in_parquet_is_found(case: Case) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], SOURCE: "openai/gsm8k", TRUTH: {"x": 1}},
        {"prompt": [{"role": "user", "content": "a"}], SOURCE: "openai/gsm8k",
         TRUTH: {"ground_truth": "1"}},
    ]  # fmt: skip
    file = case.folder / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    dataset = RLHFDataset(str(file), case.tokenizer, case.config.data)
    with pytest.raises(DataError, match=r"row 0 of .*train.parquet"):
        check_columns(case.config, case.manager, dataset, dataset, False)


def test_a_function_of_ones_own_may_do_without(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    case.manager = NaiveRewardManager(case.tokenizer, 0, lambda **kwargs: 1.0)
    checked(case, [{TRUTH: {"ground_truth": None}}] * 3)
    (warning,) = [r.getMessage() for r in caplog.records if "ground_truth" in r.getMessage()]
    assert "null, NaN or empty in 3 rows" in warning and "row 1 of" in warning
    with pytest.raises(DataError, match="row 1 of"):  # nothing to hand on
        checked(case, [{TRUTH: {}}])


def test_a_registered_scorer_may_do_without(case: Case) -> None:
    register_scorer("own_of_columns")(lambda solution_str, ground_truth: 1.0)
    checked(case, [{SOURCE: "own_of_columns", TRUTH: {"ground_truth": None}}])


def test_rows_that_a_reward_model_judges_may_do_without(case: Case) -> None:
    row = {TRUTH: {"style": "model", "ground_truth": None}}
    case.config.reward_model.enable = True
    case.config.reward_model.rollout.name = "vllm"
    checked(case, [row])
    case.config.reward_model.enable = False
    with pytest.raises(DataError):
        checked(case, [row])


@pytest.mark.parametrize("source", [None, 3])
def test_rows_find_their_scorer_by_a_text(case: Case, source: Any) -> None:
    with pytest.raises(DataError, match=rf"'data_source' .*holds no text in row 1 .*\({source}\)"):
        checked(case, [{SOURCE: source}])
    case.manager = NaiveRewardManager(case.tokenizer, 0, lambda **kwargs: 1.0)
    checked(case, [{SOURCE: source}])


@pytest.mark.parametrize("truth", [None, float("nan")])
def test_what_is_found_late_ends_the_scoring(truth: Any) -> None:
    """Items of a data set of the user's own, and rows of agents, are not checked at the start."""
    with pytest.raises(DataError, match="'openai/gsm8k' needs a ground truth"):
        default_compute_score("openai/gsm8k", "#### 1", truth)

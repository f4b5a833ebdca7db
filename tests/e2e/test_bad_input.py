"""A mistake gives one message that names it, exit status 2, and nothing half-written."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from caldera.trainer.main_ppo import main

if TYPE_CHECKING:
    from tests.conftest import Lab

ONE_STEP = ("trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.test_freq=1")

# What is given, and what the message must hold. `{here}` is a folder with the files made below.
MISTAKES: dict[str, tuple[str, list[str]]] = {
    "missing train file": (
        "data.train_files={here}/nope.parquet",
        ["data.train_files", "nope.parquet", "does not exist"],
    ),
    "missing validation file": (
        "data.val_files={here}/nope.parquet",
        ["data.val_files", "nope.parquet", "does not exist"],
    ),
    "file that is no parquet": (
        "data.train_files={here}/garbage.parquet",
        ["data.train_files", "cannot read", "garbage.parquet"],
    ),
    "missing prompt column": (
        "data.train_files={here}/no_prompt.parquet",
        ["data.prompt_key='prompt'", "no_prompt.parquet", "reward_model"],
    ),
    "missing source column": (
        "data.train_files={here}/no_data_source.parquet",
        ["data.train_files", "no_data_source.parquet", "'data_source'", "data.reward_fn_key"],
    ),
    "missing ground truth": (
        "data.train_files={here}/no_reward_model.parquet",
        ["data.train_files", "no_reward_model.parquet", "'reward_model'", "ground truth"],
    ),
    "missing ground truth of validation": (
        "data.val_files={here}/no_reward_model.parquet",
        ["data.val_files", "no_reward_model.parquet", "'reward_model'", "ground truth"],
    ),
    "data source without scorer": (
        "data.train_files={here}/unknown_source.parquet",
        ["'nobody/knows'", "caldera/arithmetic", "custom_reward_function.path"],
    ),
    "empty train set": (
        "data.train_files={here}/empty.parquet",
        ["data.train_files", "no rows", "empty.parquet"],
    ),
    "empty validation set": (
        "data.val_files={here}/empty.parquet",
        ["data.val_files", "no rows", "empty.parquet"],
    ),
    "prompt too long": (
        "data.max_prompt_length=3",
        ["train.parquet", "5 tokens", "data.max_prompt_length=3", "data.truncation"],
    ),
    "missing scorer": (
        "custom_reward_function.path={here}/absent.py",
        ["custom_reward_function", "absent.py", "does not exist"],
    ),
    "scorer that is no Python": (
        "custom_reward_function.path={here}/no_python.py",
        ["custom_reward_function", "SyntaxError: '(' was never closed", "no_python.py:2"],
    ),
    "scorer that cannot be imported": (
        "custom_reward_function.path={here}/imports.py",
        ["custom_reward_function", "ModuleNotFoundError", "'no_such_library'", "imports.py:2"],
    ),
    "scorer with other arguments": (
        "custom_reward_function.path={here}/other.py",
        ["custom_reward_function", "other.py", "compute_score(answer, truth)", "solution_str"],
    ),
    "mini-batch that does not divide": (
        "actor_rollout_ref.actor.ppo_mini_batch_size=7",
        ["data.train_batch_size=25", "actor_rollout_ref.actor.ppo_mini_batch_size=7"],
    ),
    "batch larger than the data": (
        "data.train_batch_size=50",
        ["25 rows", "data.train_batch_size=50"],
    ),
    "mistyped key": (
        "actor_rollout_ref.actor.ppo_minibatch_size=5",
        ["ppo_minibatch_size", "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"],
    ),
    "value of the wrong type": ("trainer.total_epochs=many", ["trainer.total_epochs", "'many'"]),
    "unknown estimator": (
        "algorithm.adv_estimator=gripo",
        ["algorithm.adv_estimator", "'gripo'", "grpo"],
    ),
    "unknown policy loss": (
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanila",
        ["policy_loss.loss_mode", "'vanila'", "vanilla"],
    ),
    "unknown sampler": (
        "actor_rollout_ref.rollout.name=natve",
        ["rollout", "'natve'", "native"],
    ),
    "unknown logger": ("trainer.logger=[consol]", ["logger", "'consol'", "console"]),
    "missing model": ("actor_rollout_ref.model.path={here}/no_model", ["no_model", "not exist"]),
    "refused key": (
        "actor_rollout_ref.actor.use_prefix_grouper=True",
        ["use_prefix_grouper=True is not supported", "computed once a sample"],
    ),
    "refused sampler": (
        "actor_rollout_ref.rollout.name=trtllm",
        ["actor_rollout_ref.rollout.name='trtllm'", "native"],
    ),
    "run folder that is a file": (
        "trainer.default_local_dir={here}/garbage.parquet",
        ["trainer.default_local_dir", "garbage.parquet"],
    ),
    "checkpoint that is not there": (
        "trainer.resume_from_path={here}/global_step_7",  # with resume_mode, below
        ["trainer.resume_from_path", "global_step_7"],
    ),
}
# Of these, all that the message needs is in the configuration, the data and the reward function.
BEFORE_A_MODEL_IS_LOADED = {
    **{
        name: MISTAKES[name]
        for name in (
            "missing source column",
            "missing ground truth",
            "missing ground truth of validation",
            "data source without scorer",
            "prompt too long",
            "missing scorer",
            "scorer with other arguments",
            "checkpoint that is not there",
        )
    },
    "data source of validation without scorer": (
        "data.val_files={here}/unknown_source.parquet",
        ["data.val_files", "unknown_source.parquet", "'nobody/knows'", "custom_reward_function"],
    ),
    "unknown agent loop": (
        "data.train_files={here}/unknown_agent.parquet",
        ["'tool_agnt'", "agent_name", "did you mean 'tool_agent'?"],
    ),
    "unknown reward manager": (
        "reward_model.reward_manager=nave",
        ["reward_model.reward_manager", "'nave'", "did you mean 'naive'?"],
    ),
    "option that no scorer takes": (
        "reward_model.reward_kwargs.method=strict",
        ["reward_model.reward_kwargs.method='strict'", "'caldera/arithmetic'"],
    ),
    "scorer without the function": (
        "custom_reward_function.path={here}/empty.py",
        ["custom_reward_function", "empty.py", "compute_score"],
    ),
    "missing tools": (
        "actor_rollout_ref.rollout.multi_turn.tool_config_path={here}/absent.yaml",
        ["multi_turn.tool_config_path", "absent.yaml", "does not exist"],
    ),
    "folder of answers that is a file": (
        "trainer.validation_data_dir={here}/garbage.parquet",
        ["trainer.validation_data_dir", "garbage.parquet"],
    ),
    "missing critic": (
        "critic.model.path={here}/no_critic",  # with a critic, below
        ["critic.model.path", "no_critic", "no such folder"],
    ),
}
IN_A_PROCESS_OF_THEIR_OWN = ["missing train file", "mistyped key", "missing scorer"]


@pytest.fixture(scope="module")
def here(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that something is wrong with."""
    folder = tmp_path_factory.mktemp("bad")
    table = pq.read_table(lab.train_file)
    for column in ("prompt", "data_source", "reward_model"):
        pq.write_table(table.drop_columns([column]), folder / f"no_{column}.parquet")
    pq.write_table(table.slice(0, 0), folder / "empty.parquet")
    rows = [{**row, "data_source": "nobody/knows"} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "unknown_source.parquet")
    rows = [{**row, "agent_name": "tool_agnt"} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "unknown_agent.parquet")
    (folder / "empty.py").touch()
    shutil.copytree(lab.model, folder / "no_weights", ignore=lambda *_: {"model.safetensors"})
    (folder / "garbage.parquet").write_bytes(b"no parquet")
    (folder / "no_python.py").write_text("\ndef compute_score(\n")
    (folder / "imports.py").write_text("\nimport no_such_library\n")
    (folder / "other.py").write_text("def compute_score(answer, truth): return 1.0\n")
    return folder


@pytest.fixture(scope="module")
def finished(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with their checkpoints."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    lab.train(folder, "trainer.total_training_steps=2", "trainer.save_freq=1")
    return folder


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """The entry point sets logging up for its process, which here is the tests'."""
    root, own = logging.getLogger(), logging.getLogger("caldera")
    handlers, levels = list(root.handlers), (root.level, own.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(
    lab: Lab, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    arguments, expected = _case(lab, here, tmp_path, mistake)
    status = main(arguments)
    _assert_one_message(status, capsys.readouterr().err, expected)
    _assert_no_checkpoint(tmp_path)


@pytest.mark.parametrize("mistake", BEFORE_A_MODEL_IS_LOADED)
def test_a_mistake_is_named_before_a_model_is_loaded(
    lab: Lab, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    arguments, expected = _case(lab, here, tmp_path, mistake)
    status = main([*arguments, f"actor_rollout_ref.model.path={here}/no_weights"])
    _assert_one_message(status, capsys.readouterr().err, expected)


def test_a_model_without_weights_is_named(
    lab: Lab, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = lab.overrides(tmp_path, f"actor_rollout_ref.model.path={here}/no_weights")
    _assert_one_message(main(arguments), capsys.readouterr().err, ["no_weights", "safetensors"])


@pytest.mark.parametrize("mistake", IN_A_PROCESS_OF_THEIR_OWN)
def test_a_mistake_is_named_on_the_command_line(
    lab: Lab, here: Path, tmp_path: Path, mistake: str
) -> None:
    arguments, expected = _case(lab, here, tmp_path, mistake)
    done = lab.run(arguments)
    _assert_one_message(done.returncode, done.stderr, expected)
    assert "Traceback" not in done.stdout
    _assert_no_checkpoint(tmp_path)


def _remove_folder(run: Path) -> None:
    shutil.rmtree(run / "global_step_2")


def _garble_tracker(run: Path) -> None:
    (run / "latest_checkpointed_iteration.txt").write_text("second")


def _remove(name: str) -> Callable[[Path], None]:
    return lambda run: (run / "global_step_2" / name).unlink()


def _truncate(name: str) -> Callable[[Path], None]:
    def harm(run: Path) -> None:
        path = run / "global_step_2" / name
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])

    return harm


WEIGHTS = "actor/dist_ckpt/__0_0.distcp"


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        pytest.param(_remove_folder, ["global_step_2", "resume_mode=disable"], id="folder gone"),
        pytest.param(_garble_tracker, ["'second'", "resume_mode=disable"], id="tracker garbled"),
        pytest.param(_remove(WEIGHTS), [WEIGHTS, "is missing"], id="weights gone"),
        pytest.param(_remove("data.pt"), ["data.pt"], id="data order gone"),
        pytest.param(_truncate("data.pt"), ["data.pt"], id="data order cut"),
        pytest.param(_truncate("trainer_state.json"), ["trainer_state.json"], id="state cut"),
        pytest.param(_truncate(WEIGHTS), ["step_2/actor", "bytes instead of"], id="weights cut"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    lab: Lab,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
    expected: list[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    harm(run)
    before = _names(run)
    status = main(lab.overrides(run, "trainer.total_training_steps=3", "trainer.save_freq=1"))
    _assert_one_message(status, capsys.readouterr().err, expected)
    assert _names(run) == before


def test_a_checkpoint_of_other_data_is_refused(
    lab: Lab, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    status = main(lab.overrides(run, "data.train_batch_size=5"))
    expected = ["data.train_batch_size", "was 25", "is 5"]
    _assert_one_message(status, capsys.readouterr().err, expected)


def _case(lab: Lab, here: Path, run: Path, mistake: str) -> tuple[list[str], list[str]]:
    override, expected = (MISTAKES | BEFORE_A_MODEL_IS_LOADED)[mistake]
    more = [*ONE_STEP, override.format(here=here)]
    if override.startswith("trainer.resume_from_path"):
        more.append("trainer.resume_mode=resume_path")
    if override.startswith("critic."):
        more.append("algorithm.adv_estimator=gae")
    if override == "data.train_batch_size=50":
        more.append("actor_rollout_ref.actor.ppo_mini_batch_size=50")
    return lab.overrides(run / "run", *more), expected


def _assert_one_message(status: Any, errors: str, expected: list[str]) -> None:
    assert status == 2
    assert "Traceback" not in errors
    assert errors.count("caldera: error: ") == 1
    assert errors.startswith("caldera: error: ")
    for piece in expected:
        assert piece in errors


def _assert_no_checkpoint(folder: Path) -> None:
    assert not [name for name in _names(folder) if "global_step" in name or "iteration" in name]


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}

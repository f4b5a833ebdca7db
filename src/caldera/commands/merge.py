"""`caldera merge --local-dir ...`: its options, and verl's."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from caldera.errors import ConfigError, UnsupportedError
from caldera.trainer.entry import OptionsCommand, text_parser

HELP = """\
Make a Hugging Face folder out of a checkpoint, whichever strategy and number of
ranks wrote it, and check it: transformers loads the folder, and its logits must
be those of the checkpoint's shards, to the last bit. The folder appears only if
they are.

  caldera merge --local-dir RUN/global_step_20/actor --target-dir MODEL
  caldera merge --local-dir RUN/global_step_20/actor --target-dir MODEL --adapter merge
  caldera merge test --local-dir RUN/global_step_20/actor --test-hf-dir MODEL
"""


def parser() -> argparse.ArgumentParser:
    """What the command takes: Caldera's options, and verl's."""
    merge = text_parser("caldera merge", HELP)
    merge.add_argument(
        "operation",
        nargs="?",
        choices=["merge", "test"],
        default="merge",
        help="merge, the default; or test: compare all tensors with a folder that exists",
    )
    _add_folders(merge)
    merge.add_argument(
        "--adapter",
        choices=["keep", "merge"],
        default="keep",
        help="a LoRA adapter stays one, or becomes part of the weights (keep)",
    )
    merge.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="precision of the weights that are written (that of the checkpoint)",
    )
    for name, text in (
        ("is-value-model", "a critic; told from the checkpoint's names otherwise"),
        ("tie-word-embedding", "the language head is the embedding, whatever the config says"),
        ("trust-remote-code", "run code that comes with the model"),
    ):
        merge.add_argument(*_spellings(name), action="store_true", help=text)
    merge.add_argument(
        "--backend", default="fsdp", help="fsdp or megatron: their files are the same"
    )
    for name in ("private", "use-cpu-initialization"):  # verl's, which mean nothing here
        merge.add_argument(*_spellings(name), action="store_true", help=argparse.SUPPRESS)
    merge.add_argument(*_spellings("hf-upload-path"), help=argparse.SUPPRESS)
    return merge


def _add_folders(merge: argparse.ArgumentParser) -> None:
    merge.add_argument(
        *_spellings("local-dir"),
        type=Path,
        required=True,
        metavar="DIR",
        help="the checkpoint: global_step_N/actor, .../critic, or global_step_N for its actor",
    )
    merge.add_argument(
        *_spellings("target-dir"), type=Path, metavar="OUT", help="folder to write, which is new"
    )
    merge.add_argument(
        *_spellings("test-hf-dir"),
        type=Path,
        metavar="DIR",
        help="with test: the folder to compare",
    )
    merge.add_argument(
        *_spellings("hf-model-path"),
        type=Path,
        metavar="DIR",
        help="folder with the model's config and tokenizer (huggingface, in the checkpoint)",
    )


def _spellings(name: str) -> list[str]:
    """An option with dashes and, as verl has some, with underscores."""
    return sorted({f"--{name}", f"--{name.replace('-', '_')}"})


def work(parsed: argparse.Namespace) -> None:
    """Merge, or compare."""
    _check_merge(parsed)
    from caldera.commands.merging import MergeOptions, compare, merge

    names = [each.name for each in fields(MergeOptions)]
    options = MergeOptions(**{name: getattr(parsed, name) for name in names})
    if parsed.operation == "test":
        compare(options, parsed.test_hf_dir)
    else:
        merge(options, parsed.target_dir)


def _check_merge(parsed: argparse.Namespace) -> None:
    if parsed.backend not in ("fsdp", "megatron"):
        raise UnsupportedError(f"--backend={parsed.backend}: takes fsdp, megatron")
    if parsed.hf_upload_path is not None:
        raise UnsupportedError(
            f"--hf-upload-path={parsed.hf_upload_path}: nothing is uploaded; "
            "`hf upload` does that with the folder"
        )
    if parsed.operation == "merge" and parsed.target_dir is None:
        raise ConfigError("caldera merge needs --target-dir: a folder to write, which is new")
    if parsed.operation == "test" and parsed.test_hf_dir is None:
        raise ConfigError("caldera merge test needs --test-hf-dir: the folder to compare")


MERGE = OptionsCommand(parser, work)
main = MERGE.main

if __name__ == "__main__":
    sys.exit(main())

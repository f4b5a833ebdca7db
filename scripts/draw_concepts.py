"""Draw the pictures of docs/concepts.md: `python scripts/draw_concepts.py` writes docs/assets.

Colours follow the reader's light or dark scheme; letters are wide enough for a phone.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "docs/assets"
WIDTH = 600
STYLE = """
svg { --ink: #1f2933; --soft: #52606d; --line: #7b8794; --plain: #f1f5f9; --edge: #cbd5e1;
  --hot: #ffedd5; --hot-edge: #ea580c; --cool: #dbeafe; --cool-edge: #2563eb;
  --green: #dcfce7; --green-edge: #15803d; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #f5f5f4; --soft: #b8b2ac; --line: #a8a29e; --plain: #33302e; --edge: #57534e;
    --hot: #4a1d0a; --hot-edge: #fb923c; --cool: #172a54; --cool-edge: #60a5fa;
    --green: #0b3a1e; --green-edge: #4ade80; }
}
text { fill: var(--ink); font: 15px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.title { font-weight: 650; font-size: 16px; }
.soft { fill: var(--soft); font-size: 14px; }
.key { fill: var(--soft); font: 13px ui-monospace, Menlo, Consolas, monospace; }
.cell { font: 13px ui-monospace, Menlo, Consolas, monospace; }
.plain { fill: var(--plain); stroke: var(--edge); }
.hot { fill: var(--hot); stroke: var(--hot-edge); }
.cool { fill: var(--cool); stroke: var(--cool-edge); }
.green { fill: var(--green); stroke: var(--green-edge); }
.frame { fill: none; stroke: var(--edge); stroke-dasharray: 5 4; }
.arrow { fill: none; stroke: var(--line); stroke-width: 1.8; marker-end: url(#head); }
#head path { fill: var(--line); }
"""


class Picture:
    """An SVG that grows by shapes."""

    def __init__(self, height: int, label: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(label)}">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 10 5 0 10z"/></marker>'
            "</defs>",
        ]

    def box(self, x: int, y: int, width: int, height: int, kind: str = "plain") -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" class="{kind}"/>'
        )

    def text(self, x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> None:
        kinds = f' class="{kind}"' if kind else ""
        where = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.parts.append(f'<text x="{x}" y="{y}"{kinds}{where}>{escape(text)}</text>')

    def arrow(self, path: str) -> None:
        self.parts.append(f'<path d="{path}" class="arrow"/>')

    def write(self, name: str) -> None:
        text = "\n".join([*self.parts, "</svg>\n"])
        (ASSETS / name).write_text(text, encoding="utf-8")


PHASES = (
    ("Row", "plain", "prompts of one batch, from your files", "prompt, data_source, ..."),
    ("Rollout", "cool", "the sampler writes n responses to each", "responses, response_mask"),
    ("Score", "green", "your reward function rates each of them", "token_level_scores"),
    ("Evaluate", "hot", "log-probs; with a critic also values", "old_log_probs, ref_log_prob"),
    ("Advantage", "green", "better or worse than expected?", "advantages, returns"),
    ("Update", "hot", "gradients, mini-batch by mini-batch", "actor/pg_loss, actor/grad_norm"),
)


def draw_step() -> None:
    """One batch, from row to weight."""
    picture = Picture(470, "A step: row, rollout, score, evaluate, advantage, update, and again")
    for number, (name, kind, does, adds) in enumerate(PHASES):
        y = 12 + 76 * number
        picture.box(62, y, 132, 50, kind)
        picture.text(128, y + 31, name, "title", "middle")
        picture.text(212, y + 21, does)
        picture.text(212, y + 42, adds, "key")
        if number:
            picture.arrow(f"M128 {y - 26}V{y - 2}")
    picture.arrow("M62 417H36Q24 417 24 405V125Q24 113 36 113H60")
    picture.parts.append(
        '<text transform="translate(15 265) rotate(-90)" class="soft" text-anchor="middle">'
        "new weights, next batch</text>"
    )
    picture.write("concept-step.svg")


def draw_weights() -> None:
    """The policy, the sampler, and what goes between them."""
    picture = Picture(366, "The engine holds the policy, the sampler writes responses")
    for x, kind, name, lines in (
        (
            10,
            "hot",
            "Engine: the policy",
            ("parameters", "gradients, optimiser", "local, fsdp, megatron"),
        ),
        (390, "cool", "Sampler", ("weights", "key/value cache", "native, vllm, sglang")),
    ):
        picture.box(x, 16, 200, 126, kind)
        picture.text(x + 100, 44, name, "title", "middle")
        for number, line in enumerate(lines):
            picture.text(x + 100, 72 + 24 * number, line, "soft", "middle")
    picture.arrow("M212 58H386")
    picture.text(300, 48, "weights, version 8", "soft", "middle")
    picture.arrow("M388 108H214")
    picture.text(300, 98, "tokens, log-probs,", "soft", "middle")
    picture.text(300, 128, "their version", "soft", "middle")
    ways = (
        ("one device, one precision", "both run the same module: nothing is copied"),
        ("an adapter (LoRA)", "only the adapter travels"),
        ("vLLM, SGLang, other layouts", "named tensors, streamed once after an update"),
    )
    for number, (where, how) in enumerate(ways):
        y = 166 + 66 * number
        picture.box(10, y, 580, 56)
        picture.text(24, y + 24, where, "title")
        picture.text(24, y + 45, how, "soft")
    picture.write("concept-weights.svg")


def draw_roles() -> None:
    """Which process holds what."""
    picture = Picture(400, "One controller calls worker groups, which live in pools of processes")
    picture.box(150, 12, 300, 62)
    picture.text(300, 38, "Controller", "title", "middle")
    picture.text(300, 60, "runs the step; holds no model", "soft", "middle")
    picture.arrow("M220 76V128")
    picture.text(212, 108, "rows, split by rank", "soft", "end")
    picture.arrow("M400 128V76")
    picture.text(408, 108, "results, joined", "soft")
    picture.box(10, 132, 400, 166, "frame")
    picture.text(22, 156, "global_pool: 3 GPUs, 3 processes", "soft")
    roles = (("policy", "hot"), ("sampler", "cool"), ("reference", "hot"), ("critic", "hot"))
    for rank in range(3):
        x = 22 + 130 * rank
        for number, (role, kind) in enumerate(roles):
            picture.box(x, 168 + 30 * number, 116, 26, kind)
            picture.text(x + 58, 186 + 30 * number, role, "", "middle")
    picture.box(424, 132, 166, 166, "frame")
    picture.text(436, 156, "reward_pool: 1 GPU", "soft")
    picture.box(436, 168, 142, 56, "green")
    picture.text(507, 201, "reward model", "", "middle")
    picture.box(10, 318, 580, 66)
    picture.text(300, 344, "Outside: functions and services", "title", "middle")
    picture.text(
        300, 368, "reward functions, tools, sandbox, retriever, served models", "soft", "middle"
    )
    picture.write("concept-roles.svg")


TOKENS = ("pad", "47", "+85", "call", "add", "132", "ok", "132", "end", "pad")
"""Of a sample with one tool call, which returned `132 ok`."""
ROWS = (
    ("input_ids", TOKENS),
    ("attention_mask", ("0", "1", "1", "1", "1", "1", "1", "1", "1", "0")),
    ("response_mask", ("", "", "", "1", "1", "0", "0", "1", "1", "0")),
    ("old_log_probs", ("", "", "", "-.2", "-.9", "0", "0", "-.1", "-.0", "0")),
    ("token_level_scores", ("", "", "", "0", "0", "0", "0", "0", "1", "0")),
    ("advantages", ("", "", "", ".7", ".7", "0", "0", ".7", ".7", "0")),
)


def draw_batch() -> None:
    """The tensors of one row."""
    cell, left, top = 42, 172, 46
    picture = Picture(330, "The tensors of one sample: prompt, response, masks, scores, advantages")
    picture.text(left + 3 * cell // 2, 18, "prompt (P)", "soft", "middle")
    picture.text(left + 3 * cell + 7 * cell // 2, 18, "response (R)", "soft", "middle")
    for x, end in ((left + 3, left + 3 * cell - 3), (left + 3 * cell + 3, left + 10 * cell - 3)):
        picture.parts.append(f'<path d="M{x} 36V28H{end}V36" fill="none" stroke="var(--line)"/>')
    for number, (key, values) in enumerate(ROWS):
        y = top + 34 * number
        picture.text(left - 10, y + 20, key, "key", "end")
        for column, value in enumerate(values):
            if not value:
                continue
            kind = "plain"
            if TOKENS[column] != "pad" and value != "0":
                kind = "green" if column < 3 else "hot" if column in (3, 4, 7, 8) else "cool"
            picture.box(left + column * cell + 1, y, cell - 3, 29, kind)
            picture.parts.append(
                f'<text x="{left + column * cell + cell // 2}" y="{y + 19}" class="cell" '
                f'text-anchor="middle">{escape(value)}</text>'
            )
    for x, y, kind, text in (
        (left, 268, "green", "prompt"),
        (left + 110, 268, "cool", "from a tool"),
        (left, 296, "hot", "sampled by the policy: trained on"),
        (left + 262, 268, "plain", "padding, or 0"),
    ):
        picture.box(x, y, 18, 18, kind)
        picture.text(x + 25, y + 14, text, "soft")
    picture.write("concept-batch.svg")


if __name__ == "__main__":
    draw_step()
    draw_weights()
    draw_roles()
    draw_batch()

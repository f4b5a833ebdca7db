"""Which tensors and columns of a batch the workers' methods read; no others are sent to them.

Those that a run does not have, such as the reference's log-probs, may be missing.
"""

from __future__ import annotations

REWARD_ROWS = "reward_rows"
"""Column of what is known of each row: for agent loops, and for scoring answers as they end."""
PROMPTS = ("input_ids", "attention_mask", "raw_prompt_ids", "sample_seed", REWARD_ROWS)
ANSWERS = ("input_ids", "attention_mask", "responses")
CONVERSATIONS = (*ANSWERS, "raw_prompt")
MASKED_ANSWERS = (*ANSWERS, "response_mask")
POLICY_LOSS = ("old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights")
VALUE_LOSS = ("values", "returns")

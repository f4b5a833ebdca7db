"""1 if the response ends with = and the right number, else 0."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.search(r"=([0-9]+)\s*$", solution_str)
    return float(found is not None and found.group(1) == ground_truth)

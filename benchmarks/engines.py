"""Samplers side by side: native, hf, vLLM and SGLang with the same model and requests, one run.

    python benchmarks/engines.py [--vllm PYTHON] [--sglang PYTHON] [--model FOLDER]
        [--requests 32] [--new-tokens 64] [--lora-rank 0]

Without --model, SmolLM2-135M. Engines whose Python is not named are left out; with --lora-rank,
which gives the model an adapter, the others are. Prints, for each,
response tokens a second (the better of two rounds), seconds until the first token could be
sampled, memory that it takes beside the model of this process, and seconds of a weight update.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM

from caldera.config import RolloutConfig
from caldera.demo import smollm2
from caldera.models.attention import ATTENTION
from caldera.rollout import ROLLOUTS, Request, Rollout, SamplingParams
from caldera.rollout.engines.rollout import EngineRollout
from caldera.rollout.engines.weights import ModuleWeights

PROMPT_TOKENS = 32
MEBIBYTE = 2**20
CPU = torch.device("cpu")


def resident(pid: int | str) -> int:
    """Bytes of a process that are its own, in memory: what it shares with others is left out."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return 1024 * sum(sizes)


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def memory(rollout: Rollout, before: int) -> int:
    """What the sampler has taken, here and in its processes."""
    pids = rollout.pids if isinstance(rollout, EngineRollout) else []
    others = sum(resident(each) for pid in pids for each in family(pid))
    return resident("self") - before + others


def make_requests(count: int, new_tokens: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(5, 1000, (count, PROMPT_TOKENS), generator=generator).tolist()
    params = SamplingParams(new_tokens, ignore_eos=True)
    return [Request(prompt, params, seed) for seed, prompt in enumerate(prompts)]


def measure(
    name: str, python: str | None, module: torch.nn.Module, requests: list[Request]
) -> list[float]:
    """Tokens a second, seconds of the start, MiB, seconds of an update."""
    new_tokens = requests[0].params.max_tokens
    config = RolloutConfig(
        name=name,
        engine_python=python,
        dtype="float32",
        max_num_seqs=len(requests),
        max_model_len=PROMPT_TOKENS + new_tokens,
        prompt_length=PROMPT_TOKENS,
        response_length=new_tokens,
    )
    before, start = resident("self"), time.perf_counter()
    rollout = ROLLOUTS[name](config, module, CPU)
    one = [Request([5], SamplingParams(1), 0)]
    rollout.generate(one)
    up = time.perf_counter() - start
    rounds = []
    for _ in range(2):
        start = time.perf_counter()
        rollout.generate(requests)
        rounds.append(time.perf_counter() - start)
    taken = memory(rollout, before)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.0001)  # a sampler that has seen these weights would have less to do
    state = [(key, each.clone()) for key, each in module.state_dict().items()]
    start = time.perf_counter()
    if isinstance(rollout, EngineRollout):
        rollout.update(ModuleWeights(module), 1)
    else:
        rollout.load_weights(state, 1)
    rollout.generate(one)
    update = time.perf_counter() - start
    if isinstance(rollout, EngineRollout):
        rollout.close()
    return [len(requests) * new_tokens / min(rounds), up, taken / MEBIBYTE, update]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--sglang", help="a Python that has SGLang")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--lora-rank", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.model or smollm2.materialise()
    module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION
    ).eval()
    for parameter in module.parameters():  # memory of its own, as a trainer's: no pages of a file
        parameter.data = parameter.data.clone()
    if arguments.lora_rank:
        lora = peft.LoraConfig("CAUSAL_LM", r=arguments.lora_rank, target_modules="all-linear")
        module = peft.get_peft_model(module, lora).eval()
    requests = make_requests(arguments.requests, arguments.new_tokens)
    pythons = {"native": None, "hf": None, "vllm": arguments.vllm, "sglang": arguments.sglang}
    sys.stdout.write("sampler   tokens/s   start s   memory MiB   update s\n")
    for name, python in pythons.items():
        if python is None and (arguments.lora_rank or name not in ("native", "hf")):
            continue
        speed, up, taken, update = measure(name, python, module, requests)
        sys.stdout.write(f"{name:8s} {speed:9.1f} {up:9.1f} {taken:12.0f} {update:10.2f}\n")


if __name__ == "__main__":
    main()

"""How fast the retriever builds, starts and answers, over passages of made-up words.

python benchmarks/retriever.py --passages 100000
python benchmarks/retriever.py --method hybrid --model MODEL --passages 2000
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import numpy

from caldera.search_agent.retriever import BuildOptions, Index, build_index

WORDS = 200_000
PASSAGE = 100
QUERY = 9
BATCH = 64


class Language:
    """Words with the frequencies of a natural language (Zipf's law)."""

    def __init__(self, seed: int) -> None:
        self._random = numpy.random.default_rng(seed)
        chances = 1 / (numpy.arange(WORDS) + 2.7)
        self._sums = numpy.cumsum(chances / chances.sum())

    def text(self, words: int) -> str:
        places = numpy.searchsorted(self._sums, self._random.random(words))
        return " ".join(f"w{place}" for place in places)


def write_corpus(path: Path, passages: int) -> None:
    language = Language(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(passages):
            contents = f'"title {number}"\n{language.text(PASSAGE)}'
            file.write(json.dumps({"id": str(number), "contents": contents}) + "\n")


def ask(host: str, port: int, queries: list[str], times: list[float]) -> None:
    connection = HTTPConnection(host, port)
    for query in queries:
        body = json.dumps({"queries": [query], "topk": 3, "return_scores": True})
        start = time.perf_counter()
        connection.request("POST", "/retrieve", body)
        connection.getresponse().read()
        times.append(time.perf_counter() - start)


def serve(index: Path, clients: int, requests: int) -> None:
    command = [sys.executable, "-m", "caldera.cli", "retriever", "serve", "--index", str(index)]
    start = time.perf_counter()
    with subprocess.Popen(
        [*command, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            match = re.match(r"http://(.+):(\d+)/retrieve", process.stdout.readline())
            assert match, "the service did not start"
            print(f"start of the service, whole process   {time.perf_counter() - start:8.2f} s")
            language, times = Language(2), list[float]()
            threads = [
                threading.Thread(
                    target=ask,
                    args=(
                        match[1],
                        int(match[2]),
                        [language.text(QUERY) for _ in range(requests)],
                        times,
                    ),
                )
                for _ in range(clients)
            ]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            took = time.perf_counter() - start
            print(
                f"{clients} clients, one query a request       {len(times) / took:8.0f} queries/s"
            )
            for share in (50, 99):
                print(f"  p{share} {numpy.percentile(times, share) * 1e3:39.1f} ms")
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--method", default="bm25")
    parser.add_argument("--model")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=50, help="of each client")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus, index = Path(folder) / "corpus.jsonl", Path(folder) / "index"
        write_corpus(corpus, options.passages)
        start = time.perf_counter()
        build_index([corpus], index, BuildOptions(options.method, options.model))
        print(
            f"building of {options.passages} passages         {time.perf_counter() - start:8.1f} s"
        )
        start = time.perf_counter()
        opened = Index(index)
        print(f"opening                               {time.perf_counter() - start:8.2f} s")
        language = Language(1)
        queries = [language.text(QUERY) for _ in range(16 * BATCH)]
        start = time.perf_counter()
        for first in range(0, len(queries), BATCH):
            opened.search(queries[first : first + BATCH], 3)
        took = time.perf_counter() - start
        print(f"batches of {BATCH}                         {len(queries) / took:8.0f} queries/s")
        serve(index, options.clients, options.requests)


if __name__ == "__main__":
    main()

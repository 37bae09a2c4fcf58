"""verl's balancing, timed. Runs in the environment of requirements/verl.txt and imports nothing of this project.

python verl_balance.py      # a line {"costs": [...], "parts": k} in, a line {"cpu_s": ..., "parts": [[...], ...]} out
"""

from __future__ import annotations

import json
import sys
import time

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


def main() -> None:
    """Answers until stdin ends."""
    for line in sys.stdin:
        task = json.loads(line)
        start = time.process_time()
        parts = get_seqlen_balanced_partitions(task["costs"], task["parts"], equal_size=True)
        seconds = time.process_time() - start
        print(json.dumps({"cpu_s": seconds, "parts": parts}), flush=True)


if __name__ == "__main__":
    main()

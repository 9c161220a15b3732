"""Write docs/reference/conformance.md from what ``zeco verify --settings all --record`` found."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

RECORD = Path("benchmarks/results/conformance_float64.json")
PAGE = Path("docs/reference/conformance.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    record = json.loads(given.record.read_text())
    worst: dict[str, dict[str, float]] = defaultdict(dict)
    for key, error in record["figures"]["largest_relative_error_against_the_oracle"].items():
        operator, setting, _ = key.split(" | ")
        worst[operator][setting] = max(error, worst[operator].get(setting, 0.0))
    settings = list(dict.fromkeys(s for row in worst.values() for s in row))
    lines = [
        "# Conformance",
        "",
        "Largest relative error, against the token-by-token oracle in fp64, of outputs, states and",
        "all gradients, over the methods zeco, lasp1, lasp2 and ulysses (where the heads divide) and",
        "over 1 to 4 ranks; at most 1e-10 is asked for. `zeco.testing.cases` has the settings.",
        "",
        f"From `{given.record}`: `{record['command']}`, commit {record['commit'][:10]}.",
        "",
        "| setting | " + " | ".join(worst) + " |",
        "| --- |" + " --- |" * len(worst),
    ]
    for setting in settings:
        cells = [f"{row.get(setting, float('nan')):.0e}" for row in worst.values()]
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    given.page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

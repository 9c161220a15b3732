from __future__ import annotations

import json
from pathlib import Path

from zeco.benchmarks.record import write_record


def test_record_keeps_what_is_needed_to_repeat(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    write_record(path, command="zeco verify", figures={"largest_error": 1e-12})
    record = json.loads(path.read_text())
    assert record["command"] == "zeco verify"
    assert record["figures"] == {"largest_error": 1e-12}
    assert record["machine"]["cores"] >= 1
    assert {"python", "torch"} <= set(record["versions"])
    assert "commit" in record
    assert "date" in record

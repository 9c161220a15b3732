"""What the user sees of a run, and the file that keeps it: rank 0's side of the loop."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zeco.training.baselines import bits
from zeco.training.step import Evaluation, StepResult

METRICS_FILE = "metrics.jsonl"


class Reporter:
    """Shows a run's progress and appends every step to a JSONL file.

    In a terminal there is a bar; elsewhere a line every ``log_every`` steps.

    Args:
        console: where to show.
        out: the run's folder, or None to write nothing, as on all ranks but one.
        num_steps: of the whole run.
        first_step: steps done before, by the run that this one resumes.
        log_every: steps between lines.
    """

    def __init__(
        self,
        console: Console,
        *,
        out: Path | None,
        num_steps: int,
        first_step: int = 0,
        log_every: int = 20,
    ) -> None:
        self.console = console
        self.num_steps, self.log_every = num_steps, log_every
        self._file = None
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            path = out / METRICS_FILE
            kept = _records_until(path, first_step)
            path.write_text("".join(kept), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")
        self._bar = None
        if console.is_terminal and not console.quiet:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=num_steps, completed=first_step, text="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()

    def say(self, text: str) -> None:
        """Show a line."""
        self.console.print(text, highlight=False)

    def step(self, step: int, result: StepResult, *, rate: float, sequence_tokens: int) -> None:
        """Report a step.

        Args:
            step: steps done, this one included.
            result: what it measured.
            rate: its learning rate.
            sequence_tokens: tokens of its sequences, over all ranks and replicas.
        """
        tokens_per_s = sequence_tokens / result.seconds
        text = (
            f"{bits(result.loss):.3f} bits/token  {tokens_per_s:,.0f} tokens/s  "
            f"{result.wait_share:.1%} waiting"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif step % self.log_every == 0 or step in (1, self.num_steps):
            self.say(f"step {step}/{self.num_steps}  {text}")
        self._write(
            {
                "step": step,
                "loss": result.loss,
                "bits_per_token": bits(result.loss),
                "learning_rate": rate,
                "gradient_norm": result.gradient_norm,
                "tokens_per_s": tokens_per_s,
                "wait_share": result.wait_share,
            }
        )

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Report an evaluation."""
        self.say(
            f"held-out after {step} steps: {bits(found.loss):.4f} bits/token, "
            f"{found.accuracy:.1%} right"
        )
        self._write(
            {
                "step": step,
                "held_out_loss": found.loss,
                "held_out_bits_per_token": bits(found.loss),
                "held_out_accuracy": found.accuracy,
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def _records_until(path: Path, step: int) -> list[str]:
    """Return the lines of an earlier run that a resumed one goes on from."""
    if step == 0 or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if json.loads(line)["step"] <= step]

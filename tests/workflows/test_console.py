"""What is printed on the terminal."""

from __future__ import annotations

import io

from lt2_platform.wording import amount
from lt2_workflows.console import Console, duration, progress_line, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(**values):
    return {"step": "pretrain", "event": "progress", "values": values}


def test_progress_line():
    values = {"step": 1200, "steps": 4000, "loss": 3.21456, "tokens_per_s": 4210.4, "eta_s": 80}
    assert progress_line(values) == "step 1,200/4,000  loss 3.2146  4,210 tokens/s  ETA 1m20s"
    assert progress_line({"message": "reading"}) == "reading"
    assert progress_line({"message": "copa", "batch": 3, "batches": 1250}) == "copa  batch 3/1,250"
    assert progress_line({"layer": 2, "layers": 24}) == "layer 2/24"
    assert progress_line({"part": 2, "parts": 8}) == "part 2/8"
    assert progress_line({"message": "mine", "batch": 1200}) == "mine  batch 1,200"  # a task of one's own, say
    sweep = {"step": 3, "steps": 6, "counts": "trials ended", "message": "lr-1: training step 35, loss 3.1"}
    assert progress_line(sweep) == "trials ended 3/6  lr-1: training step 35, loss 3.1"


def test_progress_is_rewritten_in_place_and_cleared_before_the_next_line():
    stream = Terminal()
    console = Console(stream)
    console.say(progress(step=1, steps=2, loss=4.0))
    console.say(progress(step=2, steps=2))
    console.say({"step": "pretrain", "event": "done", "attempt": 1})
    shown = stream.getvalue()
    assert shown.count("\n") == 1
    assert shown.split("\r")[-1] == "pretrain   done\n"


def test_without_a_terminal_progress_is_sparse_lines():
    stream = io.StringIO()
    console = Console(stream)
    for step in range(50):
        console.say(progress(step=step, steps=50))
    assert stream.getvalue() == "pretrain   step 0/50\n"
    console.say(progress(step=7, steps=9) | {"step": "other"})  # which runs beside it
    assert stream.getvalue().endswith("other      step 7/9\n")
    console.say(progress(waiting="waiting for 2 places"))  # said once, so it is always shown
    assert stream.getvalue().endswith("pretrain   waiting for 2 places\n")


def test_what_is_told_once_stays():
    for stream in (Terminal(), io.StringIO()):
        console = Console(stream)
        console.say(progress(step=1, steps=2))
        console.say(progress(notice="7 of 813 rows could not be used"))
        console.say({"step": "pretrain", "event": "done", "attempt": 1})
        lines = stream.getvalue().split("\r")[-1].splitlines()
        assert lines[-2:] == ["pretrain   7 of 813 rows could not be used", "pretrain   done"]


def test_numbers():
    assert [duration(s) for s in (4.4, 80, 11_100)] == ["4s", "1m20s", "3h05m"]
    assert [amount(n) for n in (982, 1.53e6, 2.4e12, 3e21)] == ["982", "1.53M", "2.4T", "3.00e21"]
    assert [amount(n) for n in (0, 999.9, -999.9, 999_600, 999.6e12)] == ["0", "1k", "-1k", "1M", "1.00e15"]


def test_table_aligns_numbers_to_the_right():
    rows = [{"name": "a", "value": 1.5}, {"name": "longer", "value": 12345.678}]
    assert table(rows, ["name", "value"]).splitlines() == [
        "name        value",
        "------  ---------",
        "a             1.5",
        "longer  12,345.68",
    ]


def test_table_says_yes_and_no():
    rows = [{"early_exit": False, "n": 1}, {"early_exit": True, "n": 20}]
    assert table(rows, ["early_exit", "n"]).splitlines() == [
        "early_exit   n",
        "----------  --",
        "no           1",
        "yes         20",
    ]

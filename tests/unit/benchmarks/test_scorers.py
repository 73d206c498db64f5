from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from residual_mass.benchmarks.catalogue import Doc, both_scores, harness_config, saturated
from residual_mass.spec.tasks import BENCHMARKS

pytestmark = pytest.mark.usefixtures("few_words")

TASKS = [(benchmark, task.name) for benchmark, tasks in BENCHMARKS.items() for task in tasks]
QA = ("ruler", "ruler_qa_squad")
WHERE = {"question": "Where is Mary? ", "target": "kitchen"}


def doc_of(benchmark: str, task: str, variant: int) -> Doc:
    """A hand-made example with the fields that the benchmark's examples have."""
    if benchmark == "ruler":
        several = task.endswith(("multiquery", "multivalue", "vt", "cwe", "fwe"))
        return {"outputs": [f"{variant}{number}97" for number in range(4 if several else 1)], "max_length": 1024}
    if benchmark == "babilong":
        questions = ("Who gave the apple to Mary?", "What did Fred give to Bill?")
        gift = task.endswith("qa5")
        target = (("Jeff", "milk") if gift else ("garden", "office"))[variant]
        return {"question": questions[variant] if gift else "Where?", "target": target}
    summaries = (
        "The agency spent less than planned. Auditors asked for a new schedule; Congress agreed.",
        "Remote controls sold poorly because buyers found rubber buttons ugly! Marketing wants yellow plastic.",
    )
    answers = summaries if task.endswith(("gov_report", "qmsum")) else ("Ada Moreau", "nineteen days")
    return {"answers": [answers[variant]], "input": "Who?", "all_classes": None, "length": 900}


def gold(doc: Doc) -> str:
    return " ".join(doc["outputs"]) if "outputs" in doc else doc.get("target") or doc["answers"][0]


@pytest.mark.parametrize(("benchmark", "task"), TASKS)
@pytest.mark.parametrize(
    "form", ["", "{0}", "It is {0}\x00.", "none of these.", "{1} {0}", "\x1f{2}\n\n", "{0} {0}\tthe"]
)
def test_score_is_that_of_the_harness_s_own_configuration(benchmark: str, task: str, form: str) -> None:
    config = harness_config(benchmark, task)
    doc = doc_of(benchmark, task, 0)
    answer = gold(doc)
    text = form.format(answer, gold(doc_of(benchmark, task, 1)), answer[: len(answer) // 2].upper())
    expected = config["process_results"](doc, [text])
    metric = {"ruler": "1024", "babilong": "acc"}.get(benchmark) or config["metric_list"][1]["metric"]
    if benchmark == "longbench":
        assert {entry["metric"] for entry in config["metric_list"]} == {"score", metric}
    assert both_scores(benchmark, task, doc, text)[0] == expected[metric]


@pytest.mark.parametrize(
    ("text", "harness", "original"),
    [
        ("Ada Moreau", 0.5, 1.0),
        ("the engineer ADA MOREAU built it", 0.5, 1.0),
        ("Ada Moreau, i.e. engineer Moreau", 1.0, 1.0),
        ("Ada\x00Moreau", 0.0, 0.0),
    ],
)
def test_one_reference_suffices_for_ruler_s_authors(text: str, harness: float, original: float) -> None:
    doc = {"outputs": ["Ada Moreau", "engineer Moreau"], "max_length": 1024}
    assert both_scores(*QA, doc, text) == (harness, original)


@pytest.mark.parametrize(
    ("question", "target", "text", "harness", "original"),
    [
        (WHERE["question"], "kitchen", "The most recent location of Mary is kitchen. The office", 1, 1),
        (WHERE["question"], "kitchen", "\n\nKITCHEN\nQuestion: Where is John", 1, 1),
        (WHERE["question"], "kitchen", "kitchen, not the office.", 1, 0),
        (WHERE["question"], "kitchen", "office", 0, 0),
        (WHERE["question"], "kitchen", "kitchen<context>office", 1, 1),
        (WHERE["question"], "kitchen", "kitchen <EXAMPLE> office", 1, 1),
        (WHERE["question"], "kitchen", "<example> kitchen", 1, 0),
        (WHERE["question"], "kitchen", "kitchen\nQuestion: Where is the office?", 1, 0),  # authors do not cut here
        ("Where was the apple before the kitchen?", "office", "office, before the kitchen", 1, 1),
        ("Where was the apple before the kitchen?", "office", "the kitchen", 0, 0),
        ("Where?", "kitchen,office", "office and kitchen", 0, 1),
        ("Where?", "kitchen,office", "kitchen,office,garden", 1, 0),
    ],
)
def test_babilong_s_authors_want_the_target_alone_in_the_first_sentence(
    question: str, target: str, text: str, harness: float, original: float
) -> None:
    doc = {"question": question, "target": target}
    assert both_scores("babilong", "babilong_qa2", doc, text) == (harness, original)


@pytest.mark.parametrize(
    ("benchmark", "doc", "text", "expected"),
    [
        ("ruler", {"outputs": ["11", "22"], "max_length": 64}, "22 11", True),
        ("ruler", {"outputs": ["11", "22"], "max_length": 64}, "22 1", False),
        ("ruler", {"outputs": ["Ada", "Ada Moreau"], "max_length": 64}, "ada moreau", True),
        ("ruler", {"outputs": ["Ada", "Ada Moreau"], "max_length": 64}, "ada", False),  # the harness counts both
        ("ruler", {"outputs": ["ΑΣ"], "max_length": 64}, "ΑΣ", False),  # would change with the next letter
        ("ruler", {"outputs": ["ΑΣ"], "max_length": 64}, "ΑΣ Β", True),
        ("ruler", {"outputs": ["a\nb"], "max_length": 64}, "a\x00b", True),
        ("ruler", {"outputs": ["b "], "max_length": 64}, "b ", False),  # stripped, so not there yet
        ("babilong", WHERE, "kitchen", False),  # the sentence goes on
        ("babilong", WHERE, "kitchen.", True),
        ("babilong", WHERE, "office. kitchen", True),  # right for the harness, settled for the authors
        ("babilong", WHERE, "kitchen <Context", False),
        ("babilong", WHERE, "kitchen <Context>", True),
        ("longbench", {"answers": ["yes"]}, "yes", False),
    ],
)
def test_saturated_texts(benchmark: str, doc: Doc, text: str, expected: bool) -> None:
    assert saturated(benchmark, doc, text) is expected


NOISE = [*"\n\x00\x1f \t.'İﬁΣα", "no", "Mary", "...", "<context>", "<exa", "mple>", "Question"]


def texts(words: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*words, *NOISE]), max_size=8).flatmap(
        lambda parts: st.sampled_from(["", " "]).map(lambda between: between.join(parts))
    )


@st.composite
def substring_cases(draw: st.DrawFn) -> tuple[Doc, str, str]:
    pool = ["42", "4", "2\n4", "Σ", "αΣ", "ΑΣ'", "İn", "No. 4", "4 2", "kit", " 4", "."]
    outputs = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    doc = {"outputs": outputs, "max_length": 1024}
    return doc, draw(texts([*outputs, *pool])), draw(texts(pool))


@st.composite
def babilong_cases(draw: st.DrawFn) -> tuple[Doc, str, str]:
    labels = ["kitchen", "Office", "garden", "hall", "way", "kit", "chen"]
    question = draw(st.sampled_from(["Where is Mary?", "Where was she before the office?"]))
    doc = {"question": question, "target": draw(st.sampled_from(["kitchen", "office", "garden "]))}
    return doc, draw(texts([doc["target"], *labels])), draw(texts(labels))


@given(substring_cases(), st.sampled_from(["niah_multiquery", "ruler_qa_squad"]))
def test_nothing_changes_a_saturated_ruler_score(case: tuple[Doc, str, str], task: str) -> None:
    doc, text, continuation = case
    if saturated("ruler", doc, text):
        assert both_scores("ruler", task, doc, text + continuation) == both_scores("ruler", task, doc, text) == (1, 1)


@given(babilong_cases())
def test_nothing_changes_a_saturated_babilong_score(case: tuple[Doc, str, str]) -> None:
    doc, text, continuation = case
    if saturated("babilong", doc, text):
        scores = both_scores("babilong", "babilong_qa3", doc, text)
        assert both_scores("babilong", "babilong_qa3", doc, text + continuation) == scores
        assert scores[0] == 1

"""Writes a small assets folder: haystack, QA sets, sentence tables, tokenizer and a random Llama."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from tests.records import give_manifest, recorded

from residual_mass.files import jsonl, sha256_of
from residual_mass.texts.frozen_prompts import table_sha256

MODEL_ID = "tests/Tiny-Llama"
REVISION = "r1"

HAYSTACK = """
A harbour town keeps two calendars. One follows the school year and the other follows the tide, and nobody who
lives there confuses them. When the herring come in, lessons start an hour later. Mr. Okafor, who taught
geometry for thirty years, used to say that the sea had never once handed in its homework on time. He said it
kindly. The pupils drew nets instead of circles. Old machines are easier to love than new ones. You can see
where they were mended. A press from the last century shows every bolt that somebody tightened by hand, and
the dents tell you which part was dropped. Dr. Lindqvist repaired such presses in a shed behind the bakery.
She wrote the date on the inside of each cover. Some covers carry eleven dates. What makes a good question? It
should be possible to be wrong about it. People who ask how long a river is learn that the answer depends on
the ruler, and they go home happier than those who wanted a number. The best questions come back larger. Bread
wants patience more than strength. The dough rises while you read, and it does not care what you read. If the
kitchen is cold, wait. If the kitchen is warm, wait less. Write down what you did, because next week you will
remember it wrongly.
"""

PARAGRAPHS = [
    tuple(line.split(": ", 1))
    for line in """
Lantern Bridge: The Lantern Bridge was finished in 1871 by the engineer Ada Moreau. It has seven arches of granite.
Korvel Observatory: The Korvel Observatory stands at 2,140 metres. Its first director was the astronomer Tomas Reyl.
Salt Road: The Salt Road joined the port of Besh to the inland markets. Caravans took nineteen days to cross it.
Miller's Fern: Miller's fern grows only on wet limestone. The botanist Ines Duarte described it in the year 1902.
Quill Opera: The Quill Opera premiered in the spring of 1933. Its overture lasts fourteen minutes without a pause.
Ostrava Prize: The prize was first given to the chemist Lena Holt. It is worth forty thousand crowns every year.
Tarn Lighthouse: Tarn Lighthouse sends two white flashes every nine seconds. Its keeper was once Jonas Beck.
Velt Railway: The Velt Railway climbs eight hundred metres in eleven kilometres. It was electrified in 1924.
Harrow Library: Harrow Library holds the notebooks of the painter Mina Sol. It opened with three thousand volumes.
Glass Valley: Glass Valley is named after its furnaces. The last furnace was put out by Emil Strand in 1958.
""".strip().splitlines()
]
"""Titles and texts of two sentences."""

QUESTIONS = [
    ("Who finished the Lantern Bridge?", "Ada Moreau"),
    ("Who was the first director of the Korvel Observatory?", "Tomas Reyl"),
    ("How many days did caravans take to cross the Salt Road?", "nineteen"),
    ("In which year was Miller's fern described?", "1902"),
    ("How long is the overture of the Quill Opera?", "fourteen minutes"),
    ("Who was first given the prize?", "Lena Holt"),
    ("Who once kept Tarn Lighthouse?", "Jonas Beck"),
    ("When was the Velt Railway electrified?", "1924"),
    ("Whose notebooks does Harrow Library hold?", "Mina Sol"),
    ("Who put out the last furnace of Glass Valley?", "Emil Strand"),
]


def write_assets(assets: Path) -> None:
    """Everything a study with data_source assets reads; the manifest lists nothing."""
    _write(assets / "haystack" / "PaulGrahamEssays.json", {"text": HAYSTACK})
    _write(assets / "qa" / "squad.json", _squad())
    _write(assets / "qa" / "hotpotqa.json", _hotpotqa())
    _books(assets / "corpora" / "books")
    _sentence_tables(assets / "nltk_data" / "tokenizers" / "punkt_tab" / "english")
    _model(assets / "models" / "tiny-llama")
    give_manifest(assets)


def freeze_prompts(
    manifest: Path, benchmark: str, length: str, docs: dict[str, list[dict[str, Any]]], texts: Iterable[str] = (),
    tokenizer: str = "tiny",
) -> Path:  # fmt: skip
    """Prompts with the given docs by task and their manifest; of the haystack, unless texts are given for each task."""
    manifest.parent.mkdir(parents=True, exist_ok=True)
    tasks = {}
    for task, of_task in docs.items():
        found = [*texts] or [f"{i}. {HAYSTACK[60 * i : 60 * i + 900]}" for i in range(len(of_task))]
        rows = [
            {"task": task, "index": i, "prompt": f"{task} {text}", "max_generation_tokens": 16, "stop": [], "doc": doc}
            for i, (text, doc) in enumerate(zip(found, of_task, strict=True))
        ]
        (file := manifest.parent / f"{task}.jsonl").write_text(jsonl(rows))
        tasks[task] = {"file": file.name, "sha256": sha256_of(file), "examples": len(rows), "data": "original"}
    content = {
        "benchmark": benchmark, "length": length, "tokenizer": tokenizer, "harness": {},
        "examples": max(map(len, docs.values())), "tasks": tasks, "left_out": {}, "sha256": table_sha256(tasks),
    }  # fmt: skip
    manifest.write_text(json.dumps(content))
    return recorded(manifest)


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _squad() -> dict[str, Any]:
    def question(text: str, answer: str) -> dict[str, Any]:
        return {"question": text, "is_impossible": False, "answers": [{"text": answer}, {"text": f"the {answer}"}]}

    articles = [
        {
            "title": title,
            "paragraphs": [
                {"context": context, "qas": [question(*asked)]},
                *({"context": PARAGRAPHS[(i + step) % 10][1], "qas": []} for step in (4, 6)),
            ],
        }
        for i, ((title, context), asked) in enumerate(zip(PARAGRAPHS, QUESTIONS, strict=True))
    ]
    articles[0]["paragraphs"][0]["qas"].append({"question": "Why?", "is_impossible": True, "answers": []})
    return {"data": articles}


def _hotpotqa() -> list[dict[str, Any]]:
    def item(number: int, question: str, answer: str) -> dict[str, Any]:
        paragraphs = [PARAGRAPHS[number], PARAGRAPHS[(number + 3) % 10]]
        return {
            "_id": f"item-{number}",
            "type": "bridge" if number % 4 else "comparison",
            "question": question,
            "answer": answer,
            "supporting_facts": [[title, 0] for title, _ in paragraphs],
            "context": [[title, _sentences(text)] for title, text in paragraphs],
        }

    return [item(number, *asked) for number, asked in enumerate(QUESTIONS)]


def _sentences(text: str) -> list[str]:
    """As HotpotQA splits a paragraph: the space between two sentences leads the second."""
    first, _, second = text.partition(". ")
    return [f"{first}.", f" {second}"]


def _books(folder: Path) -> None:
    """Two books of 300 sentences between Project Gutenberg's headers and footers, as its files have them."""
    keepers = ("The miller", "An old pilot", "Mr. Halloran", "The clockmaker's son", "Nobody in the valley")
    doings = ("waited for the snow", "mended nets by lamplight", "sold pears at the gate", "wrote long letters home")
    reasons = ("since winter was near,", "for the bridge was closed,", "as the elders had asked,")
    ends = ("and the dogs slept.", "but no ship came.", "and it was soon forgotten.", "though few believed.", "twice!")
    lines = [" ".join(parts) for parts in product(keepers, doings, reasons, ends)]
    lines = [lines[7 * number % len(lines)] for number in range(len(lines))]  # neighbours differ
    paragraphs = ["\n".join(lines[at : at + 6]) for at in range(0, len(lines), 6)]
    first = "\n\n".join(["THE VALLEY", "CHAPTER I.", *paragraphs])
    second = "\n\n".join(["Produced by the tests", "THE GATE", "Contents\n\n1. Snow", *reversed(paragraphs)])
    folder.mkdir(parents=True)
    (folder / "books.txt").write_text(
        f"{first}\nThe Project Gutenberg eBook of The Gate\n\nThis header belongs to no book.\n"
        f"*** START OF THE PROJECT GUTENBERG EBOOK THE GATE ***\n\n{second}\n\nEnd of Project Gutenberg's The Gate\n\n"
        "*** END OF THE PROJECT GUTENBERG EBOOK THE GATE ***\n\nThis licence belongs to no book.\n"
    )


def _sentence_tables(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("dr\nmr\n")
    (folder / "collocations.tab").write_text("##number##\tmetres\n")
    (folder / "sent_starters.txt").write_text("the\n")
    (folder / "ortho_context.tab").write_text("the\t46\nbread\t34\n")


def _model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from wonderwords import RandomWord

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=12000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "  # ruler_vt's
    texts = [HAYSTACK, 100 * noise, *(text for _, text in PARAGRAPHS), *(text for text, _ in QUESTIONS)]
    words = [word for category in RandomWord()._categories.values() for word in category]
    bpe.train_from_iterator([*texts, " ".join(words)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=bpe.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)

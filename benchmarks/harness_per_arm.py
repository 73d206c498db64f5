"""Compares the time of decoding all arms as one batch from one prefill with one run of lm-eval's own Hugging Face model
per arm. Texts and scores must be equal.

Both sides get the same RULER examples and the harness's own limits on generated tokens. The harness side is the usual
way to evaluate a decoding method: `HFLM` over the patched model, once for every method and budget.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from common import SMOL, report

from residual_mass.benchmarks import ruler
from residual_mass.benchmarks.catalogue import Doc, both_scores, harness_requests, harness_task
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.generate import partial_kv
from residual_mass.model.loading import Backbone, load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec
from residual_mass.timing import time_in_turns

ARMS = [ArmSpec("full")] + [ArmSpec(m, b) for m in ("topk", "topk_phi", "topk_phi_nosub") for b in (2.0, 4.0, 8.0)]
Answers = list[list[tuple[str, float]]]
"""Texts and scores by arm, then by task and example."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--phi", type=Path, default=Path("results/phi/smol_2k.safetensors"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--tasks", nargs="+", default=["niah_single_2", "ruler_vt"])
    parser.add_argument("--examples", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()

    backbone = load_backbone(SMOL, options.assets)
    phi, data = PhiMaps.load(options.phi), ruler.assets_data(options.assets)
    for length in options.lengths:
        docs = {
            task: ruler.build_examples(task, backbone.tokenizer, length, options.examples, 0, data)
            for task in options.tasks
        }
        ours: list[Answers] = []
        theirs: list[Answers] = []
        sides = {
            "one harness run per arm": lambda docs=docs, seen=theirs: seen.append(per_arm(backbone, phi, docs)),
            "shared prefill, arms as a batch": lambda docs=docs, seen=ours: seen.append(together(backbone, phi, docs)),
        }
        timings = time_in_turns(sides, options.rounds)
        if any(answers != ours[0] for answers in (*ours, *theirs)):
            raise SystemExit(f"the two sides answer differently at {length} tokens: {ours[0]} and {theirs[0]}")
        scores = [score for of_arm in ours[0] for _, score in of_arm]
        mean = sum(scores) / len(scores)
        print(f"{len(ARMS)} arms, equal texts and scores (mean {mean:.3f}), {torch.get_num_threads()} threads")
        report(f"{len(docs)} tasks x {options.examples} examples at {length} tokens, {backbone.device}", timings)


def together(backbone: Backbone, phi: PhiMaps, docs: dict[str, list[Doc]]) -> Answers:
    """Answers as `generate` and `score` do, with prompts that fit into one batch."""
    engine = SharedPrefillEngine(backbone, ARMS, AnchorSpec(), phi, nominal_length=None)
    examples = [(task, doc) for task, of_task in docs.items() for doc in of_task]
    requests = [request for task, of_task in docs.items() for request in harness_requests("ruler", task, of_task)]
    limits = [settings["max_gen_toks"] for _, settings in requests]
    rows = engine.generate([backbone.encode(prompt) for prompt, _ in requests], limits)
    answers: Answers = [[] for _ in ARMS]
    for (task, doc), row in zip(examples, rows, strict=True):
        for arm, generation in enumerate(row):
            text = backbone.tokenizer.decode(generation.tokens, skip_special_tokens=True)
            answers[arm].append((text, both_scores("ruler", task, doc, text)[0]))
    return answers


def per_arm(backbone: Backbone, phi: PhiMaps, docs: dict[str, list[Doc]]) -> Answers:
    """Answers by the harness, in one run for every arm."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it advises on every run
    lm = HFLM(backbone.model, tokenizer=backbone.tokenizer, batch_size=sum(map(len, docs.values())))
    answers: Answers = []
    for arm in ARMS:
        budget = None if arm.budget_percent is None else arm.budget_percent / 100
        tasks: dict[str, Any] = {task: harness_task("ruler", task, of_task) for task, of_task in docs.items()}
        with partial_kv(backbone.model, method=arm.method, budget=budget, phi=phi):
            samples = evaluator.evaluate(lm, tasks, bootstrap_iters=0, log_samples=True)["samples"]
        answers.append([(s["resps"][0][0], s[str(s["doc"]["max_length"])]) for task in docs for s in samples[task]])
    return answers


if __name__ == "__main__":
    main()

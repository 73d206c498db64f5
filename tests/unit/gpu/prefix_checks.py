"""Checks of a prefix's terms in Triton kernels, under the interpreter and on a GPU; `test_triton.py` runs them.

The reference is torch in float64 on the same numbers that the kernels get.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from step_problems import DecodeProblem
from tests.conftest import TINY, byte_tokenizer, tiny_llama
from torch import Tensor
from torch.utils._pytree import tree_map_only
from triton_fixtures import poisoned_scratch, small_blocks  # noqa: F401

from residual_mass.core import rel_l1
from residual_mass.core.accounting import Terms, key_features, summarise
from residual_mass.decode import backends
from residual_mass.decode.engine import SharedPrefillEngine
from residual_mass.decode.prefix import PrefixLayer, Summary, build_prefix
from residual_mass.decode.terms import ArmRows, arm_rows, read_prefix, terms_of
from residual_mass.gpu import path, terms
from residual_mass.model.loading import Backbone
from residual_mass.model.phi_maps import PhiMaps
from residual_mass.spec.arms import ArmSpec
from residual_mass.spec.settings import AnchorSpec, MapSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAPERS = ["topk", "topk_phi", "topk_phi_nosub"]
MOMENTS = ["topk_moments", "topk_moments_8", "topk_moments_shared"]
ANCHORS = AnchorSpec(2, 3)


def arms_of(methods: list[str], *budgets: float) -> list[ArmSpec]:
    return [ArmSpec(method, budget) for method in methods for budget in budgets]


@dataclass
class Problem:
    """Arms that read a prefix whose examples have their real tokens at columns [first, last) of `spans`."""

    arms: list[ArmSpec]
    spans: list[tuple[int, int]]
    length: int
    group: int = 2
    d: int = 16
    features: int = 16
    kv_heads: int = 1
    spread: float = 1.0
    offset: float = 0.0
    """Of log phi_q."""
    alike: bool = False
    """Copies of one token, so that all scores tie and which of them are read makes no difference."""
    dtype: torch.dtype = torch.float32
    anchors: AnchorSpec = ANCHORS
    seed: int = 0

    def __post_init__(self) -> None:
        rows = self.group * len(self.arms)
        made = DecodeProblem(
            self.seed, self.spans, self.length, groups=rows, kv_heads=self.kv_heads, d=self.d, features=self.features,
            spread=self.spread, dtype=self.dtype,
        )  # fmt: skip
        self.scale, columns = made.scale, torch.arange(self.length)
        self.real = torch.stack([(columns >= first) & (columns < last) for first, last in self.spans])
        self.queries = made.query.unflatten(1, (-1, rows))
        self.log_query = made.log_query.float().unflatten(1, (-1, rows)) + self.offset
        self.log_features = made.log_features
        self.keys, self.values = (x[:, :, : self.length].nan_to_num() for x in (made.cache.keys, made.cache.values))
        if self.alike:
            for x in (self.keys, self.values, self.log_features):
                x[:, :, 2:] = x[:, :, 2:3].clone()

    @property
    def any_phi(self) -> bool:
        return any(arm.needs_maps for arm in self.arms)

    def layer(self, dtype: torch.dtype) -> PrefixLayer:
        return build_prefix(self.keys.to(dtype), self.values.to(dtype), self.real, self.anchors, gapless=True)

    def summary(self, layer: PrefixLayer) -> Summary:
        """Of features rounded to float32."""
        features, log_shift = key_features(self.log_features.float(), layer.partition.mid[:, :, 0])
        features, log_shift = features.to(layer.values.dtype), log_shift.to(layer.values.dtype)
        return Summary(summarise(features, log_shift, layer.values), features)

    def ours(self) -> Terms:
        """With padding that is NaN, once summaries and moments are made."""
        clean, layer, rows = self.layer(torch.float32), self.layer(self.dtype), self.rows(DEVICE)
        given = (
            self.queries,
            self.log_query if self.any_phi else None,
            self.summary(clean) if self.any_phi else None,
            {own: clean.state(own) for own, _ in rows.own},
            layer.span,
            *(x.masked_fill(~self.real[:, None, :, None], torch.nan) for x in (layer.keys, layer.values)),
        )
        queries, log_query, summary, states, span, keys, values = tree_map_only(Tensor, lambda x: x.to(DEVICE), given)
        layer = replace(layer, keys=keys, values=values, span=span)
        layer.states.update(states)
        settings = terms.method_rows(rows)
        found = terms.kernel_terms(queries, log_query, layer, summary, rows, settings, self.scale)
        assert all(x.dtype == torch.float32 for x in found)
        return Terms(*(x.cpu() for x in found))

    def expected(self) -> Terms:
        layer, rows = self.layer(torch.float64), self.rows(torch.device("cpu"))
        reading = read_prefix(self.queries.double(), layer, rows, self.scale)
        summary = self.summary(layer) if self.any_phi else None
        return terms_of(reading, self.log_query.double() if self.any_phi else None, layer, summary, rows)

    def rows(self, device: torch.device) -> ArmRows:
        lengths = [last - first for first, last in self.spans]
        return arm_rows(self.arms, self.group, lengths, self.anchors, None, device)


def assert_same(ours: Terms, expected: Terms, tolerance: float = 2e-5) -> None:
    """Of masses in logarithms and of mean values; rows without mass are alike too."""
    some = expected.denominator > 0
    assert torch.equal(ours.denominator > 0, some)
    assert (ours.numerator[~some] == 0).all() and ours.shift.isfinite().all()
    masses = (each.log_mass()[some].double() for each in (ours, expected))
    torch.testing.assert_close(*masses, rtol=2e-6, atol=tolerance)
    means = [(each.numerator.double() / each.denominator.double().unsqueeze(-1))[some] for each in (ours, expected)]
    assert not len(means[0]) or rel_l1(*means).max() < tolerance


def tolerance_of(arms: list[ArmSpec]) -> float:
    """Parts of few tokens are cut within 1e-4 of a score, where a rounding of the score is 1e-3 of the mass."""
    return 2e-3 if any(arm.method in MOMENTS for arm in arms) else 3e-5


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("spans", [[(0, 70), (0, 41)], [(7, 70), (0, 52)], [(0, 30), (3, 8), (9, 10), (20, 26)]])
@pytest.mark.parametrize("methods", [["topk"], PAPERS, ["topk_phi_nosub"], [*PAPERS, *MOMENTS]])
def test_rows_of_several_methods_and_budgets(methods: list[str], spans: list[tuple[int, int]]) -> None:
    """From no token retrieved to all of them; examples without a mid-region, of one token, with one in the middle."""
    arms = arms_of(methods, 5.0, 30.0, 100.0)
    problem = Problem(arms, spans, length=70, group=1 if len(methods) > 3 else 2, kv_heads=2 if len(spans) == 2 else 1)
    assert_same(problem.ours(), problem.expected(), tolerance_of(arms))


@pytest.mark.parametrize(("group", "d", "features"), [(3, 128, 64), (4, 64, 64), (4, 64, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_shapes_of_llama(dtype: torch.dtype, group: int, d: int, features: int) -> None:
    arms = [*arms_of(PAPERS, 20.0), ArmSpec("topk_phi", 8.0), ArmSpec("topk_moments", 30.0)]
    problem = Problem(arms, [(0, 150)], 150, group, d, features, dtype=dtype)
    assert_same(problem.ours(), problem.expected(), tolerance_of(arms))


@pytest.mark.parametrize(("arms", "group"), [(1, 1), (5, 4), (6, 4), (23, 3)])
def test_any_number_of_rows(arms: int, group: int) -> None:
    """From 1 to 69, on both sides of a tile's 16, 32 and 64."""
    budgets = [ArmSpec(PAPERS[i % 3], 12.0 + i) for i in range(arms)]
    problem = Problem(budgets, [(0, 60)], 60, group)
    assert_same(problem.ours(), problem.expected())


@pytest.mark.parametrize(
    ("change", "tolerance"),
    [({"spread": 6.0}, 5e-3), ({"spread": 40.0}, 5e-3), ({"offset": -300.0}, 2e-4), ({"offset": 300.0}, 2e-4),
     ({"alike": True}, 2e-4)],
    ids=str,
)  # fmt: skip
def test_extremes(change: dict[str, object], tolerance: float) -> None:
    """Float32 knows a score of 1e4 to 1e-3; a residual of any size meets the exact terms; all scores tie."""
    problem = Problem(arms_of(PAPERS, 10.0, 30.0, 60.0), [(0, 60), (0, 44)], 60, **change)
    assert_same(problem.ours(), problem.expected(), tolerance)


def test_a_dropped_residual_leaves_the_exact_terms_alone() -> None:
    """However large its maps are: all is retrieved, so nothing of it is left."""
    both = Problem([ArmSpec("topk_phi", 100.0), ArmSpec("topk", 100.0)], [(0, 40)], 40, offset=200.0)
    both.queries[:, :, 2:] = both.queries[:, :, :2]
    for part in both.ours():
        torch.testing.assert_close(part[:, :, :2], part[:, :, 2:], rtol=1e-6, atol=0)


def test_maps_that_are_not_finite_show_in_their_rows_alone() -> None:
    problem = Problem([*arms_of(PAPERS, 20.0), ArmSpec("topk_moments", 20.0)], [(0, 40)], 40)
    problem.log_query[:] = torch.nan
    ours = problem.ours()
    adds = torch.tensor([arm.needs_maps for arm in problem.arms]).repeat_interleave(problem.group)
    assert torch.equal(ours.denominator.isnan(), adds.expand_as(ours.denominator))
    assert torch.equal(ours.numerator.isnan().any(-1), adds.expand_as(ours.denominator))


@pytest.mark.parametrize("tail", [0, 4])
def test_without_anchors(tail: int) -> None:
    """Also of a residual that is next to nothing."""
    arms = [*arms_of(PAPERS, 2.0, 50.0), ArmSpec("topk_moments", 2.0)]
    for offset in (0.0, -120.0):
        problem = Problem(arms, [(0, 40), (0, 3)], 40, anchors=AnchorSpec(0, tail), offset=offset)
        assert_same(problem.ours(), problem.expected(), 2e-3)


def test_an_engine_decodes_the_torch_paths_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as examples and arms leave the batch."""
    model = tiny_llama(layers=2, heads=3, kv_heads=1).to(DEVICE)
    backbone = Backbone(TINY, model, byte_tokenizer(), "tiny")
    torch.manual_seed(3)
    facts = {"model_id": TINY.model_id, "revision": TINY.revision, "length": 512}
    phi = PhiMaps(backbone.shape, MapSpec(d_emb=24, d_phi=16), facts).requires_grad_(False)
    for name, parameter in phi.named_parameters():
        if name.endswith("alpha"):
            parameter.data.normal_()
    arms = [ArmSpec("full"), *arms_of(PAPERS, 30.0), ArmSpec("topk_phi", 60.0), ArmSpec("topk_moments", 30.0)]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 258, (n,), generator=generator).tolist() for n in (60, 41, 7)]
    calls = []

    def counted(*arguments: object, **options: object) -> Terms:
        calls.append(1)
        return compute(*arguments, **options)

    compute = path.terms_over_prefix
    monkeypatch.setattr(path, "terms_over_prefix", counted)
    tokens = []
    for kernels in (False, True):
        for module in (backends, terms):
            monkeypatch.setattr(module, "kernels_run_on", lambda device, answer=kernels: answer)
        engine = SharedPrefillEngine(backbone, arms, AnchorSpec(2, 6), phi, nominal_length=None)
        tokens.append([[g.tokens for g in row] for row in engine.generate(prompts, [6, 4, 2])])
        assert len(calls) == (5 * 2 if kernels else 0)
    assert tokens[0] == tokens[1]
    assert len({tuple(row) for row in tokens[0][0]}) > 2, "the arms must differ, or equality shows nothing"

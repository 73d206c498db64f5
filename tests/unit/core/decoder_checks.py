"""What holds of whole decode steps in Triton kernels, under the interpreter as on a GPU; `test_fused_triton.py` runs
it.
"""

from __future__ import annotations

import pytest
import torch
from tests.conftest import tiny_llama

from residual_mass.core.fused import triton_path
from residual_mass.core.settings import AnchorSpec, MapSpec
from residual_mass.model import static_decode
from residual_mass.model.hook import attention_hook, prefill
from residual_mass.model.phi_maps import HeadShape, PhiMaps
from residual_mass.model.static_decode import StaticDecoder, fill_buffers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 6


@pytest.mark.parametrize("method", ["topk", "topk_phi", "topk_moments"])
def test_one_recorded_step_serves_all(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed graph does what the host asked for when it was recorded: here the host asks for step 0 every time."""
    model = tiny_llama(layers=2, heads=4, kv_heads=2).to(DEVICE)
    torch.manual_seed(3)
    phi = PhiMaps(HeadShape.of(model.config), MapSpec(d_emb=24, d_phi=16)).requires_grad_(False)
    prompts = torch.randint(2, 258, (2, 60), generator=torch.Generator().manual_seed(1)).tolist()
    first = prefill(model, prompts).next_token

    def decoder() -> StaticDecoder:
        caches = fill_buffers([prefill(model, prompts)], STEPS)
        return StaticDecoder(model, caches, method, 7, AnchorSpec(2, 6), phi, STEPS)

    with monkeypatch.context() as patch:
        patch.setattr(static_decode, "decode_attention_for", lambda *_: static_decode.torch_path.decode_attention)
        by_torch = decoder()
    expected = by_torch.run(first)
    monkeypatch.setattr(static_decode, "decode_attention_for", lambda *_: triton_path.decode_attention)
    ours = decoder()
    assert ours.sizes_on_device and not by_torch.sizes_on_device
    with torch.no_grad(), attention_hook(model, ours):
        for _ in range(2):  # a second run starts from the same prompt
            ours._begin(first)
            ours.tokens.zero_()
            for _ in range(STEPS):
                ours._advance(0)
            assert torch.equal(ours.tokens, expected)
    torch.testing.assert_close(ours.logits, by_torch.logits, rtol=1e-3, atol=1e-3)
    ours.attention = static_decode.torch_path.decode_attention  # as the GPU check compares both
    assert torch.equal(ours.run(first), expected)
    assert len(set(expected.flatten().tolist())) > 3, "tokens must differ, or equality shows nothing"

"""Text generation with a cache that grows: few programs, no copies of the cache on the host, the CPU's tokens."""

from __future__ import annotations

import pytest
import torch

import torch_xla
from xla_core.launching.host_steps import ON_HOST
from xla_core.varying import families
from xla_core.varying.padded_buffer import CUT_ON_HOST, PADDED_ON_HOST

TOKENS = 40


@pytest.fixture
def generate(turned_on, counted, compile_count):
    """A function that generates on the device and the CPU; what was counted meanwhile, by name."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()

    def run(prompt, **how):
        names = (families.PROGRAMS, PADDED_ON_HOST, CUT_ON_HOST, ON_HOST)
        given = {"max_new_tokens": TOKENS, "do_sample": False, **how}
        with torch.no_grad():
            model.to("cpu")
            wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), **given)
            model.to("xla")
            torch_xla.sync()
            before = {name: counted(name) for name in names}, compile_count()
            ids = prompt.to("xla")
            tokens = model.generate(ids, attention_mask=torch.ones_like(prompt).to("xla"), **given)
        assert torch.equal(tokens.cpu(), wanted)
        counts = {name: counted(name) - before[0][name] for name in names}
        return counts | {"compiled": compile_count() - before[1]}

    return run


def test_greedy_generation_takes_three_programs(generate):
    counts = generate(torch.randint(3, 97, (2, 7)))
    # the prompt's, the first token's, and one for all others
    assert counts["compiled"] == 3 and counts[families.PROGRAMS] == 1
    # keys and values of two layers, ids and mask: what the first token's program gave
    assert counts[PADDED_ON_HOST] <= 6 and counts[CUT_ON_HOST] == 0
    assert counts[ON_HOST] == 3
    # another prompt: its own program, and nothing for the tokens
    counts = generate(torch.randint(3, 97, (2, 9)))
    assert counts["compiled"] == 1 and counts[CUT_ON_HOST] == 0


def test_beam_search_takes_few_programs(generate):
    counts = generate(torch.randint(3, 97, (2, 7)), num_beams=3)
    assert counts["compiled"] <= 5 and counts[families.PROGRAMS] == 1
    assert counts[PADDED_ON_HOST] <= 6 and counts[CUT_ON_HOST] <= 6

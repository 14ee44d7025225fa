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
def as_it_is(turned_on, monkeypatch):
    """Nothing is set."""
    monkeypatch.delenv("XLA_VARYING_SHAPES")


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

    def run(prompt, streamers=({}, {}), **how):
        names = (families.PROGRAMS, PADDED_ON_HOST, CUT_ON_HOST, ON_HOST)
        given = {"max_new_tokens": TOKENS, "do_sample": False, **how}
        with torch.no_grad():
            model.to("cpu")
            mask = torch.ones_like(prompt)
            wanted = model.generate(prompt, attention_mask=mask, **streamers[0], **given)
            model.to("xla")
            torch_xla.sync()
            before = {name: counted(name) for name in names}, compile_count()
            ids, mask = prompt.to("xla"), mask.to("xla")
            tokens = model.generate(ids, attention_mask=mask, **streamers[1], **given)
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


@pytest.mark.parametrize(("beams", "most"), [(1, 3), (3, 5)], ids=["greedy", "beams"])
def test_generation_takes_as_few_programs_where_nothing_is_set(as_it_is, generate, beams, most):
    counts = generate(torch.randint(3, 97, (2, 7)), num_beams=beams)
    assert counts["compiled"] <= most and counts[families.PROGRAMS] == 1
    assert counts[ON_HOST] == 3


class Streamer:
    """Keeps the tokens that it is given, each when it is there."""

    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens.append(tokens.tolist())

    def end(self):
        pass


def test_what_is_done_between_two_tokens_shares_a_program_too(as_it_is, generate):
    # the token is read, then another step asks whether it was the last one
    read = [Streamer(), Streamer()]
    counts = generate(
        torch.randint(3, 97, (1, 7)), [{"streamer": one} for one in read], eos_token_id=96
    )
    assert read[0].tokens == read[1].tokens and len(read[1].tokens) > 5
    assert counts["compiled"] <= 8

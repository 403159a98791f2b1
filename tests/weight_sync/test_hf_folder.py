"""A publication seen as a Hugging Face folder: transformers and our own loader read the weights."""

from __future__ import annotations

import torch
from tiny import tiny_model, write_tiny_model
from transformers import AutoModelForCausalLM

from areal.models.hf_io import build_model, load_hf
from areal.weight_sync.hf_folder import folder_with_lm_head, hf_folder_of
from areal.weight_sync.publication import open_publication, publish


def test_every_loader_reads_the_published_weights(tmp_path):
    base = write_tiny_model(tmp_path / "base", seed=0)
    (base / "tokenizer.json").write_text("{}")
    sent = tiny_model(seed=5)
    publish(sent.named_hf_tensors(), tmp_path / "v3", 3, bucket_bytes=4096)
    publication = open_publication(tmp_path / "v3", version=3)
    folder = hf_folder_of(publication, base)
    assert len(publication.manifest.buckets) > 1
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert not (folder / "model.safetensors").exists()  # the old weights'

    ours = build_model(folder, device="cpu", dtype=torch.float32)
    load_hf(ours, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in sent.named_hf_tensors():
        assert torch.equal(dict(ours.named_hf_tensors())[name], tensor)
        assert torch.equal(theirs[name], tensor)

    assert hf_folder_of(publication, base) == folder  # made once
    open_publication(tmp_path / "v3", version=3)  # and no part of what is verified


def test_a_tied_head_becomes_a_weight_of_its_own(tmp_path):
    base = write_tiny_model(tmp_path / "base", seed=0)
    sent = tiny_model(seed=5)
    embedding = dict(sent.named_hf_tensors())["model.embed_tokens.weight"]
    publish(sent.named_hf_tensors(), tmp_path / "v3", 3)
    folder = hf_folder_of(open_publication(tmp_path / "v3"), base, with_lm_head=True)
    untied = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=False)
    assert torch.equal(untied.lm_head.weight, embedding)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight

    start = folder_with_lm_head(base, tmp_path / "start")
    assert start == tmp_path / "start"
    loaded = AutoModelForCausalLM.from_pretrained(start, tie_word_embeddings=False)
    first = dict(tiny_model(seed=0).named_hf_tensors())["model.embed_tokens.weight"]
    assert torch.equal(loaded.lm_head.weight, first)
    own = write_tiny_model(tmp_path / "own", tie_word_embeddings=False)
    assert folder_with_lm_head(own, tmp_path / "unused") == own
    assert not (tmp_path / "unused").exists()

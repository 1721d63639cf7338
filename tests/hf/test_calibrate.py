"""One pass over text sets every map: from what softmax attention sees, and closer to it than before."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
from hf_models import converted, inputs, logits, make, tokens

from reassoc import feature_maps, hf
from reassoc._errors import InputError

SIZE = {"num_features": 36}
MAPS = {"favor+": SIZE, "trig": SIZE, "codebook": SIZE, "landmark": SIZE | {"landmarks": 32}}


def text(rows=8, length=48, seed=3):
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens(rows, length, seed=seed)
    ]


@pytest.mark.parametrize("name", ["llama", "bert", "bart"])
@pytest.mark.parametrize("feature_map", MAPS)
def test_every_map_learns_what_its_own_calibration_would(name, feature_map):
    model = hf.convert(make(name), feature_map, map_options=MAPS[feature_map])
    seen = {}

    def keep(layer, query, key, value, mask, output):
        seen.setdefault(layer, []).append((query.float(), key.float(), mask))

    examples = text()
    with torch.no_grad(), hf.softmax_teacher(keep):
        for row in examples:
            model.base_model(**{part: t[None] for part, t in row.items()})
    assert hf.calibrate(model, examples, tokens=10**6) == len(list(hf.kernel_layers(model)))
    for index, layer in enumerate(hf.kernel_layers(model)):
        site = layer.site
        own = feature_maps.for_layer(
            feature_map, site.dim, site.key_heads, index, scale=site.scale, **MAPS[feature_map]
        )
        calibrator = own.calibrator()
        for batch in seen[layer]:
            calibrator.update(*batch)
        calibrator.finish()
        for (part, mine), its in zip(own.state_dict().items(), layer.feature_map.state_dict().values()):
            # The model may hold the same numbers in another precision.
            torch.testing.assert_close(mine.to(its.dtype), its, rtol=1e-5, atol=1e-6, msg=part)


@pytest.mark.parametrize("feature_map", ["codebook", "landmark"])
def test_calibrated_is_closer_to_softmax_than_random_features(feature_map):
    original = make("llama", initializer_range=0.5)
    wanted = logits(original, inputs("llama")).log_softmax(-1)

    def distance(name, options):
        model = hf.convert(copy.deepcopy(original), name, map_options=options, window=8)
        hf.calibrate(model, text())
        got = logits(model, inputs("llama")).log_softmax(-1)
        return (wanted.exp() * (wanted - got)).sum(-1).mean().item()

    assert distance(feature_map, MAPS[feature_map]) < distance("favor+", {"num_features": 36})


def test_padding_is_not_learned_from():
    found = []
    for right in (0, 9):
        model = hf.convert(make("bert"), "codebook", map_options=SIZE)
        rows = text(4, 30)
        for row in rows:
            row["input_ids"] = torch.cat([row["input_ids"], torch.full((right,), 5)])
            row["attention_mask"] = torch.cat([row["attention_mask"], torch.zeros(right, dtype=torch.int64)])
        hf.calibrate(model, rows)
        found.append(model.state_dict())
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_batches_of_several_lengths():
    model = hf.convert(make("bert"), "favor+", map_options=SIZE)
    one = copy.deepcopy(model)
    rows = text(3, 30) + text(3, 17, seed=5)
    hf.calibrate(one, rows, batch=1)
    hf.calibrate(model, rows, batch=6)
    for (name, mine), its in zip(model.state_dict().items(), one.state_dict().values(), strict=True):
        # Moments are pooled in double precision from activations in single.
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5, msg=name)


def test_modes_are_left_as_they_were():
    model = converted("llama")
    model.train()
    before = {n: p.clone() for n, p in model.named_parameters() if "reassoc" not in n}
    hf.calibrate(model, text())
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


def test_few_tokens_are_taken_from_first_to_last():
    model = hf.convert(make("llama"), "codebook", map_options=SIZE)
    seen = []
    model.model.register_forward_pre_hook(lambda _, a, k: seen.append(k["input_ids"]), with_kwargs=True)
    rows = text(8)
    hf.calibrate(model, rows, tokens=96)
    assert [torch.equal(ids[0], rows[i]["input_ids"]) for ids, i in zip(seen, (2, 6))] == [True, True]
    assert len(seen) == 2


def test_nothing_to_do_and_nothing_to_do_it_with():
    assert hf.calibrate(converted("llama", "pure"), []) == 0
    assert hf.calibrate(converted("llama", "window"), text()) == 0
    with pytest.raises(InputError, match="convert"):
        hf.calibrate(make("llama"), text())
    with pytest.raises(InputError, match="at least one example"):
        hf.calibrate(converted("llama"), [])

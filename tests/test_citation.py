"""Citations: every part of what was used is answered for, each paper once."""

import re

import pytest

import reassoc
from reassoc import _citation, feature_maps
from reassoc.nn import AttentionConfig, LanguageModel, LanguageModelConfig


def keys(*things):
    return re.findall(r"@\w+\{(\w+),", reassoc.citation(*things))


def test_nothing_named_is_the_paper_of_linear_attention():
    assert keys() == ["katharopoulos2020"]


@pytest.mark.parametrize("name", [n for n in feature_maps.names() if n != "landmark"])
def test_every_map_has_its_papers(name):
    phi = feature_maps.make(name, 8)
    found = keys(phi)
    assert set(phi.papers) <= set(found)
    assert ("yu2016" in found) == getattr(phi, "orthogonal", False)


@pytest.mark.parametrize("rule", [reassoc.rules.Sum, reassoc.rules.Decay, reassoc.rules.Delta])
def test_rules_may_be_classes(rule):
    assert set(_citation.RULE_PAPERS[rule.name]) <= set(keys(rule))


def test_a_model_answers_for_all_of_its_parts():
    attention = AttentionConfig(
        feature_map="favor+", rule="gated-delta", convolution=2, position="rotary", heads=2
    )
    model = LanguageModel(LanguageModelConfig(10, width=8, layers=2, attention=attention))
    found = keys(model)
    expected = {"choromanski2021", "yu2016", "schlag2021", "yang2025", "dao2024", "so2021", "su2024"}
    assert expected <= set(found)
    assert len(found) == len(set(found))
    plain = LanguageModel(LanguageModelConfig(10, width=8, layers=1))
    assert not expected & set(keys(plain))


def test_braces_of_every_entry_balance():
    for key in _citation._PAPERS:
        entry = _citation._entry(key)
        assert entry.count("{") == entry.count("}"), key

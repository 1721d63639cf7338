"""Random features are drawn anew when the schedule says so, everywhere alike, and never by themselves."""

import pytest
import torch
from nn_cases import BUDGET, assert_near, config, language_model, tokens

from reassoc import feature_maps
from reassoc.feature_maps import RandomFeatures
from reassoc.nn import EncoderDecoder, EncoderDecoderConfig, RedrawSchedule

RANDOM = tuple(n for n in feature_maps.names() if isinstance(feature_maps.make(n, 6), RandomFeatures))
IDS = tokens(2, 9)


def model_of(name="favor+", **options):
    return language_model(config(name, **options))


def maps(model):
    return [m for m in model.modules() if isinstance(m, RandomFeatures)]


def draws(model):
    return torch.stack([m.projections for m in maps(model)])


def test_there_are_random_maps():
    assert "favor+" in RANDOM


@pytest.mark.parametrize("name", RANDOM)
def test_redraws_come_when_they_are_due_and_agree_between_processes(name):
    one, two = model_of(name), model_of(name)
    schedules = [RedrawSchedule(m, every=3) for m in (one, two)]
    torch.manual_seed(1)
    seen = [draws(one)]
    for number in range(1, 8):
        torch.rand(number)  # whatever else draws random numbers
        due = [schedule.step() for schedule in schedules]
        assert due == [number in (4, 7)] * 2
        assert torch.equal(draws(one), draws(two))
        if due[0]:
            seen.append(draws(one))
        assert torch.equal(draws(one), seen[-1])
    assert len(seen) == 3
    # Every layer, every head and every time has a draw of its own.
    rows = torch.stack(seen).flatten(0, 2).flatten(1)
    assert len(rows) == 3 * 2 * 4
    distances = torch.cdist(rows, rows) + torch.eye(len(rows)) * 1e3
    assert distances.min() > 0.1


@pytest.mark.parametrize("position", ["none", "rotary-after"])
@pytest.mark.parametrize("name", RANDOM)
def test_a_state_from_before_a_redraw_is_refused_after_it(name, position):
    model = model_of(name, position=position)
    schedule = RedrawSchedule(model, every=1)
    assert not schedule.step()  # the first step is taken with the features that are there
    _, states = model(IDS, return_states=True)
    model.step(IDS[:, :1], states)
    assert schedule.step()
    with pytest.raises(ValueError, match=r"draw=0.*start from a new state"):
        model(IDS, states=states)
    with pytest.raises(ValueError, match=r"draw=0.*start from a new state"):
        model.step(IDS[:, :1], states)
    _, states = model(IDS, return_states=True)
    assert_near(
        model.step(IDS[:, :1], states),
        model(torch.cat([IDS, IDS[:, :1]], 1))[:, -1:],
        100 * BUDGET[torch.float64],
    )


def test_a_checkpoint_goes_on_as_if_nothing_had_happened():
    model = model_of()
    schedule = RedrawSchedule(model, every=4)
    for _ in range(6):
        schedule.step()
    saved, counted = model.state_dict(), schedule.state_dict()
    saved = {name: tensor.clone() for name, tensor in saved.items()}
    assert counted == {"steps": 6}

    other = model_of(map_options={"num_features": 6, "seed": 5})
    other.load_state_dict(saved)
    following = RedrawSchedule(other, every=4)
    following.load_state_dict(counted)
    assert torch.equal(other(IDS), model(IDS))
    for _ in range(7):
        assert schedule.step() == following.step()
        assert torch.equal(draws(other), draws(model))
        assert torch.equal(other(IDS), model(IDS))
    _, states = model(IDS, return_states=True)
    other(IDS, states=states)  # the same draw, so the same kernel


def test_nothing_is_redrawn_by_itself():
    model = model_of().train()
    RedrawSchedule(model, every=1)
    before, output = draws(model), model(IDS)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(IDS).square().mean().backward()
        optimizer.step()
    assert torch.equal(draws(model), before)
    model.eval()
    assert torch.equal(model(IDS), model(IDS))
    assert not torch.equal(model(IDS), output)


def test_an_optimizer_does_not_see_the_draws():
    assert not [n for n, _ in model_of().named_parameters() if "projections" in n]
    assert [n for n in model_of().state_dict() if "projections" in n]


def test_encoder_decoder_redraws_all_its_maps():
    torch.manual_seed(0)
    model = EncoderDecoder(
        EncoderDecoderConfig(9, 9, width=16, layers=2, attention=config("favor+", rule="decay"))
    )
    before = draws(model)
    assert len(before) == 6  # encoder, decoder and cross-attention, two layers each
    rows = before.flatten(0, 1).flatten(1)
    assert (torch.cdist(rows, rows) + torch.eye(len(rows)) * 1e3).min() > 0.1
    schedule = RedrawSchedule(model, every=1)
    assert [schedule.step(), schedule.step()] == [False, True]
    assert ((draws(model) - before).flatten(1).abs().amax(1) > 0.1).all()


def test_what_cannot_be_scheduled_is_refused():
    with pytest.raises(ValueError, match="no random feature maps: nothing to redraw"):
        RedrawSchedule(model_of("elu+1"), every=3)
    for every in (0, -1, 2.5, True, None):
        with pytest.raises(ValueError, match="every must be a whole number, at least 1"):
            RedrawSchedule(model_of(), every=every)

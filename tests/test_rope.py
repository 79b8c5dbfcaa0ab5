"""Rotary frequencies: equal to transformers' to the bit, and near
a float64 reference (case B39).
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from circuit.models.config import Family, RopeKind, RopeSpec, TargetConfig
from circuit.models.hf_config import config_from_json
from circuit.models.rope import inverse_frequencies

BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1 << 17,
    "model_type": "llama",
}
heads = st.sampled_from([8, 16, 64, 80, 96, 128, 256])
thetas = st.sampled_from([10000.0, 1e5, 5e5, 1e6, 1e7, 10001.5])
factors = st.floats(1.0, 64.0, allow_nan=False)
contexts = st.sampled_from([2048, 4096, 8192, 32768])
optional = st.none() | st.floats(0.5, 2.0)
scalings = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": factors,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
            "original_max_position_embeddings": contexts,
        }
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "factor": factors,
            "original_max_position_embeddings": contexts,
            "attention_factor": optional,
            "beta_fast": st.sampled_from([16.0, 32.0]),
            "beta_slow": st.sampled_from([1.0, 2.0]),
            "mscale": optional,
            "mscale_all_dim": optional,
            "truncate": st.booleans(),
        }
    ),
)


def load(scaling, head_dim=64, theta=10000.0, **changes):
    found = {**BASE, "head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling, **changes}
    return config_from_json("config.json", found, generation={})


@given(scaling=scalings, head_dim=heads, theta=thetas)
def test_scaled_frequencies_equal_transformers(scaling, head_dim, theta):
    ours, attention = inverse_frequencies(load(scaling, head_dim, theta))
    parameters = {**scaling, "rope_theta": theta}
    theirs = LlamaConfig(**{**BASE, "head_dim": head_dim}, rope_parameters=parameters)
    wanted, wanted_attention = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
    assert ours.dtype == torch.float32 and ours.shape == (head_dim // 2,)
    assert torch.equal(ours, wanted)
    assert attention == wanted_attention


@given(head_dim=heads, theta=thetas, position=st.sampled_from([0, 1, 4095, 4096, 131071]))
def test_plain_and_linear_angles_are_near_a_float64_reference(head_dim, theta, position):
    """B39: no scaling means plain angles; linear 4 divides them by 4; nothing is inherited."""
    exact = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    for scaling, divisor in ((None, 1.0), ({"rope_type": "linear", "factor": 4.0}, 4.0)):
        ours, attention = inverse_frequencies(load(scaling, head_dim, theta))
        assert attention == 1.0
        angles = ours.double() * position
        for angle, frequency in zip(angles.tolist(), exact):
            assert math.isclose(angle, frequency / divisor * position, rel_tol=1e-6, abs_tol=1e-12)


def test_yarn_without_attention_factor_follows_the_paper():
    scaling = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    frequencies, attention = inverse_frequencies(load(scaling))
    assert attention == 0.1 * math.log(64.0) + 1.0
    plain, _ = inverse_frequencies(load(None))
    assert frequencies[0] == plain[0]
    assert math.isclose(frequencies[-1] * 64, plain[-1], rel_tol=1e-6)


def test_stored_divisors_act_on_the_frequencies():
    divisors = tuple(1.0 + i for i in range(32))
    config = load(None)
    scaled = dataclasses.replace(
        config, rope=RopeSpec(10000.0, RopeKind.FACTORS, freq_factors=divisors)
    )
    plain, _ = inverse_frequencies(config)
    assert torch.equal(inverse_frequencies(scaled)[0], plain / torch.arange(1.0, 33.0))


def test_old_and_new_spelling_give_one_configuration():
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = load(scaling, theta=5e5)
    new = load(None, rope_theta=10000.0, rope_parameters={**scaling, "rope_theta": 5e5})
    assert old == new
    assert isinstance(old, TargetConfig) and old.family is Family.LLAMA


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope"])
def test_other_kinds_are_refused_by_name(kind):
    from circuit.models.errors import ConfigRefused

    with pytest.raises(
        ConfigRefused, match=f"rope_scaling.rope_type is '{kind}'; allowed: default"
    ):
        load({"rope_type": kind, "factor": 2.0})

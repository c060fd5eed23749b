import numpy as np
from safetensors.numpy import load_file

from preempt_offload import tiny_model


def weights(folder, seed):
    return load_file(tiny_model.write(folder, seed=seed) / "model.safetensors")


def test_a_seed_decides_the_weights(tmp_path):
    one, again, other = (weights(tmp_path / str(i), seed) for i, seed in enumerate([5, 5, 6]))
    assert one.keys() == again.keys() == other.keys()
    for name, weight in one.items():
        np.testing.assert_array_equal(weight, again[name])
        if "norm" not in name:
            assert not np.array_equal(weight, other[name])


def test_matrices_are_strong_enough_for_the_output_to_depend_on_the_kv_cache(tmp_path):
    for name, weight in weights(tmp_path, 0).items():
        if "norm" not in name and "embed" not in name:
            assert 1.9 < weight.std() * weight.shape[1] ** 0.5 < 2.1
